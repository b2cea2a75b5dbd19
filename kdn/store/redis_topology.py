"""Which server has which key: one, the one that Sentinels name, or those of a Cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from kdn.errors import StoreError
from kdn.store.redis_address import CLUSTER, SENTINEL, Address, RedisAddress
from kdn.store.redis_wire import CutError, ErrorReply, Job, Reply

NUM_SLOTS = 16_384
MAX_SERVERS = 4096


class Shard(NamedTuple):
    master: Address
    replicas: tuple[Address, ...] = ()


AskOne: TypeAlias = Callable[[Address, Job], Awaitable[None]]
"""Ask one server, whatever it has. CutError if it does not answer."""


class Topology(ABC):
    @abstractmethod
    def shard_of(self, slot: int) -> Shard | None:
        """None: not known."""

    @abstractmethod
    def shards(self) -> list[Shard]: ...

    @abstractmethod
    async def refresh(self, ask: AskOne) -> None:
        """Learn it anew. StoreError if nobody tells."""

    def moved(self, slot: int, master: Address) -> None:
        """A server says that another one has this slot now. Only in a Cluster is there one."""
        return


def topology_of(address: RedisAddress) -> Topology:
    if address.kind == CLUSTER:
        return ClusterTopology(address.hosts)
    if address.kind == SENTINEL:
        return SentinelTopology(address.hosts, address.service)
    return SingleTopology(address.hosts[0])


class SingleTopology(Topology):
    def __init__(self, master: Address) -> None:
        self._shard = Shard(master)

    def shard_of(self, slot: int) -> Shard | None:
        return self._shard

    def shards(self) -> list[Shard]:
        return [self._shard]

    async def refresh(self, ask: AskOne) -> None:
        job = Job(b"", [(b"ROLE",)])
        await ask(self._shard.master, job)
        replicas = tuple(replica_addresses(job.replies[0]))
        self._shard = Shard(self._shard.master, replicas)


class SentinelTopology(Topology):
    def __init__(self, sentinels: Sequence[Address], service: str) -> None:
        self._sentinels, self._service = sentinels, service
        self._shard: Shard | None = None

    def shard_of(self, slot: int) -> Shard | None:
        return self._shard

    def shards(self) -> list[Shard]:
        return [] if self._shard is None else [self._shard]

    async def refresh(self, ask: AskOne) -> None:
        service = self._service.encode()
        commands = [
            (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service),
            (b"SENTINEL", b"REPLICAS", service),
        ]
        found = await _first_answer(self._sentinels, commands, ask)
        master, replicas = found[1]
        if not isinstance(master, list) or len(master) != 2:
            raise StoreError(f"the Sentinel at {found[0]} knows no master {self._service!r}")
        [host, port] = master
        self._shard = Shard(read_address(host, port, found[0]), _sound_replicas(replicas, found[0]))


class ClusterTopology(Topology):
    def __init__(self, hosts: Sequence[Address]) -> None:
        self._hosts = hosts
        self._slots: list[Shard | None] = [None] * NUM_SLOTS
        self._shards: list[Shard] = []

    def shard_of(self, slot: int) -> Shard | None:
        return self._slots[slot]

    def shards(self) -> list[Shard]:
        return self._shards

    def moved(self, slot: int, master: Address) -> None:
        known = (shard for shard in self._shards if shard.master == master)
        self._slots[slot] = next(known, Shard(master))

    async def refresh(self, ask: AskOne) -> None:
        known = [one for shard in self._shards for one in (shard.master, *shard.replicas)]
        every = list(dict.fromkeys([*known, *self._hosts]))
        told, [ranges] = await _first_answer(every, [(b"CLUSTER", b"SLOTS")], ask)
        slots: list[Shard | None] = [None] * NUM_SLOTS
        shards: dict[Shard, None] = {}
        for one in ranges if isinstance(ranges, list) else ():
            first, last, shard = _read_range(one, told)
            shards[shard] = None
            slots[first : last + 1] = [shard] * (last + 1 - first)
        if not shards:
            raise StoreError(f"expected slots of a Cluster from {told}, found {str(ranges)[:80]}")
        self._slots, self._shards = slots, list(shards)


async def _first_answer(
    servers: Sequence[Address], commands: Sequence[tuple[bytes, ...]], ask: AskOne
) -> tuple[Address, list[Reply]]:
    """Of the first server that has one, and that server."""
    why = "no server is known"
    for server in servers:
        job = Job(b"", commands)
        try:
            await ask(server, job)
        except CutError as error:
            why = str(error)
            continue
        refused = [reply.text for reply in job.replies if isinstance(reply, ErrorReply)]
        if not refused:
            return server, job.replies
        why = f"{server}: {refused[0][:200]}"
    raise StoreError(f"nobody tells where keys are: {why}")


def _read_range(told: Reply, by: Address) -> tuple[int, int, Shard]:
    """First slot, last slot, master, replicas: each server as host, port, and what else."""
    match told:
        case [int(first), int(last), [host, port, *_], *others]:
            master = read_address(host, port, by)
        case _:
            raise StoreError(f"expected slots of a Cluster from {by}, found {str(told)[:80]}")
    if not 0 <= first <= last < NUM_SLOTS or len(others) > MAX_SERVERS:
        raise StoreError(f"expected slots of a Cluster from {by}, found {first} to {last}")
    return first, last, Shard(master, tuple(_addresses(others, by)))


def _sound_replicas(told: Reply, by: Address) -> tuple[Address, ...]:
    """Of what a Sentinel says of each: names and values in turn."""
    found = []
    for one in told[:MAX_SERVERS] if isinstance(told, list) else ():
        items = one if isinstance(one, list) else []
        about = dict(zip(map(_text, items[::2]), items[1::2], strict=False))
        if "down" not in _text(about.get("flags")) and "disconn" not in _text(about.get("flags")):
            found.append(read_address(about.get("ip"), about.get("port"), by))
    return tuple(found)


def replica_addresses(role: Reply) -> list[Address]:
    """Who follows a master, as its ROLE tells."""
    match role:
        case [b"master", int(), [*replicas]]:
            return _addresses(replicas, Address("", 0))
    return []


def _addresses(told: Sequence[Reply], by: Address) -> list[Address]:
    """Of those that begin with a host and a port."""
    return [
        read_address(one[0], one[1], by)
        for one in told[:MAX_SERVERS]
        if isinstance(one, list) and len(one) >= 2
    ]


def read_address(host: Reply, port: Reply, by: Address) -> Address:
    """A server that does not know its own name means the one that it was reached at."""
    number = _text(port) if isinstance(port, bytes) else port
    if isinstance(number, str):
        number = int(number) if number.isdecimal() and len(number) <= 5 else None
    if not isinstance(number, int) or not 0 < number < 1 << 16:
        raise StoreError(f"expected the address of a server, found {host!r}, {port!r}")
    return Address(_text(host).strip("[]") or by.host, number)


def _text(value: Reply) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def slot_of(key: bytes) -> int:
    """Of the part in braces, if there is one."""
    _, opened, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return crc_hqx(tag if opened and closed and tag else key, 0) % NUM_SLOTS
