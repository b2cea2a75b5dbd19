"""The process of a node that keeps everything: disk, names, quotas, rates and the limit of egress.

Its workers (`worker.py`) relay to it whatever writes, and ask it over their links what there is.
They hold copies of objects in memory. So before a deletion or a replacement is acknowledged, every
worker has said that it dropped its copy; one that does not say so in time is killed, and its memory
with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kdn.background import watched
from kdn.errors import KdnError, StoreError
from kdn.node.link import Answer, Fields, Handler, Link
from kdn.node.owners_store import pack
from kdn.node.state import Node
from kdn.store.base import Entry, Span, Stats, Store, TierReport
from kdn.store.tally import Usage, Watcher

log = logging.getLogger(__name__)

DROP_S = 10.0
METRICS_S = 5.0
COUNTS_S = 3.0
AGAIN_S = 60.0
"""Longer than a disk takes that is merely slow."""


class Workers:
    """The owner's ends of all links."""

    def __init__(self, node: Node):
        self._node = node
        self._pids: dict[Link, int] = {}
        node.depot.store = AnnouncingStore(node.depot.store, self.drop)
        node.others = self.metrics
        node.workers_counts = self.counts

    def new_link(self) -> Link:
        """A factory for the event loop's server."""
        link: Link
        handlers: dict[str, Handler] = {
            "hello": lambda fields: self._hello(link, fields),
            "find": self._find,
            "get": self._get,
            "used": self._used,
            "rate": self._rate,
            "turn": self._turn,
        }
        link = Link(handlers, lost=self._lost)
        return link

    def _lost(self, link: Link) -> None:
        self._pids.pop(link, None)

    async def drop(self, keys: Sequence[bytes]) -> None:
        """When this returns, no worker has a copy of these."""
        names = [key.hex() for key in keys]
        workers = list(self._pids.items())  # any of which may end meanwhile
        await asyncio.gather(*(self._drop(link, pid, names) for link, pid in workers))

    async def _drop(self, link: Link, pid: int, keys: list[str]) -> None:
        try:
            await link.ask("drop", DROP_S, keys=keys)
        except StoreError as error:
            if link.is_open:
                log.error("a worker does not answer", extra={"pid": pid, "error": str(error)})
                link.close()
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def metrics(self) -> list[bytes]:
        """Of every worker, as far as it answers."""
        asked = [link.ask("metrics", METRICS_S) for link in list(self._pids)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer[1] for answer in answers if isinstance(answer, tuple)]

    async def counts(self, with_tiers: bool) -> list[Fields]:
        """What every worker counted for the status, as far as it answers."""
        asked = [link.ask("counts", COUNTS_S, with_tiers=with_tiers) for link in list(self._pids)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer[0] for answer in answers if isinstance(answer, tuple)]

    # what workers ask

    async def _hello(self, link: Link, fields: Fields) -> Answer:
        self._pids[link] = fields["pid"]
        return {}, b""

    async def _find(self, fields: Fields) -> Answer:
        depot = self._node.depot
        keys = [bytes.fromhex(key) for key in fields["keys"]]
        found = await depot.wait(depot.store.lookup(keys, head_bytes=fields["head_bytes"]))
        entries = [None if entry is None else pack(entry) for entry in found]
        return {"entries": entries}, b"".join(entry.head for entry in found if entry)

    async def _get(self, fields: Fields) -> Answer:
        depot = self._node.depot
        etag = None if fields["etag"] is None else bytes.fromhex(fields["etag"])
        reading = depot.store.get(
            bytes.fromhex(fields["key"]), fields["start"], fields["end"], etag=etag
        )
        span = await depot.wait(reading)
        if span is None:
            return {"entry": None}, b""
        return {"entry": pack(span.entry), "start": span.start}, bytes(span.data)

    async def _used(self, fields: Fields) -> Answer:
        self._node.depot.store.used([bytes.fromhex(key) for key in fields["keys"]])
        return {}, b""

    async def _rate(self, fields: Fields) -> Answer:
        return {"wait_s": await self._node.tenants.rates[fields["tenant"]].wait_s()}, b""

    async def _turn(self, fields: Fields) -> Answer:
        node = self._node
        async with node.egress.turn(fields["tenant"], fields["client"], fields["num_bytes"]):
            return {}, b""


class AnnouncingStore(Store):
    """Another store. What changes in it is announced, before whoever changed it is told."""

    def __init__(
        self, store: Store, announce: Callable[[Sequence[bytes]], Coroutine[Any, Any, None]]
    ):
        self._store = store
        self._announce = announce
        self.volatile = store.volatile
        self._again: set[asyncio.Future[None]] = set()

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        async with self._announced(entry.key):
            return await self._store.put_entry(entry, data, checksum, replacing)

    async def delete(self, key: bytes) -> bool:
        async with self._announced(key):
            return await self._store.delete(key)

    @asynccontextmanager
    async def _announced(self, key: bytes) -> AsyncIterator[None]:
        """Whatever becomes of it. A disk that took too long may yet do it: then once more, later,
        for what workers have read meanwhile."""
        try:
            yield
        except BaseException:
            asyncio.get_running_loop().call_later(AGAIN_S, self._announce_again, key)
            raise
        finally:
            await self._announce([key])

    def _announce_again(self, key: bytes) -> None:
        task = asyncio.ensure_future(self._announce([key]))
        self._again.add(task)
        task.add_done_callback(self._again.discard)
        task.add_done_callback(watched("announcing a change", KdnError))

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        return await self._store.get(key, start, end, etag=etag)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        return await self._store.lookup(keys, head_bytes=head_bytes)

    def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        return self._store.list(prefix)

    def used(self, keys: Sequence[bytes]) -> None:
        self._store.used(keys)

    def usage(self, prefix: bytes) -> Usage:
        return self._store.usage(prefix)

    @property
    def own(self) -> Store | None:
        return self._store.own

    def watch(self, watcher: Watcher) -> None:
        self._store.watch(watcher)

    async def tier_reports(self) -> Sequence[TierReport]:
        return await self._store.tier_reports()

    async def stats(self) -> Stats:
        return await self._store.stats()

    async def close(self) -> None:
        await self._store.close()
