"""Decoding beside the transfer: one chunk at a time, in a thread; the codec itself uses all cores.

The plan says what is worth decoding: the first of its fetches that is here and not decoded yet.
Only when time runs short are chunks without any value decoded with what there is, whatever was
planned. None is begun that is not expected to be done in time: a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.delivery.assemble import Assembly
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Fetch
from kdn.delivery.speeds import Gauge
from kdn.errors import KdnError

HASTE = 1.25
MARGIN_S = 0.005


class Decoder:
    def __init__(
        self,
        codec: Codec,
        cache: KVCache,
        gauge: Gauge,
        changed: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self.busy: Incoming | None = None
        self.troubles: list[str] = []
        self._codec = codec
        self._cache = cache
        self._gauge = gauge
        self._changed = changed
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def pick(
        self, known: Sequence[Incoming], fetches: Sequence[Fetch], left_s: float, idle: bool
    ) -> Fetch | None:
        """What to decode next. `idle`: there is nothing left to wait for."""
        empty = [Fetch(one.number, one.assembly.levels) for one in known if _is_empty(one)]
        work_s = sum(self._cost_s(known, fetch) for fetch in empty)
        order = [*fetches, *empty] if idle else fetches
        if left_s <= HASTE * work_s + MARGIN_S:
            order = [*empty, *fetches]
        for fetch in order:
            one = known[fetch.chunk]
            here = is_waiting(one) and one.decoded < fetch.levels <= one.assembly.levels
            if here and self._cost_s(known, fetch) < left_s:
                return fetch
        return None

    def start(self, one: Incoming, levels: int) -> None:
        assert self.busy is None
        self.busy = one
        self._task = asyncio.create_task(self._decode(one, one.assembly, levels))

    async def finish(self) -> None:
        """Wait for the chunk in hand, even if cancelled: its memory is not the caller's before."""
        if self._task is None:
            return
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            await asyncio.wait([self._task])
            raise

    def raise_crash(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    def _cost_s(self, known: Sequence[Incoming], fetch: Fetch) -> float:
        return self._gauge.speeds.decode_s(known[fetch.chunk].chunk.num_tokens, fetch.levels)

    async def _decode(self, one: Incoming, assembly: Assembly, levels: int) -> None:
        began_s = self._clock()
        try:
            valid_from = await asyncio.to_thread(self._write, one, assembly, levels)
        except KdnError as error:
            # Intact, and yet no stream of this codec. What was there before still is.
            one.lost = one.spoilt = True
            self.troubles.append(f"chunk {one.number}: {error}")
        else:
            one.decoded, one.decoded_id, one.valid_from = levels, assembly.stream_id, valid_from
            self._gauge.decoded(one.chunk.num_tokens, levels, self._clock() - began_s)
        finally:
            self.busy = None
            self._changed.set()

    def _write(self, one: Incoming, assembly: Assembly, levels: int) -> tuple[int, ...]:
        """Decode to the chunk's place; aside first if there is something to lose."""
        place, stream = self._cache.slice(one.chunk.start, one.chunk.end), assembly.stream(levels)
        if not one.decoded:
            return self._codec.decode(stream, one.chunk, levels=levels, out=place).valid_from
        done = self._codec.decode(stream, one.chunk, levels=levels, dtype=place.dtype)
        place.keys.copy_(done.keys)
        place.values.copy_(done.values)
        return done.valid_from


def is_waiting(one: Incoming) -> bool:
    """Whether there is more of it than is decoded."""
    return not one.spoilt and not one.computed and one.assembly.levels > one.decoded


def _is_empty(one: Incoming) -> bool:
    return is_waiting(one) and not one.decoded
