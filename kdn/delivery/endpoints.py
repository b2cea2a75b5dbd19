"""Where bytes can come from: stores, each with what was learnt of it.

An endpoint that fails rests for a while, longer each time, and is asked again until it works.
Endpoints outlive deliveries, so that connections and experience are reused.

An endpoint also remembers the streams that were forged or do not decode. They count as misses, and
whoever computes such a chunk anew may put the right stream in the place of the wrong one. They are
tried again after a while, longer each time: perhaps only the way here was bad. In the same way it
remembers streams that lacked levels which somebody needed: a longer one may take their place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kdn.store.base import Store
from kdn.store.rest import Rest

MAX_REJECTED = 4096
FIRST_REJECTION_S = 60.0
LONGEST_REJECTION_S = 3600.0


class _Rejection(NamedTuple):
    etag: bytes
    rest_s: float
    until_s: float


class _Short(NamedTuple):
    etag: bytes
    size_bytes: int


class Endpoint:
    def __init__(self, store: Store, *, name: str = "", local: bool = False) -> None:
        """A store that its owner closes. `local`: asked first, and says nothing about the link."""
        self.store, self.local = store, local
        self.name = name or type(store).__name__
        self.rest = Rest()
        """From reading. Publishing has one of its own."""
        self.refusal = ""
        """What it said when it refused to be asked."""
        self._rejected: OrderedDict[bytes, _Rejection] = OrderedDict()  # by key
        self._short: OrderedDict[bytes, _Short] = OrderedDict()  # by key

    def __repr__(self) -> str:
        return f"Endpoint({self.name})"

    def reject(self, key: bytes, etag: bytes, now_s: float) -> None:
        """The stream that it has under this key is not one that a reader can use."""
        before, rest_s = self._rejected.get(key), FIRST_REJECTION_S
        if before is not None and before.etag == etag:
            rest_s = min(2 * before.rest_s, LONGEST_REJECTION_S)
        self._rejected[key] = _Rejection(etag, rest_s, now_s + rest_s)
        self._rejected.move_to_end(key)
        if len(self._rejected) > MAX_REJECTED:
            self._rejected.popitem(last=False)

    def note_short(self, key: bytes, etag: bytes, size_bytes: int) -> None:
        """The stream that it has under this key is cut, and was too short for a reader."""
        self._short[key] = _Short(etag, size_bytes)
        self._short.move_to_end(key)
        if len(self._short) > MAX_REJECTED:
            self._short.popitem(last=False)

    def accept(self, key: bytes) -> None:
        """What it has under this key now is right."""
        self._rejected.pop(key, None)
        self._short.pop(key, None)

    def gives_way(self, key: bytes, size_bytes: int) -> bytes | None:
        """The etag of what a new stream of that size may replace: one that was rejected, or that is
        shorter."""
        short = self._short.get(key)
        is_longer = short is not None and short.size_bytes < size_bytes
        return self.rejected(key) or (short.etag if short and is_longer else None)

    def rejected(self, key: bytes) -> bytes | None:
        """The etag of the stream under this key that was rejected last: it may be replaced."""
        found = self._rejected.get(key)
        return None if found is None else found.etag

    def is_rejected(self, key: bytes, etag: bytes, now_s: float) -> bool:
        """Whether this stream is not worth another try yet."""
        found = self._rejected.get(key)
        return found is not None and found.etag == etag and now_s < found.until_s


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
