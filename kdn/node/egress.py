"""Turns at the way out: around the writing of every frame of every response.

    async with egress.turn(tenant, client, num_bytes):
        transport.write(frame)      # hand it over
    await drain()                   # outside, with a deadline

A `Queue` (`scheduler.py`) says whose turn is next; at most `slots` turns run at a time, and with a
`rate` the frames pass one after the other as if over a link of that rate: a turn comes when its
frame's last byte would have gone out. Without a rate and with a slot free a turn begins at once and
costs a few microseconds.

A turn is for handing a frame over, never for waiting until its reader takes it: so a reader that
does not drain keeps memory (bounded by the transport's high-water mark and one frame) but no slot.
The queue is bounded per tenant, and no turn is waited for longer than `max_wait_s`: BusyError.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from kdn.errors import KdnError
from kdn.node.scheduler import Queue, Ticket
from kdn.node.traces import ConstantRate, Rate

DEFAULT_SLOTS = 64
DEFAULT_MAX_QUEUED = 4096
DEFAULT_MAX_WAIT_S = 60.0
_TIMER_S = 0.005
"""Timers are late by a millisecond or so: an idle time as short as this was none."""
_MAX_LATE_S = 0.25
"""A busy event loop may be late by more; so much of what a link lost this way is made up for."""


class BusyError(KdnError):
    """Too much waits to go out already, or it has waited too long."""


class Egress:
    """All turns of one node. `rate`: bits per second, or a trace; None: no limit."""

    def __init__(
        self,
        queue: Queue,
        rate: float | Rate | None = None,
        *,
        slots: int = DEFAULT_SLOTS,
        max_queued: int = DEFAULT_MAX_QUEUED,
        max_wait_s: float = DEFAULT_MAX_WAIT_S,
    ) -> None:
        if slots < 1 or max_queued < 1:
            raise ValueError(f"expected at least 1 slot and place, found {slots}, {max_queued}")
        self._queue = queue
        self._rate = ConstantRate(rate) if isinstance(rate, int | float) else rate
        self._max_queued = max_queued
        self._max_wait_s = max_wait_s
        self._queued: Counter[str] = Counter()
        # A turn holds a slot from leaving the queue until its end.
        self._free_slots = slots
        self._free_at_s = -math.inf  # when the link has sent all it was given
        self._link_busy = False
        self._dispatching = False

    def __len__(self) -> int:
        """How many turns are waited for."""
        return len(self._queue)

    def turn(self, tenant: str, client: str, num_bytes: int) -> Turn:
        """`async with` it around handing over one frame."""
        return Turn(self, tenant, client, num_bytes)

    @property
    def is_free(self) -> bool:
        """Whether a frame that is handed over now keeps nobody waiting."""
        return self._rate is None and self._free_slots > 0 and not len(self._queue)

    def pass_by(self, tenant: str, client: str, num_bytes: int) -> None:
        """Count a frame that is handed over at once, while it `is_free`."""
        self._queue.pass_by(Ticket(tenant, client, num_bytes))

    def _begin_at_once(self, turn: Turn) -> bool:
        if not self.is_free:
            return False
        self._free_slots -= 1
        self._queue.pass_by(turn)
        return True

    async def _begin(self, turn: Turn) -> None:
        """Wait for a turn. Whatever happens, it ends with the slot held, or with none."""
        if self._queued[turn.tenant] >= self._max_queued:
            raise BusyError(f"{self._max_queued} frames of this tenant wait to go out already")
        loop = asyncio.get_running_loop()
        turn.queued_s = loop.time()
        turn.granted = granted = loop.create_future()
        self._queued[turn.tenant] += 1
        self._queue.push(turn)
        self._dispatch_soon()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._end()
            elif turn.waiting:
                self._leave_queue(turn)
                self._queue.remove(turn)
            # Otherwise it is on the link, and `_grant` will find it cancelled.
            granted.cancel()
            if isinstance(error, TimeoutError):
                raise BusyError(f"waited {self._max_wait_s} s to send one frame") from None
            raise
        turn.waited_s = loop.time() - turn.queued_s

    def _end(self) -> None:
        self._free_slots += 1
        if len(self._queue):
            self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        """Not at once: whoever just sent a frame shall be able to ask for its next one before the
        choice is made, or it would lose every other turn to somebody with less of a claim."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        while self._free_slots and not self._link_busy and len(self._queue):
            turn = self._queue.pop()
            assert isinstance(turn, Turn)
            self._leave_queue(turn)
            self._free_slots -= 1
            if self._rate is None:
                self._grant(turn)
            else:
                self._send(turn, self._rate)

    def _send(self, turn: Turn, rate: Rate) -> None:
        """Put a frame on the link; its turn comes when the last byte is through."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        start_s = self._free_at_s
        if now_s - start_s > _TIMER_S:
            start_s = max(start_s, turn.queued_s, now_s - _MAX_LATE_S)
        self._free_at_s = rate.finish_s(start_s, turn.num_bytes)
        if self._free_at_s <= now_s:
            self._grant(turn)
        else:
            self._link_busy = True
            loop.call_later(self._free_at_s - now_s, self._arrive, turn)

    def _arrive(self, turn: Turn) -> None:
        self._link_busy = False
        self._grant(turn)
        self._dispatch_soon()

    def _grant(self, turn: Turn) -> None:
        assert turn.granted is not None
        if turn.granted.cancelled():
            self._end()
        else:
            turn.granted.set_result(None)

    def _leave_queue(self, turn: Turn) -> None:
        turn.waiting = False
        self._queued[turn.tenant] -= 1
        if not self._queued[turn.tenant]:
            del self._queued[turn.tenant]


class Turn(Ticket):
    """One frame's turn. `waited_s`: how long it was waited for."""

    __slots__ = ("_egress", "granted", "waited_s", "waiting")

    def __init__(self, egress: Egress, tenant: str, client: str, num_bytes: int) -> None:
        super().__init__(tenant, client, num_bytes)
        self._egress = egress
        self.granted: asyncio.Future[None] | None = None
        self.waiting = True
        self.waited_s = 0.0

    async def __aenter__(self) -> Turn:
        if not self._egress._begin_at_once(self):
            await self._egress._begin(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._egress._end()
