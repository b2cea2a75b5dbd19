"""Where a question looks: its attention over a cache, token by token.

Mean over layers, heads and the question's tokens. It is the pass that reads the question anyway,
with attention that keeps its weights: if nothing is recomputed then, nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import Cache, PreTrainedModel

from kdn.cache.keys import Tokens
from kdn.engines.own_attention import check_attention, no_mask, own_attention
from kdn.engines.reading import forward, read

MAX_RANKING_TOKENS = 256
"""The last ones of a question; those before are read only."""
MAX_WEIGHTS = 1 << 26
"""Held at a time."""


@dataclass
class _Weighing:
    """Attention of tokens that follow a cache, adding up how much each token of it got."""

    num_held: int
    sums: list[torch.Tensor] = field(default_factory=list)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        heads, group, length, _ = query.shape
        at_once = max(1, MAX_WEIGHTS // (group * length * key.shape[1]))
        parts = [slice(start, start + at_once) for start in range(0, heads, at_once)]
        out = [self._attend(query[part], key[part], value[part], scale) for part in parts]
        return torch.cat(out) if len(out) > 1 else out[0]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        heads, group, length, channels = query.shape
        products = (query * scale).reshape(heads, -1, channels) @ key.transpose(1, 2)
        own = products.view(heads, group, length, -1)[..., -length:]
        later = torch.ones((length, length), dtype=torch.bool, device=own.device).triu_(1)
        own.masked_fill_(later, float("-inf"))
        weights = torch.softmax(products, -1, dtype=torch.float32)
        self.sums.append(weights.sum((0, 1))[: self.num_held])
        return (weights.to(value.dtype) @ value).view(heads, group, length, -1)

    def mean(self) -> torch.Tensor:
        total = torch.stack(self.sums).sum(0)
        return total / total.sum().clamp_min(1e-30)


def read_question(
    model: PreTrainedModel, past: Cache, question: Tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a question after what `past` holds, into it: logits after its last token, and which part
    of its attention to what was there each token got, float32 [tokens]."""
    check_attention(model, past)
    held, last = past.get_seq_length(), max(0, len(question) - MAX_RANKING_TOKENS)
    assert held, "expected a cache that holds something"
    assert len(question), "expected a question"
    if last:
        read(model, question[:last], past)
    weighing = _Weighing(held)
    with own_attention(model, weighing):
        logits = forward(model, question[last:], past, mask=no_mask(model))
    return logits, weighing.mean()


def rank(model: PreTrainedModel, past: Cache, question: Tokens) -> torch.Tensor:
    """Which part of the question's attention each token of `past` gets, which stays as it is."""
    held = past.get_seq_length()
    try:
        return read_question(model, past, question)[1]
    finally:
        crop(past, held)


def crop(past: Cache, num_tokens: int) -> None:
    """Drop what comes after so many tokens, though a pass that failed has left layers uneven."""
    for layer in past.layers:
        layer.keys, layer.values = (t[:, :, :num_tokens] for t in (layer.keys, layer.values))


def choose(scores: torch.Tensor, share: float, within: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The tokens that got most, as sorted positions: `share` of all, within these ranges."""
    allowed = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    for start, end in within:
        allowed[start:end] = True
    count = min(round(share * len(scores)), int(allowed.sum()))
    best = scores.masked_fill(~allowed, -1.0).topk(count).indices
    return best.sort().values.cpu()
