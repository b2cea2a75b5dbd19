"""Loads whose streams are ordered before vLLM has made room for them.

When a lookup has ended, and vLLM has said what its own cache holds of a prompt, it is clear what a
load will bring. But vLLM still has to plan a step, make room and tell its worker: some milliseconds
on an idle GPU, a whole step on a busy one, in which the link would be idle. So the delivery begins
at once, into memory that it is given later (`LateSink`). Nothing is decoded before.

An early load is only ever taken up by a load of the very same chunks. What nobody takes up soon is
dropped, whatever the reason: its request was aborted, vLLM has no room, or others computed the same
blocks. Then its load, if there is one, begins as any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kdn.background import watched
from kdn.cache.keys import Chunk, Namespace, Tokens
from kdn.delivery.known import Known
from kdn.delivery.sink import LateSink, Sink
from kdn.engines.vllm.messages import LoadOrder
from kdn.errors import KdnError
from kdn.session.delivered import Delivered
from kdn.session.session import Session

AT_ONCE = 4
"""More at a time would only take memory for streams."""
TAKEN_UP_S = 1.0
"""An early load that nobody has taken up by then is dropped. A long step takes some 0.2 s."""
TAKEN_UP_SHARE = 0.25
"""The same, as a part of its deadline: whoever takes it up needs time to decode."""
ORDER_S = 0.005
"""vLLM hears of a lookup's end after so long, if nothing has been ordered by then: until it has,
the two would only take turns with the interpreter."""


@dataclass
class Prospect:
    """What a request will load, as far as the scheduler's side knows. vLLM's thread writes `start`,
    the event loop reads it."""

    request_id: str
    most: int
    """Tokens that can be loaded, vLLM's own included; whole blocks."""
    block_tokens: int
    enough_kld: float
    deadline_s: float
    start: int | None = None
    """In vLLM's own cache; None: vLLM has not said yet."""

    def chunks(self, known: Known) -> tuple[tuple[Chunk, ...], int]:
        """Those that will be loaded, and up to where; none if any of them is on this host."""
        start, end = self.start, min(known.end // self.block_tokens * self.block_tokens, self.most)
        if start is None or end <= start:
            return (), 0
        wanted = tuple(c for c in known.chunks if c.start < end and c.end > start)
        if any(known.streams.get(chunk.key) is None for chunk in wanted):
            return (), 0
        return wanted, end


@dataclass
class _Early:
    chunks: tuple[Chunk, ...]
    end: int
    enough_kld: float
    sink: LateSink
    task: asyncio.Task[Delivered]
    timer: asyncio.TimerHandle

    def fits(self, order: LoadOrder, chunks: Sequence[Chunk]) -> bool:
        asked = [chunk.key for chunk in chunks]
        same = [chunk.key for chunk in self.chunks] == asked and self.end == order.end
        return same and self.enough_kld == order.enough_kld


class EarlyLoads:
    """All of it belongs to the session's event loop, but what the loader sets once."""

    def __init__(self, session: Session) -> None:
        self.batch_chunks: int | None = None
        """Of the sinks that loads are given; None: there are no loads in this process."""
        self.is_crowded: Callable[[], bool] = lambda: False
        """Whether a load would wait for others: then an early one would only slow these down."""
        self.num_dropped = 0
        self._session = session
        self._loads: dict[str, _Early] = {}
        self._tasks: set[asyncio.Task[Delivered]] = set()

    async def look_up(
        self, tokens: Tokens, namespace: Namespace, limit_s: float, prospect: Prospect
    ) -> Known:
        """What is known of a prompt; what of that will be loaded is on its way then."""
        known = await self._session.know(
            tokens, namespace=namespace, enough_kld=prospect.enough_kld,
            block_tokens=prospect.block_tokens, whole=True, limit_s=limit_s,
        )  # fmt: skip
        await self.begin(prospect, known)
        return known.packed()  # requests may wait for vLLM by the thousand

    async def begin(self, prospect: Prospect, known: Known) -> None:
        """Order what this request will load, where a fetcher brings it. Returns when that is
        ordered, or is not going to be at once."""
        self._drop(prospect.request_id)
        fetcher, batch_chunks = self._session.fetcher, self.batch_chunks
        if fetcher is None or batch_chunks is None:
            return
        if len(self._tasks) >= AT_ONCE or self.is_crowded():
            return
        chunks, end = prospect.chunks(known)
        if not chunks or not fetcher.is_ready():
            return
        sink, asked = LateSink(batch_chunks), asyncio.Event()
        work = self._session.deliver(
            chunks, sink, known=known, end=end, enough_kld=prospect.enough_kld,
            deadline_s=prospect.deadline_s, asks_host=False, asked=asked,
        )  # fmt: skip
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(watched("an early load", KdnError, OSError))
        limit_s = min(TAKEN_UP_S, TAKEN_UP_SHARE * prospect.deadline_s)
        timer = asyncio.get_running_loop().call_later(limit_s, self._drop, prospect.request_id)
        early = _Early(chunks, end, prospect.enough_kld, sink, task, timer)
        self._loads[prospect.request_id] = early
        with suppress(TimeoutError):
            async with asyncio.timeout(ORDER_S):
                await asked.wait()

    async def deliver(
        self, order: LoadOrder, chunks: Sequence[Chunk], sink: Sink
    ) -> Delivered | None:
        """What was ordered for this load, into its sink; None: it did not begin early."""
        early = self._loads.get(order.request_id)
        if early is None:
            return None
        if early.task.done() or not early.fits(order, chunks):
            self._drop(order.request_id)
            return None
        del self._loads[order.request_id]
        early.timer.cancel()
        early.sink.give(sink)
        return await early.task

    def _drop(self, request_id: str) -> None:
        """If there is one that nobody has taken up."""
        if (early := self._loads.pop(request_id, None)) is not None:
            early.timer.cancel()
            early.task.cancel()
            self.num_dropped += 1

    async def close(self) -> None:
        """Those that were taken up end with their takers, which have been cancelled. Cancelled
        twice, a delivery would not wait for threads that still write."""
        for request_id in list(self._loads):
            self._drop(request_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)
