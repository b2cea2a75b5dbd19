"""Texts to measure on and to calibrate with: files, or prose every Python installation carries.

Windows of a text are drawn with a seed and do not overlap where the text is long enough. Each
begins as prompts do (`prompt_head`): without their first token many models compute something else.
A text used for calibration must not be measured on: `overlap` says how much of one is in the other.
"""

from __future__ import annotations

import ast
import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.cache.keys import TokenIds
from kdn.errors import FormatError

NGRAM_TOKENS = 8
OVERLAP_WARNING = 0.05
"""Part of a text's 8-grams in the calibration text from which it is no fair measure any more."""
_MIN_SHIFT = 4
"""Windows of a short text may overlap, but each begins at least 1 / _MIN_SHIFT of a window on."""


@dataclass(frozen=True)
class Text:
    name: str
    content: str

    def tokens(self, tokenizer: Any) -> TokenIds:
        """Token ids of the whole text, without any special tokens."""
        ids = tokenizer(self.content, add_special_tokens=False, verbose=False).input_ids
        return np.asarray(ids, dtype=np.uint32)


def load_text(path: Path) -> Text:
    """A .txt or .jsonl file (lines with a `context` field, joined), plain or .gz."""
    return text_of(path, _unpacked(path))


def load_contexts(path: Path) -> list[Text]:
    """Each line of a .jsonl file by itself."""
    lines = _decoded(path, _unpacked(path))
    return [
        Text(f"{path.name}:{number}", content)
        for number, content in enumerate(_contexts(lines, path), 1)
    ]


def text_of(path: Path, data: bytes) -> Text:
    """The text of a file from its bytes, unpacked, or from some of its lines."""
    name = path.name.removesuffix(".gz")
    content = _decoded(path, data)
    if name.endswith(".jsonl"):
        content = "\n\n".join(_contexts(content, path))
    return Text(name.removesuffix(".jsonl").removesuffix(".txt"), content)


def _unpacked(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path}: expected UTF-8 text, plain or gzip: {error}") from error


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: expected UTF-8 text, plain or gzip: {error}") from error


def _contexts(lines: str, path: Path) -> list[str]:
    contexts = []
    for number, line in enumerate(filter(str.strip, lines.split("\n")), 1):
        try:
            contexts.append(str(json.loads(line)["context"]))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{path}, line {number}: expected a JSON object with a 'context' field"
            ) from error
    return contexts


def default_texts() -> list[Text]:
    """The text for measurements if none is given: the language reference in `pydoc_data`."""
    from pydoc_data.topics import topics

    return [Text("python-topics", "\n\n".join(topics[name] for name in sorted(topics)))]


def default_calibration() -> list[Text]:
    """What rivals are fitted on when no text is given: the standard library's docstrings."""
    folder = Path(ast.__file__).parent
    docs = []
    for path in sorted(folder.glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs += [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
    return [Text("python-docstrings", "\n\n".join(filter(None, docs)))]


NO_HEAD: TokenIds = np.zeros(0, dtype=np.uint32)


def prompt_head(tokenizer: Any) -> TokenIds:
    """The tokens that every context to calibrate with or to measure on begins with."""
    from kdn.engines.prompts import Prompts

    return np.asarray(Prompts(tokenizer).first_tokens(), dtype=np.uint32)


def begun(head: TokenIds, body: TokenIds) -> TokenIds:
    """A window: its head, then a part of a text."""
    return np.concatenate([head, body])


def window_starts(num_tokens: int, length: int, count: int, seed: int) -> list[int]:
    """Where up to `count` windows of `length` tokens begin; fewer, or none, in a short text."""
    slack = num_tokens - count * length
    if slack >= 0:
        offsets = np.sort(np.random.default_rng(seed).integers(0, slack + 1, count))
        return [int(offset) + i * length for i, offset in enumerate(offsets)]
    room = num_tokens - length
    if room < 0:
        return []
    fitting = min(count, 1 + room * _MIN_SHIFT // length)
    return [int(start) for start in np.linspace(0, room, fitting)]


@dataclass(frozen=True)
class Sample:
    """A text and where its contexts begin in it, each behind the same head. A context's window ends
    with its continuation and one token more: the last one that is predicted."""

    name: str
    tokens: TokenIds
    context: int
    window: int
    starts: list[int]
    head: TokenIds = field(default_factory=NO_HEAD.copy)

    @classmethod
    def of(
        cls, text: Text, tokens: TokenIds, context: int, count: int, continuation: int, seed: int,
        head: TokenIds = NO_HEAD,
    ) -> Sample:  # fmt: skip
        window = context + continuation + 1
        body = window - len(head)
        starts = window_starts(len(tokens), body, count, seed)
        if not starts:
            raise FormatError(
                f"{text.name}: expected at least {body} tokens, found {len(tokens)}; "
                "choose a longer text or a smaller --context"
            )
        return cls(text.name, tokens, context, window, starts, head)

    def ids(self, start: int) -> TokenIds:
        """The window that begins there in the text."""
        return begun(self.head, self.tokens[start : start + self.window - len(self.head)])

    @property
    def overlaps(self) -> bool:
        body = self.window - len(self.head)
        return any(b - a < body for a, b in pairwise(self.starts))


def sample_windows(
    texts: Sequence[TokenIds], length: int, num_tokens: int, seed: int, head: TokenIds = NO_HEAD
) -> list[TokenIds]:
    """About `num_tokens` tokens in windows of `length`, the same number from each text."""
    per_text = max(1, round(num_tokens / length / len(texts)))
    body = length - len(head)
    return [
        begun(head, ids[start : start + body])
        for ids in texts
        if len(ids)
        for start in window_starts(len(ids), min(body, len(ids)), per_text, seed)
    ]


def overlap(tokens: TokenIds, other: TokenIds) -> float:
    """Part of the distinct 8-grams of `tokens` that also occur in `other`."""
    mine, theirs = _ngrams(tokens), _ngrams(other)
    return float(np.isin(mine, theirs).mean()) if len(mine) else 0.0


def distinct_ngrams(tokens: TokenIds) -> float:
    """How many different 8-grams `tokens` have, as a part of all: 1 if none comes back."""
    count = len(tokens) - NGRAM_TOKENS + 1
    return len(_ngrams(tokens)) / count if count > 0 else 1.0


def _ngrams(tokens: TokenIds) -> npt.NDArray[np.uint64]:
    """Distinct 8-grams as 64-bit polynomial hashes."""
    ids = tokens.astype(np.uint64)
    count = max(0, len(ids) - NGRAM_TOKENS + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(NGRAM_TOKENS):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[i : i + count] + np.uint64(1)
    return np.unique(hashes)


def windows_of(
    texts: Sequence[TokenIds], length: int, count: int, seed: int = 0, head: TokenIds = NO_HEAD
) -> list[TokenIds]:
    """Up to `count` windows of `length` tokens, in equal shares from all texts where they are long
    enough, in a seeded order. Short texts are joined first."""
    length -= len(head)
    long = [ids for ids in texts if len(ids) >= length]
    short = [ids for ids in texts if len(ids) < length]
    if short:
        long.append(np.concatenate(short))
    rng = np.random.default_rng(seed)
    queues = []
    for ids in long:
        parts = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        queues.append([parts[i] for i in rng.permutation(len(parts))])
    chosen: list[TokenIds] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return [begun(head, chosen[i]) for i in rng.permutation(len(chosen))]
