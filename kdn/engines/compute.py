"""Delivery's `compute`: the model reads chunks from the front while others load.

    reader = ChunkReader(model, chunks)
    result = await deliver(Request(..., compute=reader, speeds=measured_speeds(model, codec)), ...)
    await reader.finish()

When a delivery ends, a chunk may be half read. `finish` stops the model before its next layer, so
that what nobody wants any more does not keep the processor from the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.engines.reading import forward, last_tokens, new_cache


class _StoppedError(Exception):
    """Thrown through the layers of a model that is to stop."""


class ChunkReader:
    """Reads chunk after chunk of one context from its beginning, each once."""

    def __init__(self, model: PreTrainedModel, chunks: Sequence[Chunk]) -> None:
        assert chunks[0].start == 0, "a model can only read from the beginning"
        self._model = model
        self._chunks = chunks
        self._past = new_cache(model)
        self._running: asyncio.Future[KVCache] | None = None
        self._stopped = False
        self._thread = 0  # that reads for this one: others may use the model at the same time
        self._hooks = [layer.register_forward_pre_hook(self._check) for layer in _layers(model)]

    async def __call__(self, first: int, end: int) -> KVCache:
        """The values of chunks [first, end)."""
        chunks = self._chunks[first:end]
        assert chunks[0].start == self._past.get_seq_length(), "chunks come in order, each once"
        self._running = asyncio.ensure_future(asyncio.to_thread(self._read, chunks))
        return await asyncio.shield(self._running)

    def _read(self, chunks: Sequence[Chunk]) -> KVCache:
        self._thread = get_ident()
        try:
            forward(self._model, np.concatenate([chunk.tokens for chunk in chunks]), self._past)
        finally:
            self._thread = 0
        return last_tokens(self._past, chunks[0].start)

    def _check(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._stopped and self._thread == get_ident():
            raise _StoppedError

    async def finish(self) -> None:
        """Stop, and wait for it: afterwards the model is its owner's again."""
        self._stopped = True
        try:
            if self._running is not None:
                await asyncio.wait([self._running])
                if not self._running.cancelled():
                    self._running.exception()  # seen: nobody waits for it any more
        finally:
            for hook in self._hooks:
                hook.remove()


def _layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """Its decoder layers; where they are not found, a chunk is read to its end."""
    layers: Sequence[torch.nn.Module] = getattr(model.get_decoder(), "layers", ())
    return layers
