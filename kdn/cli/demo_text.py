"""The document of `kdn demo`: Python's own manual, which every installation carries."""

from __future__ import annotations

from kdn.errors import MismatchError

TOPICS = ("assert", "assignment", "del", "pass", "return", "raise", "with", "try", "for", "while")


def document(text: str | None, num_tokens: int) -> str:
    """At least `num_tokens` tokens of a text (the manual if None), and not much more."""
    from transformers import AutoTokenizer

    from kdn.engines.models import smollm2_folder

    whole = manual() if text is None else text
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    ids = tokenizer(whole, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < num_tokens:
        raise MismatchError(f"the document has {len(ids)} tokens, expected at least {num_tokens}")
    return str(tokenizer.decode(ids[:num_tokens]))


def manual() -> str:
    from pydoc_data.topics import topics

    names = [*TOPICS, *sorted(set(topics) - set(TOPICS))]
    return "\n\n".join(topics[name].strip() for name in names if name in topics)
