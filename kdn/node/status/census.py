"""How much a node holds for each model.

Keys do not tell the model; only the headers of chunks do. The first question starts the count: all
chunks are gone through once, a few at a time. From then on the store tells what comes and goes, and
only the headers of newcomers are read. A node that nobody looks at counts nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial

from kdn.background import supervise
from kdn.codec.header import MAGIC, MODEL_AT
from kdn.depot.tenants import COLLECTIONS
from kdn.errors import KdnError
from kdn.store.base import Entry, Store
from kdn.store.tally import OWNER_BYTES, Usage

AT_ONCE = 32
REST_S = 0.01
"""After each: so the count takes a fraction of a core, and 100,000 chunks about a minute."""
SLICE = 1000
"""Keys of a list that are looked at before others may run."""
CHUNK = COLLECTIONS["chunks"]
Group = tuple[bytes, bytes]
"""The beginning of a tenant's keys, and a model's fingerprint."""


class Census:
    def __init__(self, store: Store | None):
        """`store`: one that tells what comes and goes (`Store.own`). None: nothing is here."""
        self._store = store
        self._groups: dict[bytes, Group] = {}  # by key
        self._new: dict[bytes, int] = {}  # keys whose header is yet to be read, and sizes
        self._queue: deque[bytes] = deque()  # the same keys, and some that went meanwhile
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._listed = store is None
        self._usage: dict[Group, Usage] = {}
        self._known: dict[Group, Group] = {}  # so that all keys of a group share one tuple

    def begin(self) -> None:
        if self._task is None and self._store is not None:
            self._store.watch(self)
            work = partial(self._run, self._store)
            self._task = asyncio.create_task(supervise("counting chunks by model", work))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def usage(self) -> Mapping[Group, Usage]:
        return self._usage

    @property
    def counted(self) -> float:
        """The share of chunks whose model is known."""
        if not self._listed:
            return 0.0
        known = len(self._groups)
        return known / (known + len(self._new)) if self._new else 1.0

    # what the store tells

    def came(self, key: bytes, size_bytes: int) -> None:
        if key[OWNER_BYTES : OWNER_BYTES + 1] == CHUNK:
            self._new[key] = size_bytes
            self._queue.append(key)
            self._arrived.set()

    def went(self, key: bytes, size_bytes: int) -> None:
        self._new.pop(key, None)
        group = self._groups.pop(key, None)
        if group is not None:
            self._count(group, -1, -size_bytes)

    def _count(self, group: Group, objects: int, size_bytes: int) -> None:
        usage = self._usage.setdefault(group, Usage())
        usage.objects += objects
        usage.size_bytes += size_bytes
        if not usage.objects:
            del self._usage[group]

    # what is here already, and what comes

    async def _run(self, store: Store) -> None:
        await self._list(store)
        while True:
            while self._queue:
                number = min(AT_ONCE, len(self._queue))
                await self._read(store, [self._queue.popleft() for _ in range(number)])
                await asyncio.sleep(REST_S)
            self._arrived.clear()
            await self._arrived.wait()

    async def _list(self, store: Store) -> None:
        number = 0
        async with aclosing(store.list()) as entries:
            async for entry in entries:
                if entry.key not in self._groups:
                    self.came(entry.key, entry.size_bytes)
                number += 1
                if not number % SLICE:
                    await asyncio.sleep(REST_S)
        self._listed = True

    async def _read(self, store: Store, keys: list[bytes]) -> None:
        try:
            found = await store.lookup(keys, head_bytes=MODEL_AT.stop)
        except (KdnError, OSError):  # of a disk that fails, others will tell
            self._queue.extend(keys)
            await asyncio.sleep(1.0)
            return
        for key, entry in zip(keys, found, strict=True):
            size_bytes = self._new.pop(key, None)
            if size_bytes is None or entry is None:
                continue  # it went meanwhile, or is damaged
            told = (key[:OWNER_BYTES], model_of(entry))
            group = self._groups[key] = self._known.setdefault(told, told)
            self._count(group, 1, size_bytes)


def model_of(entry: Entry) -> bytes:
    """The fingerprint; empty if this is no header."""
    is_header = entry.head.startswith(MAGIC) and len(entry.head) >= MODEL_AT.stop
    return entry.head[MODEL_AT] if is_header else b""
