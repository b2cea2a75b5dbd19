"""What all models of a run are trained on: a tokenizer and token ids, made once, if at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kdn.bench.models.documents import Split
from kdn.bench.models.shapes import Size
from kdn.bench.models.tokenizer import new_tokenizer
from kdn.bench.models.windows import joined
from kdn.cache.keys import TokenIds


@dataclass(frozen=True)
class Material:
    texts: Split
    size: Size

    @cached_property
    def tokenizer(self) -> Any:
        """Takes a second for each megabyte or so."""
        return new_tokenizer(self.texts.training, self.size.vocabulary, self.size.positions)

    @cached_property
    def training(self) -> TokenIds:
        return joined(self.texts.training, self.tokenizer)

    @cached_property
    def other(self) -> TokenIds:
        """Kept out, to see what a model has learned."""
        return joined(self.texts.other, self.tokenizer)
