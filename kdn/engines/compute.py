"""Delivery's `compute`: the model reads chunks from the front while others load.

    reader = ChunkReader(model, chunks)
    result = await deliver(Request(..., compute=reader, speeds=measured_speeds(model, codec)), ...)
    await reader.finish()

When a delivery ends, a chunk may be half read. `finish` stops the model before its next layer, so
that what nobody wants any more does not keep the processor from the answer. A GPU is given only a
few layers of work ahead for the same reason: what is in its queue cannot be taken back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.engines.reading import forward, last_tokens, new_cache

LAYERS_AHEAD = 2


class _StoppedError(Exception):
    """Thrown through the layers of a model that is to stop."""


class _Queue:
    """What a GPU has been given to do, layer by layer. On a CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: deque[torch.cuda.Event] = deque()

    def shorten(self, most: int) -> None:
        """Wait until no more than so many layers are left."""
        if self._device.type != "cuda":
            return
        self._layers.append(torch.cuda.current_stream(self._device).record_event())
        while len(self._layers) > most:
            self._layers.popleft().synchronize()


class ChunkReader:
    """Reads chunk after chunk of one context from its beginning, each once."""

    def __init__(self, model: PreTrainedModel, chunks: Sequence[Chunk]) -> None:
        assert chunks[0].start == 0, "a model can only read from the beginning"
        self._model = model
        self._chunks = chunks
        self._past = new_cache(model)
        self._queue = _Queue(model.device)
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
        values = last_tokens(self._past, chunks[0].start)
        self._queue.shorten(0)  # planners take it that what was read is there
        return values

    def _check(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._thread != get_ident():
            return
        self._queue.shorten(LAYERS_AHEAD)
        if self._stopped:
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
