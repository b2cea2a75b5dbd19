"""What another cache of a context does to the answer to one question.

The model reads the context in full and answers greedily. Its distributions over that answer are the
reference: KL(reference || test) in nats at the first token of the answer and over all of it.
Contexts of the same length, such as the same pieces in several orders, are answered together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.tensors import KVCache
from kdn.engines.growing import together
from kdn.engines.quality import kld
from kdn.engines.ranking import choose, rank
from kdn.engines.reading import forward_rows
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
    """Of contexts of the same length, each read in full, and a question behind them. All of an
    answer counts, whatever it says: also what comes after an end. `row` is the number of a
    context below."""

    def __init__(
        self,
        model: Any,
        fulls: Sequence[KVCache],
        question: Sequence[int],
        count: int = ANSWER_TOKENS,
    ) -> None:
        self._model, self.question = model, list(question)
        past = self._past(fulls)
        logits = self._forward([self.question] * len(fulls), past)
        answers, reference = [], []
        for number in range(count):
            reference.append(torch.log_softmax(logits.float(), -1))
            answers.append(logits.argmax(-1))
            if number + 1 < count:
                logits = self._forward(answers[-1][:, None], past)
        self.answers: list[list[int]] = torch.stack(answers, 1).tolist()
        self._references = torch.stack(reference, 1)

    def measure(self, row: int, caches: Sequence[KVCache]) -> list[AnswerQuality]:
        """Of each of these caches instead of that context."""
        past = self._past(caches)
        return self._compare(row, self._forward([self.question] * len(caches), past), past)

    def measure_recomputed(
        self,
        row: int,
        cache: KVCache,
        tokens: Sequence[int],
        moved_from: int,
        shares: Sequence[float],
    ) -> list[AnswerQuality]:
        """With a share of the tokens recomputed where the question looks, of those from
        `moved_from` on."""
        if not shares:
            return []
        scores = rank(self._model, self._past([cache]), self.question)
        logits, pasts = [], []
        for share in shares:
            past = self._past([cache])
            chosen = choose(scores, share, [(moved_from, len(tokens))])
            logits.append(recompute(self._model, past, tokens, chosen, self.question))
            pasts.append(past)
        return self._compare(row, torch.stack(logits), together(self._model.config, pasts))

    def _compare(self, row: int, first: torch.Tensor, past: Any) -> list[AnswerQuality]:
        """`first`: logits after the question, which `past` holds, of each of its rows."""
        answer = torch.tensor([self.answers[row][:-1]] * len(first), device=first.device)
        rest = forward_rows(self._model, answer, past, every=True)
        tested = torch.log_softmax(torch.cat([first[:, None], rest], 1).float(), -1)
        reference = self._references[row]
        same = (reference.argmax(-1) == tested.argmax(-1)).cpu().numpy()
        return [
            AnswerQuality(kld(reference, one), hits) for one, hits in zip(tested, same, strict=True)
        ]

    def _forward(self, rows: Sequence[Sequence[int]] | torch.Tensor, past: Any) -> torch.Tensor:
        """Logits [rows, vocabulary] after the last token of each."""
        ids = torch.as_tensor(rows, device=self._model.device)
        return forward_rows(self._model, ids, past)[:, -1]

    def _past(self, caches: Sequence[KVCache]) -> Any:
        """A row for each, of its own: reading adds to it, and recomputing changes it."""
        like = {"device": self._model.device, "dtype": self._model.dtype}
        config = self._model.config
        pasts = [
            to_dynamic_cache(KVCache(one.keys.to(**like), one.values.to(**like)), config)
            for one in caches
        ]
        return together(config, pasts)
