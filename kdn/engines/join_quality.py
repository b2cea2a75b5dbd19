"""What another cache of a context does to the answer to one question.

The model reads the context in full and answers greedily. Its distributions over that answer are the
reference: KL(reference || test) in nats at the first token of the answer and over all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.tensors import KVCache
from kdn.engines.quality import kld
from kdn.engines.ranking import choose, rank
from kdn.engines.reading import forward
from kdn.engines.recomputing import recompute
from kdn.engines.transformers import to_dynamic_cache

ANSWER_TOKENS = 16


@dataclass(frozen=True)
class AnswerQuality:
    """Per token of the answer."""

    klds: npt.NDArray[np.float64]
    same: npt.NDArray[np.bool_]
    """Where both have the same most likely token."""

    @property
    def first(self) -> float:
        return float(self.klds[0])

    @property
    def mean(self) -> float:
        return float(self.klds.mean())


class AnswerProbe:
    """Of one context, read in full, and a question behind it. All of the answer counts, whatever it
    says: also what comes after an end."""

    def __init__(
        self, model: Any, full: KVCache, question: Sequence[int], count: int = ANSWER_TOKENS
    ) -> None:
        self._model, self.question = model, list(question)
        past = self._past(full)
        logits = forward(model, self.question, past)
        self.answer: list[int] = []
        rows = []
        for number in range(count):
            rows.append(torch.log_softmax(logits.float(), -1))
            self.answer.append(int(logits.argmax()))
            if number + 1 < count:
                logits = forward(model, self.answer[-1:], past)
        self._reference = torch.stack(rows)

    def measure(self, cache: KVCache) -> AnswerQuality:
        past = self._past(cache)
        return self._compare(forward(self._model, self.question, past), past)

    def measure_recomputed(
        self, cache: KVCache, tokens: Sequence[int], moved_from: int, shares: Sequence[float]
    ) -> list[AnswerQuality]:
        """With a share of the tokens recomputed where the question looks, of those from
        `moved_from` on."""
        scores = rank(self._model, self._past(cache), self.question)
        found = []
        for share in shares:
            past = self._past(cache)
            chosen = choose(scores, share, [(moved_from, len(tokens))])
            first = recompute(self._model, past, tokens, chosen, self.question)
            found.append(self._compare(first, past))
        return found

    def _compare(self, first: torch.Tensor, past: Any) -> AnswerQuality:
        """`first`: logits after the question, which `past` holds."""
        rest = forward(self._model, self.answer[:-1], past, every=True)
        tested = torch.log_softmax(torch.cat([first[None], rest]).float(), -1)
        same = (self._reference.argmax(-1) == tested.argmax(-1)).cpu().numpy()
        return AnswerQuality(kld(self._reference, tested), same)

    def _past(self, cache: KVCache) -> Any:
        """Of its own: reading adds to it, and recomputing changes it."""
        like = {"device": self._model.device, "dtype": self._model.dtype}
        keys, values = (side.to(**like) for side in (cache.keys, cache.values))
        return to_dynamic_cache(KVCache(keys, values), self._model.config)
