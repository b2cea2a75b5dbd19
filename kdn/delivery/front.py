"""The model at work beside a delivery: it reads chunks from the front, piece by piece.

What it has read goes to the sink when a piece is done, never before; so a sink never holds half of
a chunk, and a piece that is stopped leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kdn.cache.tensors import KVCache
from kdn.delivery.decode import Decoder
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Reading
from kdn.delivery.request import Request

NextEnd = Callable[[int], int]
"""After so many chunks, up to which one to read next; no further: nothing more to read."""


class Front:
    def __init__(
        self,
        request: Request,
        known: Sequence[Incoming],
        decoder: Decoder,
        changed: asyncio.Event,
        now_s: Callable[[], float],
    ) -> None:
        self.num_read = 0
        self.reading: Reading | None = None
        self._request, self._known = request, known
        self._decoder, self._changed, self._now_s = decoder, changed, now_s
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, next_end: NextEnd) -> None:
        assert not self.is_busy
        self._task = asyncio.create_task(self._read_on(next_end))
        self._task.add_done_callback(lambda _: self._changed.set())

    async def wait(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stop what is in hand."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def raise_crash(self) -> None:
        if self._task is not None and self._task.done():
            with suppress(asyncio.CancelledError):
                self._task.result()

    async def _read_on(self, next_end: NextEnd) -> None:
        assert self._request.compute is not None
        while (end := next_end(self.num_read)) > self.num_read:
            self.reading = Reading(end, self._now_s())
            try:
                values = await self._request.compute(self.num_read, end)
            finally:
                self.reading = None
            for number in range(self.num_read, end):
                await self._keep(number, values)
            self.num_read = end
            self._changed.set()

    async def _keep(self, number: int, values: KVCache) -> None:
        chunk = self._request.chunks[number]
        one = self._known[number] if number < len(self._known) else None
        while any(one is busy for busy in self._decoder.busy):
            await self._decoder.finish()
        self._request.sink.write(chunk, values)
        if one is not None:
            one.computed, one.decoded, one.decoded_id = True, 0, b""
