"""What an export knows of the chunks of a prompt: the pages of its index, read and followed.

The keys of a lookup are those of one prompt, in order: the first one's page is asked for, and lists
what follows it. So most lookups are one request. Of a page that is long because a context is, only
as much is read as the prompt may need. Pages that were read lately are kept: they are asked for
again on condition that they changed, and those that they lead to beside them, not after them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kdn.errors import FormatError, LimitError
from kdn.store.base import Entry
from kdn.store.static_client import Found, StaticClient
from kdn.store.static_layout import (
    KEY_BYTES,
    MAX_PAGE_BYTES,
    Page,
    index_path,
    parse_page,
)

FRESH_S = 2.0
"""A page is not asked for again within this time."""
KEPT_BYTES = 16 << 20
"""Of pages."""
ENTRY_BYTES = 1408
"""Of a page, for a chunk: as most streams' headers are."""
FIRST_BYTES, MORE_BYTES = 64 << 10, 256 << 10
"""Of a page, for a lookup of few or of many keys: some of them are guesses at where it ends."""
GUESSED_KEYS = 512
"""A lookup of more keys is of so many chunks, but for a few."""
BRANCHES = 64
"""Chunks beside the longest chain of a page: fewer than these."""
MAX_PAGES = 64
"""That one lookup follows."""
FEW_KEYS = 4
"""Each of them is tried where they may be of contexts that have nothing in common."""


@dataclass
class _Kept:
    """A page, as far as it was read."""

    body: bytes
    size_bytes: int
    etag: str
    page: Page
    read_s: float

    @property
    def is_complete(self) -> bool:
        return len(self.body) == self.size_bytes


@dataclass
class _Walk:
    """One lookup under way."""

    keys: Sequence[bytes]
    wanted: frozenset[bytes]
    found: dict[bytes, Entry] = field(default_factory=dict)
    visited: set[bytes] = field(default_factory=set)

    @property
    def first_bytes(self) -> int:
        needed = len(self.keys) * ENTRY_BYTES
        most = MORE_BYTES if len(self.keys) <= GUESSED_KEYS else MAX_PAGE_BYTES
        return min(max(FIRST_BYTES, needed), most)

    def goes_on(self, page: Page) -> bool:
        """Whether more of this page may be wanted: the last chunks of it were."""
        last = islice(reversed(page.entries), BRANCHES)
        return not page.entries or any(key in self.wanted for key in last)

    def take(self, page: Page) -> list[bytes]:
        """What is wanted of it, and the pages to look at next."""
        self.found |= {key: one for key, one in page.entries.items() if key in self.wanted}
        onward = [] if page.instead is None else [page.instead]
        for key, pages in page.onward.items():
            if key in self.wanted:
                onward += [one for one in pages if one in self.wanted] if pages else self._next(key)
        return [one for one in onward if one not in self.visited]

    def _next(self, key: bytes) -> Sequence[bytes]:
        after = self.keys.index(key) + 1
        return self.keys[after : after + 1]


class Index:
    def __init__(self, client: StaticClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._homes: dict[bytes, bytes] = {}  # of chunks in kept pages: the page's key

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Those of the keys that are there."""
        asked = [key for key in dict.fromkeys(keys) if len(key) == KEY_BYTES]
        walk = _Walk(asked, frozenset(asked))
        if not asked:
            return {}
        expected = self._expected(walk)
        await asyncio.gather(*(self._read(name, walk) for name in expected))
        await self._follow(walk, expected)
        if not walk.found and len(asked) <= FEW_KEYS:
            await self._follow(walk, [key for key in asked if key not in walk.visited])
        return walk.found

    async def _follow(self, walk: _Walk, names: Sequence[bytes]) -> None:
        todo = list(names)
        while todo and len(walk.visited) < MAX_PAGES:
            some = list(dict.fromkeys(todo))[: MAX_PAGES - len(walk.visited)]
            walk.visited.update(some)
            pages = await asyncio.gather(*(self._read(name, walk) for name in some))
            todo = [one for page in pages if page is not None for one in walk.take(page)]

    def _expected(self, walk: _Walk) -> list[bytes]:
        """The first key's page, and all that a walk through what is kept would visit."""
        names: list[bytes] = []
        first = walk.keys[0]
        known = next((self._homes[key] for key in walk.keys if key in self._homes), first)
        todo = list(dict.fromkeys([self._homes.get(first, first), known]))
        trial = _Walk(walk.keys, walk.wanted)
        while todo and len(names) < MAX_PAGES:
            trial.visited.update(todo)
            names += todo
            pages = [self._kept[name].page for name in todo if name in self._kept]
            todo = [one for page in pages for one in trial.take(page)]
        return names

    async def _read(self, name: bytes, walk: _Walk) -> Page | None:
        """The page, or as much of it as may be wanted; None if there is none."""
        kept = self._kept.get(name)
        if kept is None or self._clock() - kept.read_s > FRESH_S:
            kept = await self._ask(name, kept, walk.first_bytes)
        if kept is not None and not kept.is_complete and walk.goes_on(kept.page):
            kept = await self._extend(name, kept)
        return None if kept is None else kept.page

    async def _ask(self, name: bytes, before: _Kept | None, first_bytes: int) -> _Kept | None:
        etag = before.etag if before is not None else ""
        path = index_path(name)
        found = await self._client.get_if_changed(path, MAX_PAGE_BYTES, etag, first_bytes)
        if isinstance(found, str) and before is not None:
            before.read_s = self._clock()
            return before
        if not isinstance(found, Found):
            self._forget(name)
            return None
        return self._keep(name, found.body, found)

    async def _extend(self, name: bytes, kept: _Kept) -> _Kept | None:
        """The rest of a page; all of it, if it has changed or cannot be told apart from another."""
        start = len(kept.body) if kept.etag else 0
        found = await self._client.get(
            index_path(name), MAX_PAGE_BYTES, start=start, known=kept.etag
        )
        if found is None:
            self._forget(name)
            return None
        if found.start and (found.etag, found.size_bytes) != (kept.etag, kept.size_bytes):
            raise FormatError(f"expected the rest of the index of {name.hex()}, found another's")
        body = kept.body + found.body if found.start else found.body
        return self._keep(name, body, found)

    def _keep(self, name: bytes, body: bytes, found: Found) -> _Kept:
        if found.size_bytes > MAX_PAGE_BYTES:
            raise LimitError(
                f"expected an index of at most {MAX_PAGE_BYTES} bytes, found {found.size_bytes}"
            )
        page = parse_page(name, body, complete=len(body) == found.size_bytes)
        self._forget(name)
        self._kept[name] = kept = _Kept(body, found.size_bytes, found.etag, page, self._clock())
        self._homes.update(dict.fromkeys(page.entries, name))
        while sum(len(one.body) for one in self._kept.values()) > KEPT_BYTES:
            self._forget(next(iter(self._kept)))
        return kept

    def _forget(self, name: bytes) -> None:
        kept = self._kept.pop(name, None)
        for key in kept.page.entries if kept is not None else ():
            if self._homes.get(key) == name:
                del self._homes[key]
