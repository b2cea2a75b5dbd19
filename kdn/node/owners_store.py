"""A worker's view of the objects that its node's owner keeps.

The owner is asked what there is. Bytes on its disk are read from the files themselves: whoever
knows key and etag knows the file's name, and a file of that name is a whole object, with its
checksums. What is not on disk, or damaged there, comes from the owner.

Files stay open for a while, to be read again without asking (`disk_open.py`). The owner tells when
one has to be forgotten, as for a worker's memory, which is a tier above this one (`worker.py`). Of
what it evicts it says nothing, so that all are closed now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kdn.errors import FormatError, NotAllowedError, StoreError
from kdn.node.link import Fields, Link
from kdn.store.base import Entry, Hints, Span, Stats, Store
from kdn.store.disk_files import Files
from kdn.store.disk_open import OpenFiles
from kdn.store.disk_reading import ObjectReader

READERS = 4
OPEN_S = 20.0
"""For which a file stays open: what was evicted takes its place on disk for so long."""
TELL_S = 1.0
MAX_USED = 4096
"""Keys told at once: what was read since the last time, as far as that goes."""


class OwnersStore(Store):
    """`folder`: of the owner's disk, if it has one."""

    def __init__(self, link: Link, folder: Path | None):
        self._link = link
        self.kind = "memory" if folder is None else "disk"  # where the owner has its objects
        files = Files()
        self._reader = None if folder is None else ObjectReader(folder, files)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="kdn-worker-read")
        self._open = OpenFiles(files)
        self._closing: asyncio.TimerHandle | None = None
        self._used: dict[bytes, None] = {}
        self._telling: asyncio.TimerHandle | None = None

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        asked = [key.hex() for key in keys]
        answer, heads = await self._link.ask("find", keys=asked, head_bytes=head_bytes)
        found: list[Entry | None] = []
        at = 0
        for fields in answer["entries"]:
            size_bytes = fields["head_bytes"] if fields else 0
            found.append(unpack(fields, heads[at : at + size_bytes]) if fields else None)
            at += size_bytes
        return found

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        if self._reader is not None:
            span = await self._read(self._reader, key, start, end, etag)
            if span is not None and not span.is_short_of(end):  # its memory may have more of it
                return span
        asked_etag = None if etag is None else etag.hex()
        answer, data = await self._link.ask(
            "get", key=key.hex(), start=start, end=end, etag=asked_etag
        )
        return Span(unpack(answer["entry"]), answer["start"], data) if answer["entry"] else None

    async def _read(
        self, reader: ObjectReader, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        if etag is None:
            [entry] = await self.lookup([key])
            if entry is None:
                return None
        else:
            entry = Entry(key, etag, 0)
        loop = asyncio.get_running_loop()
        try:
            span = await loop.run_in_executor(self._threads, reader.read, entry, start, end)
        except (FormatError, StoreError):  # the owner finds that out, too, and does what is due
            return None
        if span is not None:
            self._use(key)
            self._keep_open(reader, span.entry)
        return span

    def _keep_open(self, reader: ObjectReader, entry: Entry) -> None:
        if self._open.wants(entry.key):
            loop = asyncio.get_running_loop()
            self._open.keep(entry.key, loop.run_in_executor(self._threads, reader.open, entry))
            if self._closing is None:
                self._closing = loop.call_later(OPEN_S, self._close_files)

    def _close_files(self) -> None:
        self._closing = None
        self._open.forget_all()

    def peek(self, key: bytes) -> Entry | None:
        return self._open.entry(key)

    def get_now(self, key: bytes, start: int, end: int, etag: bytes) -> Span | None:
        span = self._open.read(key, start, end, etag)
        if span is not None:
            self._use(key)
        return span

    def _use(self, key: bytes) -> None:
        """Tell the owner in a while, for what it keeps longest."""
        self._used[key] = None
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell_used)

    def _tell_used(self) -> None:
        keys = list(self._used)[-MAX_USED:]
        self._used.clear()
        self._telling = None
        self._link.tell("used", keys=[key.hex() for key in keys])

    async def delete(self, key: bytes) -> bool:
        """Of what is remembered here."""
        self._open.forget(key)
        return False

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        raise NotAllowedError("a worker writes nothing: requests that do go to the owner")

    def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        raise NotAllowedError("a worker lists nothing: such requests go to the owner")

    @property
    def own(self) -> Store:
        """The owner is a process of this machine."""
        return self

    async def stats(self) -> Stats:
        return Stats()

    async def close(self) -> None:
        for timer in (self._telling, self._closing):
            if timer is not None:
                timer.cancel()
        self._open.close()
        self._threads.shutdown(wait=False)


def pack(entry: Entry) -> Fields:
    """As it travels between processes, but for its head."""
    parent = entry.hints.parent
    return {
        "key": entry.key.hex(),
        "etag": entry.etag.hex(),
        "size_bytes": entry.size_bytes,
        "parent": None if parent is None else parent.hex(),
        "saved_s": entry.hints.saved_s,
        "head_bytes": len(entry.head),
    }


def unpack(fields: Fields, head: bytes = b"") -> Entry:
    parent = None if fields["parent"] is None else bytes.fromhex(fields["parent"])
    return Entry(
        bytes.fromhex(fields["key"]),
        bytes.fromhex(fields["etag"]),
        fields["size_bytes"],
        Hints(parent, fields["saved_s"]),
        head,
    )
