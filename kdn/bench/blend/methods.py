"""Every way to the first token of an answer over several pieces, ours and others'.

Each begins with a cache that something delivered, or with none, and ends with the question read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kdn.bench.blend.cacheblend import by_deviation, first_tokens
from kdn.blend.pieces import Join
from kdn.cache.keys import Tokens
from kdn.engines.ranking import choose, rank
from kdn.engines.reading import forward
from kdn.engines.recomputing import recompute

NOTHING, FIRST, HEADLESS, JOINED, REPAIRED = "nothing", "first", "headless", "joined", "repaired"
"""What is delivered: nothing; the first piece; pieces that were learned without a head, or behind
it; the same, repaired by seams."""

SHARES = (0.05, 0.15, 0.3)
SELDOM = 3
"""Ways that take long and decide nothing are measured on every third question."""


@dataclass(frozen=True)
class Method:
    name: str
    delivered: str
    share: float = 0.0
    """Of all tokens before the question, computed anew."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.share:.0%}" if 0 < self.share < 1 else self.name

    @property
    def needs_seams(self) -> bool:
        return self.delivered == REPAIRED

    @property
    def seldom(self) -> bool:
        """Reads nearly everything, or needs pieces learned once more."""
        return self.delivered in (FIRST, HEADLESS)


FULL = Method("full", NOTHING, 1.0)
METHODS = (
    FULL,
    Method("prefix", FIRST),
    Method("join-no-head", HEADLESS),
    Method("join", JOINED),
    *(Method("cacheblend", JOINED, share) for share in SHARES[1:]),
    Method("epic", JOINED, SHARES[1]),
    *(Method("question", JOINED, share) for share in SHARES),
    Method("seams", REPAIRED),
    *(Method("seams+question", REPAIRED, share) for share in SHARES),
)
NAMES = tuple(dict.fromkeys(one.name for one in METHODS))


def read_question(
    method: Method, model: Any, past: Any, join: Join, question: Tokens
) -> tuple[torch.Tensor, float]:
    """Logits after the question, which `past` then holds, and how many tokens were computed for
    them; layers count by their part of all."""
    if not method.share or method.delivered == NOTHING:
        rest = np.concatenate([join.tokens[past.get_seq_length() :], question])
        return forward(model, rest, past), len(rest)
    num_chosen = round(method.share * join.num_tokens)
    chosen, extra = _chosen(method, model, past, join, question, num_chosen)
    logits = recompute(model, past, join.tokens, chosen, question)
    return logits, extra + len(chosen) + len(question)


def _chosen(
    method: Method, model: Any, past: Any, join: Join, question: Tokens, num_chosen: int
) -> tuple[torch.Tensor, float]:
    """Positions to compute anew, and how many tokens were computed to find them."""
    if method.name == "cacheblend":
        places, passes = by_deviation(model, past, join.tokens, num_chosen)
        return torch.from_numpy(places), passes * join.num_tokens
    if method.name == "epic":
        return torch.from_numpy(first_tokens(join, num_chosen)), 0
    moved = [(join.starts[i], join.starts[i] + join.pieces[i].num_own) for i in join.moved()]
    return choose(rank(model, past, question), method.share, moved), len(question)
