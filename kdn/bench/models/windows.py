"""What a model is trained on: windows of text, some with passages that come back.

A window begins with BOS, as prompts do. In one of four a passage is repeated later on, so that the
model learns to look back: long texts teach that as well, but not in two minutes. A model that never
looks back has a cache that hardly matters, and says nothing about a codec.

Nor does one that knows its text by heart. So in some windows (`Size.swapped`) every token stands
for another one, drawn anew for each window: there, nothing helps but what the window itself has
told, and three passages are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.bench.models.shapes import BOS, EOS
from kdn.cache.keys import TokenIds
from kdn.calibrate.corpus import Text
from kdn.errors import FormatError

REPEATING = 0.25
PASSAGES_OF_SWAPPED = 3
LEAST_PASSAGE, MOST_PASSAGE = 32, 256

Batch = npt.NDArray[np.int64]


class Windows:
    """Batches [windows, length] from anywhere in the texts, drawn with a seed."""

    def __init__(
        self,
        tokens: TokenIds,
        length: int,
        seed: int,
        repeating: float = REPEATING,
        swapped: float = 0.0,
    ) -> None:
        self.tokens, self.length = tokens, length
        self._known = np.unique(tokens[tokens > EOS])
        self._repeating, self._swapped, self._rng = repeating, swapped, np.random.default_rng(seed)
        if len(tokens) < 2 * length:
            raise FormatError(
                f"expected at least {2 * length:,} tokens of text, found {len(tokens):,}: give more"
            )

    def draw(self, count: int) -> Batch:
        body = self.length - 1
        starts = self._rng.integers(0, len(self.tokens) - body, count)
        batch = np.full((count, self.length), BOS, np.int64)
        for row, start in zip(batch, starts, strict=True):
            row[1:] = self.tokens[start : start + body]
            if self._rng.random() < self._swapped:
                row[1:] = self._other_words(row[1:])
                for _ in range(PASSAGES_OF_SWAPPED):
                    self._repeat(row)
            elif self._rng.random() < self._repeating:
                self._repeat(row)
        return batch

    def _other_words(self, body: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each token as another one, the same everywhere; special ones stay."""
        names = np.arange(max(int(self._known[-1]), EOS) + 1)
        names[self._known] = self._rng.permutation(self._known)
        return names[body]

    def _repeat(self, row: npt.NDArray[np.int64]) -> None:
        most = min(MOST_PASSAGE, (len(row) - 1) // 3)
        count = int(self._rng.integers(min(LEAST_PASSAGE, most), most + 1))
        first = int(self._rng.integers(1, len(row) - 2 * count + 1))
        again = int(self._rng.integers(first + count, len(row) - count + 1))
        row[again : again + count] = row[first : first + count]


def joined(texts: Sequence[Text], tokenizer: Any) -> TokenIds:
    """All texts, each with its end."""
    end = np.array([EOS], np.uint32)
    parts = [part for text in texts for part in (text.tokens(tokenizer), end)]
    return np.concatenate(parts)


def unigram_nats(tokens: TokenIds, other: TokenIds, vocabulary: int) -> float:
    """Loss on `other` of a model that knows nothing but how often each token occurs in `tokens`."""
    counts = np.bincount(tokens, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[other].mean())
