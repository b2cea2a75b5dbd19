"""Questions read one after another over the same delivered values, which stay as they are."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from kdn.bench.blend.methods import FIRST, Method, read_question
from kdn.blend.pieces import Join
from kdn.cache.keys import Tokens
from kdn.cache.spec import ModelSpec
from kdn.engines.growing import Room, growing_cache
from kdn.engines.reading import forward


class Asked(NamedTuple):
    """After a question: `past` holds it, and what was computed anew."""

    logits: torch.Tensor
    past: Any
    computed_tokens: float
    seconds: float


class Desk:
    """`given` is delivered into; each question works on a copy of it."""

    def __init__(self, model: Any, spec: ModelSpec, join: Join, num_asked: int) -> None:
        count = join.num_tokens + num_asked
        self._model, self._join = model, join
        self.given, self._used = (Room.of(spec, count, model.dtype, model.device) for _ in range(2))

    def read_all(self) -> None:
        """One reading of everything, instead of a delivery."""
        forward(self._model, self._join.tokens, self._past(self.given, 0))

    def ask(self, method: Method, question: Tokens) -> Asked:
        """The question, read as the method does it."""
        held, given, used = num_delivered(method.delivered, self._join), self.given, self._used
        used.keys[:, :, :held].copy_(given.keys[:, :, :held])
        used.values[:, :, :held].copy_(given.values[:, :, :held])
        past = self._past(used, held)
        began_s = time.perf_counter()
        logits, computed = read_question(method, self._model, past, self._join, question)
        int(logits.argmax())  # the token that somebody waits for: it is there, on a GPU, too
        return Asked(logits, past, computed, time.perf_counter() - began_s)

    def _past(self, room: Room, num_tokens: int) -> Any:
        """What the model goes on from: the first tokens of `room`, in place."""
        past = growing_cache(self._model.config.get_text_config(decoder=True))
        past.layers = [room.layer(index, num_tokens) for index in range(len(past.layers))]
        return past


def num_delivered(kind: str, join: Join) -> int:
    """How many tokens a delivery brings of a join."""
    return join.starts[0] + join.pieces[0].num_own if kind == FIRST else join.num_tokens
