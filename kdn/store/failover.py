"""Work that any of several nodes can do, carried out though some of them fail.

Every item of a job has a key, and the key says which node comes first. Items of one node are one
request; all nodes are asked at the same time. What a node did not finish when it failed goes on at
the next in the order of its key, within the same call. When a node says nothing for a while, the
next one is asked beside it, and the first answer counts. A job fails only when every node has
failed it, or when one has refused it: a refusal is an answer.

How soon a silent node is doubted depends on what is asked. Lookups and reads are answered within
milliseconds, so a short silence is enough (`Member.hedge_s`), and longer where a node has been
slow. Uploads and large answers take as long as they take. A node that is doubted is asked whether
it is well. One that hangs says nothing: from then on all goes to others. One that is only busy must
not get busier by being doubted: few requests are sent twice (`Members.may_hedge`), and none of
those that take long.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from kdn.errors import NoSpaceError, RefusedError, UnavailableError
from kdn.store.member import Member
from kdn.store.members import Members
from kdn.store.rendezvous import rank

WELL_S = 1.0
"""So long may a node be silent over something large before it is doubted."""
GRACE_S = 0.01
LAGGING = 3.0
"""So many times as long as the others' may a node's part take before it is asked for twice."""


class Job(ABC):
    """Items are numbers, counted from 0. They may be done twice, by two nodes at the same time."""

    is_quick = False
    """Answered within milliseconds, usually."""
    failures: tuple[type[Exception], ...] = (UnavailableError, OSError)
    """What says that another node may do better."""

    @abstractmethod
    def key(self, item: int) -> bytes:
        """What it belongs to a node by."""

    @abstractmethod
    async def do(self, member: Member, items: Sequence[int], attempt: Attempt) -> None:
        """All of these, there."""

    @abstractmethod
    def left(self, items: Sequence[int]) -> list[int]:
        """Those that are not done yet."""

    def extra_s(self, items: Sequence[int]) -> float:
        """How much longer than most the answer to these may take."""
        return 0.0


class Attempt:
    """Some items at one node. `heard` says that something of them came."""

    def __init__(self, members: Members, member: Member) -> None:
        self.member = member
        self._clock = members.clock
        self.began_s = self.heard_s = members.clock()
        self._has_begun = False

    def heard(self) -> None:
        now_s = self._clock()
        self.member.heard(None if self._has_begun else now_s - self.began_s)
        self._has_begun = True
        self.heard_s = now_s

    def overtaken(self) -> None:
        """Another node was faster. That it took at least so long is known now, too."""
        if not self._has_begun:
            self.member.overtaken(self.took_s)

    @property
    def quiet_s(self) -> float:
        return self._clock() - self.heard_s

    @property
    def took_s(self) -> float:
        return self._clock() - self.began_s


def shares_of(members: Sequence[Member], keys: Sequence[bytes]) -> dict[Member, list[int]]:
    """Of each key its place in the list, with the first of its nodes that is well."""
    up = [member for member in members if member.is_up]
    well = [member for member in up if not member.is_doubted] or up or members
    shares: dict[Member, list[int]] = {}
    for place, key in enumerate(keys if well else ()):
        chosen = max(well, key=lambda one: rank(key, one.seed)) if len(well) > 1 else well[0]
        shares.setdefault(chosen, []).append(place)
    return shares


async def carry_out(
    members: Members,
    job: Job,
    items: Sequence[int],
    tried: frozenset[Member] = frozenset(),
    why: Exception | None = None,
) -> None:
    """All items, each by the first of its nodes that is well and was not `tried`. If there is none,
    `why` the last one failed."""
    if not items:
        return
    open_ = [member for member in await members.every() if member not in tried]
    if not tried:
        members.count_request()
    if not open_:
        raise why or UnavailableError("no node is known")
    found = shares_of(open_, [job.key(item) for item in items])
    shares = {member: [items[place] for place in places] for member, places in found.items()}
    pace = _Pace(len(shares)) if len(open_) > 1 else None
    await _all_of(
        [
            _Share(members, job, member, share, tried | {member}, pace).run()
            for member, share in shares.items()
        ]
    )


class _Pace:
    """How fast the shares of one call are done: the last one should not be much slower."""

    def __init__(self, num_shares: int) -> None:
        self._running = num_shares
        self._slowest_s = 0.0  # for one item

    def finished(self, num_items: int, took_s: float) -> None:
        self._running -= 1
        self._slowest_s = max(self._slowest_s, took_s / num_items)

    def limit_s(self, num_items: int) -> float | None:
        """After which the last of several lags behind; None while there is no telling."""
        is_last = self._running == 1 and self._slowest_s > 0
        return LAGGING * self._slowest_s * num_items if is_last else None


class _Share:
    """The items of a job that one node is asked for."""

    def __init__(
        self,
        members: Members,
        job: Job,
        member: Member,
        items: Sequence[int],
        tried: frozenset[Member],
        pace: _Pace | None,
    ) -> None:
        """`pace`: of all shares; None if there is no other node."""
        self._members, self._job, self._member = members, job, member
        self._items, self._tried, self._pace = items, tried, pace
        self._attempt = Attempt(members, member)

    async def run(self) -> None:
        if self._pace is None:
            await self._ask()
            return
        try:
            await self._run()
        finally:
            self._pace.finished(len(self._items), self._attempt.took_s)

    async def _run(self) -> None:
        own = asyncio.create_task(self._ask())
        others: asyncio.Task[None] | None = None
        try:
            if await self._is_late(own):
                others = asyncio.create_task(self._hand_on(UnavailableError("no other node")))
                await _first_of(own, others, self._job.failures)
                if not own.done():
                    self._attempt.overtaken()
            elif isinstance(error := own.exception(), self._job.failures):
                await self._hand_on(error)
            else:
                own.result()
        finally:
            await _stopped(own, others)

    async def _ask(self) -> None:
        member, attempt = self._member, self._attempt
        try:
            with member.asked():
                await self._job.do(member, self._items, attempt)
        except self._job.failures:
            self._members.failed(member, attempt.began_s)
            raise
        except (RefusedError, NoSpaceError):
            member.worked()  # that is an answer
            raise
        member.worked()

    async def _hand_on(self, why: Exception) -> None:
        await carry_out(
            self._members, self._job, self._job.left(self._items), self._tried, why
        )  # fmt: skip

    async def _is_late(self, own: asyncio.Task[None]) -> bool:
        """Wait until the node has answered, or until another should be asked, too."""
        while True:
            limit_s = self._limit_s
            wait_s = min(limit_s - self._attempt.quiet_s, self._member.hedge_s)
            await asyncio.wait([own], timeout=wait_s if wait_s > 0 else limit_s / 4)
            if not own.done():  # it may be this side that was busy: see what lies here by now
                await asyncio.wait([own], timeout=GRACE_S)
            if own.done():
                return False
            if self._attempt.quiet_s >= limit_s and self._is_overdue(limit_s):
                return True
            if self._job.is_quick and self._lags() and self._members.may_hedge():
                return True

    def _lags(self) -> bool:
        """Behind all the others, by much."""
        assert self._pace is not None
        limit_s = self._pace.limit_s(len(self._items))
        return limit_s is not None and self._attempt.took_s >= self._member.hedge_s + limit_s

    @property
    def _limit_s(self) -> float:
        if self._job.is_quick:
            return self._member.hedge_s + self._job.extra_s(self._items)
        return WELL_S

    def _is_overdue(self, limit_s: float) -> bool:
        """Whether another node should be asked, too."""
        self._members.doubt(self._member, limit_s)
        if not self._member.is_up:  # it hangs, as far as anybody knows
            return True
        return self._job.is_quick and self._members.may_hedge()


async def _first_of(
    own: asyncio.Task[None], others: asyncio.Task[None], failures: tuple[type[Exception], ...]
) -> None:
    """Until one has done it. If one fails, it is up to the other; a refusal is final."""
    await asyncio.wait([own, others], return_when=asyncio.FIRST_COMPLETED)
    first, second = (own, others) if own.done() else (others, own)
    error = first.exception()
    if error is None:
        return
    if not isinstance(error, failures):
        raise error
    await second


async def _all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Side by side. The first error ends all."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _stopped(*tasks)


async def _stopped(*tasks: asyncio.Task[None] | None) -> None:
    """Nothing of it goes on."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
