"""What a lossy KV cache does to a model's predictions.

A probe reads a context once and keeps the model's own next-token distributions on two tasks:

- **continuation**: the tokens that really follow the context, teacher-forced. Most of them can be
  predicted from what is near, so this alone flatters a codec that forgets.
- **recall**: early passages of the context, repeated after it. Their tokens can be predicted only
  by looking far back, so the context must really be there. The first tokens of a passage are not
  scored: the model must first notice what is being repeated.

Any other cache of the same context is then held against them: KL(reference || test) in nats per
token over the whole vocabulary. The passages and the continuation go through the model as one
batch, and the reference takes the same path with the same shapes: the exact cache scores exactly 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.engines.reading import read_whole
from kdn.engines.spread import placed
from kdn.engines.states import keeps_states, repeat, state_of
from kdn.engines.transformers import from_dynamic_cache, to_dynamic_cache
from kdn.errors import MismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PASSAGE_TOKENS = 160
UNSCORED_TOKENS = 32
PASSAGE_STARTS = (300 / 3072, 900 / 3072, 1500 / 3072)
"""Where the recall passages begin, as parts of the context."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Per-token comparison of a cache with the exact one; the figures are properties."""

    continuation_kld: Floats
    recall_klds: Floats
    top1_hits: npt.NDArray[np.bool_]
    nll: Floats

    @property
    def kld(self) -> float:
        return float(self.continuation_kld.mean())

    @property
    def kld_p99(self) -> float:
        return float(np.quantile(self.continuation_kld, 0.99))

    @property
    def recall_kld(self) -> float:
        return float(self.recall_klds.mean())

    @property
    def top1(self) -> float:
        """Part of the continuation where both caches have the same most likely token."""
        return float(self.top1_hits.mean())

    @property
    def ppl(self) -> float:
        """Perplexity of the real continuation under the tested cache."""
        return float(np.exp(self.nll.mean()))

    @classmethod
    def pooled(cls, parts: Sequence[Quality]) -> Quality:
        """All tokens of several contexts as one."""
        return cls(
            np.concatenate([p.continuation_kld for p in parts]),
            np.concatenate([p.recall_klds for p in parts]),
            np.concatenate([p.top1_hits for p in parts]),
            np.concatenate([p.nll for p in parts]),
        )


class QualityProbe:
    """Reads `tokens[:context]` with a model and compares other caches of it with the exact one.

    What follows in `tokens` is the continuation. `cache` is the exact cache, `prefill_s` the time
    it took. Holds one distribution per scored token: 0.1 GB at a vocabulary of 49,000.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        context: int,
        *,
        passage_tokens: int = PASSAGE_TOKENS,
        unscored_tokens: int = UNSCORED_TOKENS,
    ) -> None:
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
        starts = [int(part * context) for part in PASSAGE_STARTS]
        if len(ids) < context + 2:
            raise MismatchError(
                f"expected at least 2 tokens after a context of {context}, found {len(ids)} in all"
            )
        if starts[-1] + passage_tokens > context or not 0 < unscored_tokens < passage_tokens:
            raise MismatchError(
                f"a context of {context} tokens is too short for recall passages of "
                f"{passage_tokens} tokens scored after {unscored_tokens}"
            )
        self.context = context
        self._model: Any = model.eval()
        self.tokens = ids
        follow = ids[context:]
        passages = [ids[start : start + passage_tokens] for start in starts]
        self._rows = [follow, *passages]
        # A row's logits at i predict its token i + 1; all but the last of these are scored.
        self._scored = [slice(0, len(follow) - 1)]
        self._scored += [slice(unscored_tokens - 1, passage_tokens - 1)] * len(passages)
        self._batch = torch.nn.utils.rnn.pad_sequence(self._rows, batch_first=True)[:, :-1]
        self._state: State | None = None  # of recurrent layers: other caches go on from it, too
        self.cache, self.prefill_s = self._prefill()
        self._reference = self._log_probs(self.cache, None)

    @property
    def reference(self) -> Quality:
        """The exact cache held against itself: its perplexity is the one to compare with."""
        return self._compare(self._reference)

    def measure(self, cache: KVCache, kept: npt.NDArray[np.bool_] | None = None) -> Quality:
        """Compare a cache of this context. `kept` marks the tokens the model may attend to, where
        some were dropped: the others count as absent, positions stay."""
        if (cache.start, cache.num_tokens) != (0, self.context):
            raise MismatchError(
                f"expected a cache of tokens [0, {self.context}), "
                f"found [{cache.start}, {cache.end})"
            )
        return self._compare(self._log_probs(cache, kept))

    def _prefill(self) -> tuple[KVCache, float]:
        ids = self.tokens[None, : self.context].to(self._model.device)
        _synchronise(ids.device)
        begin = time.perf_counter()
        with torch.no_grad():
            past = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        _synchronise(ids.device)
        prefill_s, cache = time.perf_counter() - begin, from_dynamic_cache(past)
        if keeps_states(past):
            self._state = state_of(past)
        if not cache.is_complete:
            # What windows have dropped is coded all the same: a shorter context needs it.
            del past
            cache = read_whole(self._model, ids[0].cpu().numpy())
        return cache, prefill_s

    @torch.no_grad()
    def _log_probs(self, cache: KVCache, kept: npt.NDArray[np.bool_] | None) -> list[torch.Tensor]:
        """Log-probabilities [scored tokens, vocabulary] of each row, after the given cache."""
        device = self._model.device
        rows, width = self._batch.shape
        # The model appends to the cache it gets: each call makes a new one.
        given = _to_model(cache, self._model)
        past = to_dynamic_cache(given, self._model.config, state=self._state)
        placed(past, self._model)
        repeat(past, rows)
        inputs: dict[str, Any] = {}
        if kept is not None:
            mask = np.concatenate([kept, np.ones(width, dtype=np.bool_)])
            inputs["attention_mask"] = torch.as_tensor(mask, device=device).long().expand(rows, -1)
        positions = torch.arange(self.context, self.context + width, device=device)
        logits = self._model(
            self._batch.to(device),
            past_key_values=past,
            position_ids=positions.expand(rows, -1),
            use_cache=True,
            **inputs,
        ).logits
        return [
            torch.log_softmax(logits[row, scored].float(), dim=-1)
            for row, scored in enumerate(self._scored)
        ]

    def _compare(self, tested: list[torch.Tensor]) -> Quality:
        klds = [kld(p, q) for p, q in zip(self._reference, tested, strict=True)]
        p, q = self._reference[0], tested[0]
        targets = self._rows[0][1:].to(q.device)
        return Quality(
            continuation_kld=klds[0],
            recall_klds=np.concatenate(klds[1:]),
            top1_hits=(p.argmax(-1) == q.argmax(-1)).cpu().numpy(),
            nll=-q.gather(-1, targets[:, None])[:, 0].double().cpu().numpy(),
        )


def kld(log_p: torch.Tensor, log_q: torch.Tensor) -> Floats:
    """KL(p || q) of each row: float32 terms, summed in float64."""
    terms = log_p.exp() * (log_p - log_q)
    found: Floats = terms.sum(-1, dtype=torch.float64).cpu().numpy()
    return np.maximum(found, 0.0)


def _to_model(cache: KVCache, model: Any) -> KVCache:
    """The cache in the model's own dtype, on its device."""
    keys, values = (t.to(model.device, model.dtype) for t in (cache.keys, cache.values))
    return KVCache(keys, values, cache.start, cache.valid_from)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
