"""Jobs to the servers that have their keys: one exchange for each server, all at once.

A server may be gone, may have passed a slot on, or may have become a replica. Then the jobs that it
did not do are sent to whoever has their keys now, again and again, until a deadline. While a master
is gone, its replicas are asked: what they have is right, and what they lack is asked for again.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kdn.errors import FormatError, StoreError
from kdn.store.redis_address import Address, RedisAddress
from kdn.store.redis_pool import NOT_ALLOWED, TRANSIENT, Pools, Role, Server, refusal
from kdn.store.redis_topology import (
    NUM_SLOTS,
    Shard,
    read_address,
    slot_of,
    topology_of,
)
from kdn.store.redis_wire import CutError, ErrorReply, Job

PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2)
"""Before each new attempt; the last one from then on."""
MAX_REDIRECTIONS = 8
REFRESHED_S = 1.0
"""After a redirection, what is known is refreshed if it is older."""
SLOWEST_BYTES_PER_S = 256 << 10
"""A link that is slower fails."""
_REDIRECTION = re.compile(r"(MOVED|ASK) (\d{1,5}) (\S*):(\d{1,5})")


@dataclass(eq=False)
class _Way:
    """A job's way to an answer."""

    job: Job
    slot: int
    replica: bool
    """Ask a replica, if there is one."""
    master_only: bool
    to: Address | None = None
    asking: bool = False
    redirections: int = 0
    is_done: bool = False


