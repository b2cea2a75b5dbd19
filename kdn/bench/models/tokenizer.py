"""A tokenizer for the models trained here: byte-level BPE, learned from their training text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdn.bench.models.shapes import BOS, EOS, PAD
from kdn.calibrate.corpus import Text

_NAMES = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}


def new_tokenizer(texts: Sequence[Text], vocabulary: int, positions: int) -> Any:
    """It begins every prompt with BOS. Some seconds for some 10 MB."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_NAMES[number] for number in sorted(_NAMES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Line by line: on whole documents this takes the square of their length.
    lines = (line for text in texts for line in text.content.splitlines(keepends=True))
    made.train_from_iterator(lines, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{_NAMES[BOS]} $A", special_tokens=[(_NAMES[BOS], BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=_NAMES[PAD], bos_token=_NAMES[BOS],
        eos_token=_NAMES[EOS], model_max_length=positions,
    )  # fmt: skip
