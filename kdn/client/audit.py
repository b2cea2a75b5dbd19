"""Quality audit: now and then, what a delivered cache answered is held against the model's own.

After an answer the model reads the whole prompt itself, and both caches predict the answer's
tokens: their KL divergence goes to the client's metrics. It costs a prefill each, so a share of one
in a hundred is plenty, and it runs when the answer is out.
"""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from kdn.background import fault
from kdn.client.engine import Context, Engine
from kdn.client.metrics import Metrics
from kdn.engines.reading import forward, new_cache, read


class Audit:
    def __init__(self, share: float, rng: Random, metrics: Metrics) -> None:
        self._share, self._rng, self._metrics = share, rng, metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def maybe(self, engine: Engine, context: Context, num_answer: int) -> bool:
        """Perhaps audit an answer. True if its context is now the audit's."""
        spec = engine.spec
        forgets = spec.has_windows or spec.has_states
        if forgets or not num_answer or self._rng.random() >= self._share:
            return False  # windows and states cannot be wound back to where the answer began
        task = asyncio.create_task(self._run(engine, context, num_answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _run(self, engine: Engine, context: Context, num_answer: int) -> None:
        try:
            async with engine.lock:
                klds = await asyncio.to_thread(divergences, engine, context, num_answer)
        except Exception as error:  # the answer is out: nobody else would hear of it
            self._metrics.failed_audits += 1
            fault("an audit", error)
        else:
            self._metrics.audited(klds)

    async def close(self) -> None:
        """Finish those that have begun."""
        if self._tasks:
            await asyncio.gather(*self._tasks)


def divergences(engine: Engine, context: Context, num_answer: int) -> npt.NDArray[np.float64]:
    """KLD at each token of the answer: the model's own cache beside the one it answered from."""
    model, tokens = engine.model, context.tokens
    begin = len(tokens) - num_answer - 1  # what this token is followed by is the first answer
    own = new_cache(model)
    read(model, tokens[:begin], own)
    context.past.crop(begin - context.num_tokens)
    answer = tokens[begin:-1]
    return kld(
        forward(model, answer, own, every=True), forward(model, answer, context.past, every=True)
    )


def kld(reference: torch.Tensor, tested: torch.Tensor) -> npt.NDArray[np.float64]:
    """KL(reference || tested) of each row of logits, in nats."""
    log_p, log_q = (torch.log_softmax(logits.float(), dim=-1) for logits in (reference, tested))
    terms = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)
    klds: npt.NDArray[np.float64] = np.maximum(terms.cpu().numpy(), 0.0)
    return klds
