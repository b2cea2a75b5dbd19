"""Several nodes that share one store, as one place: any of them can answer for any key.

Each key belongs to one of them (`rendezvous.py`), so that their RAM holds different objects. A
batch becomes one request to each node concerned, at the same time. Nodes fail, hang, come and go
without a request failing that another node can answer (`failover.py`, `members.py`).

Everything may be repeated at another node. Objects are immutable, so it does not matter who answers
first; a put that is repeated is answered with what the first one stored. A change of a name says
which version it is made after, so a repetition does nothing; whoever made it looks at what is there
(`places/names.py`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from kdn.checked import checked_urls
from kdn.errors import FormatError, UnavailableError
from kdn.store.addresses import is_fixed
from kdn.store.base import Entry, NodeAt, Span, Stats, Store
from kdn.store.failover import Attempt, Job, carry_out, shares_of
from kdn.store.http import HttpStore, list_entries, with_totals
from kdn.store.http_answers import Reply
from kdn.store.member import Member
from kdn.store.members import Members
from kdn.store.node_client import Asking, HttpLimits, NodeClient
from kdn.store.streaming import SKIPPED_BYTES, Ask, Receiver

logger = logging.getLogger(__name__)

SLOW_BYTES_PER_S = 1e6
"""A lookup's answer that is long may take longer."""
DELETE_S = 5.0
"""For one of several nodes to delete an object."""
_READ_FAILURES = (UnavailableError, FormatError, OSError)
"""An answer that cannot be understood says nothing of what is there."""


def open_nodes(
    urls: str,
    *,
    token: str | None = None,
    client: str | None = None,
    limits: HttpLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> NodeClient | ManyNodes:
    """The node at a URL, or the nodes at several (`http://a:8470,http://b:8470`), or at all the
    addresses of a name. Nothing is asked yet."""
    every, limits = checked_urls(urls), limits or HttpLimits()
    connect = partial(NodeClient, token=token, client=client, limits=limits, tls=tls)
    if len(every) == 1 and is_fixed(every[0]):
        return connect(every[0])
    members = Members(every, lambda url, address: connect(url, address=address), limits)
    return ManyNodes(urls, members)


def node_store(nodes: NodeClient | ManyNodes, collection: str = "objects") -> Store:
    """A collection there. Closing it closes the nodes' clients, for all who share them."""
    if isinstance(nodes, ManyNodes):
        return ManyNodesStore(nodes, collection)
    return HttpStore(nodes, collection=collection)


class ManyNodes(Asking):
    def __init__(self, url: str, members: Members) -> None:
        self.url = url
        self.members = members

    async def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        expect: tuple[int, ...] = (200,),
        limit_bytes: int = 0,
        silence_s: float | None = None,
    ) -> Reply:
        """One of the nodes that is well: for one path the same, as long as there is it."""
        job = _Question(
            method, path, data, headers=headers, query=query, expect=expect,
            limit_bytes=limit_bytes, silence_s=silence_s,
        )  # fmt: skip
        await carry_out(self.members, job, [0])
        assert job.reply is not None
        return job.reply

    async def close(self) -> None:
        await self.members.close()


