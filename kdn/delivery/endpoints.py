"""Where bytes can come from: stores, and nodes whose address may change.

An endpoint that fails rests for a while, longer each time, and is asked again until it works. One
that was given as a resolver is resolved again after each failure: a node that moved is found at its
new address. Endpoints outlive deliveries, so that connections and experience are reused.

An endpoint also remembers the streams that were forged or do not decode. They count as misses, and
whoever computes such a chunk anew may put the right stream in the place of the wrong one. They are
tried again after a while, longer each time: perhaps only the way here was bad.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import NamedTuple

from kdn.errors import KdnError
from kdn.store.base import Store

FIRST_REST_S = 0.02
LONGEST_REST_S = 1.0
MAX_REJECTED = 4096
FIRST_REJECTION_S = 60.0
LONGEST_REJECTION_S = 3600.0

Resolve = Callable[[], Awaitable[str]]
Connect = Callable[[str], Store]


class _Rejection(NamedTuple):
    etag: bytes
    rest_s: float
    until_s: float


class Endpoint:
    def __init__(self, store: Store | None = None, *, name: str = "", local: bool = False) -> None:
        """A store that its owner closes. `local`: asked first, and says nothing about the link."""
        self.name = name or (type(store).__name__ if store else "node")
        self.local = local
        self._store = store
        self._resolve: Resolve | None = None
        self._connect: Connect | None = None
        self._url = ""
        self._stale = False  # to be resolved again
        self._lock = asyncio.Lock()  # guards changing the store
        self._failures = 0
        self._failed_s = -1.0
        self._rests_until_s = 0.0
        self._rejected: OrderedDict[bytes, _Rejection] = OrderedDict()  # by key

    @classmethod
    def moving(cls, resolve: Resolve, connect: Connect, *, name: str = "") -> Endpoint:
        """A node at the URL that `resolve` tells, now and again after each failure."""
        endpoint = cls(name=name)
        endpoint._resolve, endpoint._connect, endpoint._stale = resolve, connect, True
        return endpoint

    def __repr__(self) -> str:
        return f"Endpoint({self.name})"

    async def store(self) -> Store:
        """Its store, at its present address."""
        async with self._lock:
            if self._stale and self._resolve and self._connect:
                url = await self._resolve()
                if url != self._url or self._store is None:
                    await self._disconnect()
                    self._store, self._url = self._connect(url), url
                self._stale = False
        assert self._store is not None
        return self._store

    def is_ready(self, now_s: float) -> bool:
        return now_s >= self._rests_until_s

    @property
    def rests_until_s(self) -> float:
        return self._rests_until_s

    def failed(self, began_s: float, now_s: float, rng: Random) -> None:
        """A request that began then has failed. Those that failed together count once."""
        self._stale = True
        if began_s < self._failed_s:
            return
        rest_s = min(FIRST_REST_S * 2**self._failures, LONGEST_REST_S)
        self._failures = min(self._failures + 1, 30)
        self._failed_s = now_s
        self._rests_until_s = now_s + rest_s * rng.uniform(0.5, 1.0)

    def worked(self) -> None:
        self._failures = 0

    def reject(self, key: bytes, etag: bytes, now_s: float) -> None:
        """The stream that it has under this key is not one that a reader can use."""
        before, rest_s = self._rejected.get(key), FIRST_REJECTION_S
        if before is not None and before.etag == etag:
            rest_s = min(2 * before.rest_s, LONGEST_REJECTION_S)
        self._rejected[key] = _Rejection(etag, rest_s, now_s + rest_s)
        self._rejected.move_to_end(key)
        if len(self._rejected) > MAX_REJECTED:
            self._rejected.popitem(last=False)

    def accept(self, key: bytes) -> None:
        """What it has under this key now is right."""
        self._rejected.pop(key, None)

    def rejected(self, key: bytes) -> bytes | None:
        """The etag of the stream under this key that was rejected last: it may be replaced."""
        found = self._rejected.get(key)
        return None if found is None else found.etag

    def is_rejected(self, key: bytes, etag: bytes, now_s: float) -> bool:
        """Whether this stream is not worth another try yet."""
        found = self._rejected.get(key)
        return found is not None and found.etag == etag and now_s < found.until_s

    async def _disconnect(self) -> None:
        store, self._store = self._store, None
        if store is not None and self._resolve:
            with suppress(KdnError, OSError):
                await store.close()

    async def close(self) -> None:
        """Close what it connected to itself."""
        if self._resolve:
            self._stale = True
            await self._disconnect()


class Endpoints:
    """All places to ask, the best first; local ones before all others."""

    def __init__(self, places: Iterable[Store | Endpoint]) -> None:
        every = [place if isinstance(place, Endpoint) else Endpoint(place) for place in places]
        self._all = sorted(every, key=lambda endpoint: not endpoint.local)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def local(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._all if endpoint.local]

    @property
    def remote(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._all if not endpoint.local]

    async def close(self) -> None:
        for endpoint in self._all:
            await endpoint.close()

    async def __aenter__(self) -> Endpoints:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