class Shards:
    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self._options = address.options
        self._pools = Pools(address)
        self._topology = topology_of(address)
        self._known = False
        self._generation = 0
        self._refreshed_s = 0.0
        self._refreshing = asyncio.Lock()
        self._why = "no attempt"

    async def run(self, jobs: Sequence[Job]) -> None:
        """Until all are answered; StoreError if that does not happen by the deadline."""
        ways = [
            _Way(job, slot_of(job.key), self._options.replicas and not job.writes, job.writes)
            for job in jobs
        ]
        limit_s = self._options.deadline_s
        limit_s += sum(job.travelling_bytes for job in jobs) / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                await self._run(ways)
        except TimeoutError:
            raise self._late() from None
        except FormatError as error:
            raise StoreError(f"{self.address}: {error}") from error

    def _late(self) -> StoreError:
        limit_s = self._options.deadline_s
        return StoreError(f"{self.address}: no answer within {limit_s:g} s: {self._why}")

    async def _run(self, ways: list[_Way]) -> None:
        if not self._known:
            await self._refresh(self._generation)
        attempt, give_up_s, progress = 0, time.monotonic() + self._options.deadline_s, _of(ways)
        while ways:
            generation = self._generation
            groups = self._grouped(ways)
            unknown = sum(map(len, groups.values())) < len(ways)
            lost = await self._ask_all(groups)
            ways = [way for way in ways if not way.is_done]
            if (now := _of(ways)) != progress:
                attempt, give_up_s = 0, time.monotonic() + self._options.deadline_s
                progress = now
            if unknown or any(lost):
                if time.monotonic() > give_up_s:
                    raise self._late()
                await self._refresh(generation)
                await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
                attempt += 1
            elif any(way.to for way in ways) and time.monotonic() > self._refreshed_s + REFRESHED_S:
                await self._refresh(generation)

    async def _ask_all(self, groups: dict[tuple[Server, bool], list[_Way]]) -> list[bool]:
        """All of them end here, whatever is wrong with one: their bytes go to the same reader."""
        asked = [self._ask(server, asking, some) for (server, asking), some in groups.items()]
        if len(asked) == 1:  # most often, and a task takes its time
            return [await asked[0]]
        lost = []
        for one in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(one, BaseException):
                raise one
            lost.append(one)
        return lost

    def _grouped(self, ways: Sequence[_Way]) -> dict[tuple[Server, bool], list[_Way]]:
        groups: dict[tuple[Server, bool], list[_Way]] = defaultdict(list)
        chosen: dict[Shard, Server] = {}  # one replica of a shard for all: one round trip
        for way in ways:
            server = self._server_of(way)
            if server is None:
                continue
            if way.to is None and server.role is Role.REPLICA:
                shard = self._topology.shard_of(way.slot)
                assert shard is not None
                server = chosen.setdefault(shard, server)
            groups[server, way.asking].append(way)
        return groups

    def _server_of(self, way: _Way) -> Server | None:
        if way.to is not None:
            return Server(way.to, Role.MASTER)
        shard = self._topology.shard_of(way.slot)
        if shard is None:
            return None
        if way.replica and not way.master_only and shard.replicas:
            return Server(random.choice(shard.replicas), Role.REPLICA)
        return Server(shard.master, Role.MASTER)

    async def _ask(self, server: Server, asking: bool, ways: Sequence[_Way]) -> bool:
        """Whether something was lost, so that it is time to ask where things are."""
        for way in ways:
            way.job.is_answered = False
        try:
            await self._pools.ask(server, [way.job for way in ways], asking=asking)
        except CutError as error:
            self._why = str(error)
        lost = [self._is_lost(way, server) for way in ways]
        return any(lost)

    def _is_lost(self, way: _Way, server: Server) -> bool:
        way.to, way.asking, job = None, False, way.job
        if not job.is_answered:
            way.replica = server.role is Role.MASTER  # the next attempt goes to another server
            return True
        trouble = next((one for one in job.replies if _is_trouble(one)), None)
        if isinstance(trouble, ErrorReply):
            return self._is_trouble_lost(way, server, trouble)
        refused = next((one for one in job.replies if _is_refusal(one)), None)
        if isinstance(refused, ErrorReply) and not job.writes:
            raise refusal(server.address, refused)
        if server.role is Role.REPLICA and job.is_miss:
            way.master_only = True
        else:
            way.is_done = True
        return False

    def _is_trouble_lost(self, way: _Way, server: Server, trouble: ErrorReply) -> bool:
        self._why = f"{server.address}: {trouble.text[:200]}"
        if trouble.code in NOT_ALLOWED:
            raise refusal(server.address, trouble)
        told = _REDIRECTION.match(trouble.text)
        way.redirections += 1
        if told is None or int(told[2]) >= NUM_SLOTS or way.redirections > MAX_REDIRECTIONS:
            way.redirections = 0
            way.replica = False
            return True
        way.to = read_address(told[3].encode(), told[4].encode(), server.address)
        way.asking = told[1] == "ASK"
        if not way.asking:
            self._topology.moved(int(told[2]), way.to)
        return False

    async def _refresh(self, seen: int) -> None:
        """Learn where things are, unless somebody else just did. Not knowing is no error yet."""
        async with self._refreshing:
            if self._generation != seen:
                return
            try:
                await self._topology.refresh(self._ask_guide)
                self._known = True
            except (FormatError, StoreError) as error:
                self._why = str(error)
            self._generation += 1
            self._refreshed_s = time.monotonic()

    async def _ask_guide(self, address: Address, job: Job) -> None:
        await self._pools.ask(Server(address, Role.GUIDE), [job])

    async def masters(self) -> list[Address]:
        """All that have keys."""
        await self._refresh(self._generation)
        found = [shard.master for shard in self._topology.shards()]
        if not found:
            raise StoreError(f"{self.address}: {self._why}")
        return list(dict.fromkeys(found))

    async def run_at(self, master: Address, job: Job) -> None:
        """A job about all that a server has. StoreError if it fails: another would not do."""
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self._pools.ask(Server(master, Role.MASTER), [job])
        except TimeoutError:
            raise StoreError(f"{master}: no answer") from None
        except FormatError as error:
            raise StoreError(f"{master}: {error}") from error
        for reply in job.replies:
            if isinstance(reply, ErrorReply):
                raise refusal(master, reply)

    @property
    def generation(self) -> int:
        """How often it was asked where things are: after a failure, something may have moved."""
        return self._generation

    def master_of(self, key: bytes) -> Address | None:
        """As far as that is known here."""
        shard = self._topology.shard_of(slot_of(key))
        return None if shard is None else shard.master

    async def close(self) -> None:
        await self._pools.close()


def _of(ways: Sequence[_Way]) -> tuple[int, int]:
    """Changes whenever something was done."""
    return len(ways), sum(way.job.progress for way in ways)


def _is_refusal(reply: object) -> bool:
    """An error that says nothing of what is there. (Another type than a string says that.)"""
    return isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE"


def _is_trouble(reply: object) -> bool:
    """An error that another server, or some patience, may do away with."""
    codes = (*TRANSIENT, *NOT_ALLOWED, "MOVED", "ASK")
    return isinstance(reply, ErrorReply) and reply.code in codes