class ManyNodesStore(Store):
    """One collection of several nodes."""

    def __init__(self, nodes: ManyNodes, collection: str = "objects") -> None:
        self._nodes, self._collection = nodes, collection
        self._members = nodes.members

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        job = _Putting(self._collection, entry, data, checksum, replacing)
        await carry_out(self._members, job, [0])
        assert job.kept is not None
        return job.kept

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        assert start >= 0, f"ranges count from the beginning, found {start}"
        job = _Getting(self._collection, key, start, end, etag)
        await carry_out(self._members, job, [0])
        return job.span

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        if (only := await self._only()) is not None:
            with only.asked():
                return await only.store(self._collection).lookup(keys, head_bytes=head_bytes)
        job = _Lookup(self._collection, list(dict.fromkeys(keys)), head_bytes)
        await carry_out(self._members, job, range(len(job.keys)))
        return [job.found[key] for key in keys]

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """Of each node in one request, straight from its socket."""
        if (only := await self._only()) is not None:
            with only.asked():
                await only.store(self._collection).read_into(asks, receiver)
                return
        await carry_out(
            self._members, _Reading(self._collection, asks, receiver), range(len(asks))
        )  # fmt: skip

    async def nodes_of(self, keys: Sequence[bytes]) -> Sequence[tuple[NodeAt, Sequence[int]]]:
        """Those that are well, as far as is known."""
        found = shares_of(await self._members.every(), keys)
        return [(member.client.where, share) for member, share in found.items()]

    async def delete(self, key: bytes) -> bool:
        """At every node: each may have it in its RAM. One that cannot be reached may answer for it
        until it forgets; that is logged."""
        every = await self._members.every()
        limit_s = DELETE_S if len(every) > 1 else None
        answers = await asyncio.gather(
            *(self._delete(member, key, limit_s) for member in every), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if len(errors) == len(answers) or not isinstance(error, UnavailableError):
                raise error
            logger.warning("%s may still be read somewhere: %s", key.hex(), error)
        return True in answers

    async def _delete(self, member: Member, key: bytes, limit_s: float | None) -> bool:
        try:
            with member.asked():
                async with asyncio.timeout(limit_s):
                    return await member.store(self._collection).delete(key)
        except TimeoutError as error:
            raise UnavailableError(f"{member.name}: no answer for {limit_s} s") from error

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        async for entry in list_entries(self._nodes, self._collection, prefix):
            yield entry

    async def stats(self) -> Stats:
        """Counters of this client; objects, bytes and quota of the tenant at the nodes."""
        counts = self._members.counts.get(self._collection, Stats())
        return await with_totals(self._nodes, counts)

    async def close(self) -> None:
        await self._nodes.close()

    async def _only(self) -> Member | None:
        """A node that is alone is asked as one node is."""
        every = await self._members.every()
        return every[0] if len(every) == 1 else None


class _Single(Job):
    """Of one item."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._is_done = False

    def key(self, item: int) -> bytes:
        return self._key

    def left(self, items: Sequence[int]) -> list[int]:
        return [] if self._is_done else list(items)


class _Question(_Single):
    def __init__(self, method: str, path: str, data: bytes | None, **options: object) -> None:
        name = "/".join(path.split("/")[:4])  # and its history: from one node
        super().__init__(name.encode())
        self.reply: Reply | None = None
        self._asked, self._options = (method, path, data), options
        if method == "GET":
            self.failures = _READ_FAILURES

    async def do(self, member: Member, items: Sequence[int], attempt: Attempt) -> None:
        self.reply = await member.client.ask(*self._asked, **self._options)  # type: ignore[arg-type]
        self._is_done = True


class _Putting(_Single):
    def __init__(
        self, collection: str, entry: Entry, data: bytes, checksum: int, replacing: bytes | None
    ) -> None:
        super().__init__(entry.key)
        self.kept: Entry | None = None
        self._collection = collection
        self._put = (entry, data, checksum, replacing)

    async def do(self, member: Member, items: Sequence[int], attempt: Attempt) -> None:
        self.kept = await member.store(self._collection).put_entry(*self._put)
        self._is_done = True


class _Getting(_Single):
    failures = _READ_FAILURES

    def __init__(
        self, collection: str, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> None:
        super().__init__(key)
        self.span: Span | None = None
        self._collection, self._range, self._etag = collection, (start, end), etag

    async def do(self, member: Member, items: Sequence[int], attempt: Attempt) -> None:
        store = member.store(self._collection)
        self.span = await store.get(self._key, *self._range, etag=self._etag)
        self._is_done = True


class _Lookup(Job):
    is_quick = True
    failures = _READ_FAILURES

    def __init__(self, collection: str, keys: Sequence[bytes], head_bytes: int) -> None:
        self.keys = keys
        self.found: dict[bytes, Entry | None] = {}
        self._collection, self._head_bytes = collection, head_bytes

    def key(self, item: int) -> bytes:
        return self.keys[item]

    async def do(self, member: Member, items: Sequence[int], attempt: Attempt) -> None:
        keys = [self.keys[item] for item in items]
        store = member.store(self._collection)
        entries = await store.lookup(keys, head_bytes=self._head_bytes)
        attempt.heard()
        self.found.update(zip(keys, entries, strict=True))

    def left(self, items: Sequence[int]) -> list[int]:
        return [item for item in items if self.keys[item] not in self.found]

    def extra_s(self, items: Sequence[int]) -> float:
        return len(items) * self._head_bytes / SLOW_BYTES_PER_S


class _Reading(Job):
    """Several nodes may bring bytes of one ask: whoever is first, and what others bring of it is
    skipped. All name the etag, so they are the same bytes."""

    is_quick = True
    failures = _READ_FAILURES

    def __init__(self, collection: str, asks: Sequence[Ask], receiver: Receiver) -> None:
        self.receiver = receiver
        self.at = [ask.start for ask in asks]
        """Of each ask the next byte."""
        self.is_done = [False] * len(asks)
        self._collection, self._asks = collection, asks

    def key(self, item: int) -> bytes:
        return self._asks[item].key

    async def do(self, member: Member, items: Sequence[int], attempt: Attempt) -> None:
        asks = [self._asks[item]._replace(start=self.at[item]) for item in items]
        await member.store(self._collection).read_into(asks, _Share(self, items, attempt))
        for item in items:
            self.is_done[item] = True

    def left(self, items: Sequence[int]) -> list[int]:
        ends = ((item, self._asks[item].end) for item in items)
        return [item for item, end in ends if not self.is_done[item] and self.at[item] < end]


class _Share:
    """Takes from one node, for the receiver of all."""

    def __init__(self, reading: _Reading, items: Sequence[int], attempt: Attempt) -> None:
        self._reading, self._items, self._attempt = reading, items, attempt
        self._is_new = True  # what is being received

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        reading, item = self._reading, self._items[number]
        known_bytes = num_bytes if reading.is_done[item] else reading.at[item] - start
        self._is_new = known_bytes <= 0
        if self._is_new:
            return reading.receiver.room(item, start, num_bytes)
        return memoryview(bytearray(min(known_bytes, num_bytes, SKIPPED_BYTES)))

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        self._attempt.heard()
        if self._is_new:
            item = self._items[number]
            self._reading.at[item] = start + num_bytes
            self._reading.receiver.taken(item, start, num_bytes)

    def gone(self, number: int) -> None:
        self._attempt.heard()
        item = self._items[number]
        if not self._reading.is_done[item]:
            self._reading.is_done[item] = True
            self._reading.receiver.gone(item)
