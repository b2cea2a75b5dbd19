"""Files of objects that are read again and again, kept open: what the system has in its memory of
them can be read at once, without a thread.

A file is opened by a thread, for a stuck disk must not hold up the event loop. From then on a read
asks the system for bytes that it need not wait for (`RWF_NOWAIT`), and verifies them as every read
does. Whatever does not come that way is read the ordinary way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from kdn.errors import FormatError
from kdn.store.base import Entry, Span, clip
from kdn.store.disk_files import Files
from kdn.store.disk_format import Header
from kdn.store.disk_reading import blocks_of, verified

MAX_FILES = 256
MAX_AT_ONCE_BYTES = 1 << 18
"""Copied and verified before others may run: 50 microseconds."""


class _Open(NamedTuple):
    fd: int
    header: Header


class OpenFiles:
    """Of one folder. Everything but opening happens on the event loop."""

    def __init__(self, files: Files, max_files: int = MAX_FILES) -> None:
        self._files = files
        self._max_files = max_files
        self._open: OrderedDict[bytes, _Open] = OrderedDict()  # the least recently read first
        self._opening: dict[bytes, object] = {}  # a token of each that is on its way
        self._closed = False

    def wants(self, key: bytes) -> bool:
        """Whether a thread should open this one, for `keep`."""
        return not self._closed and key not in self._open and key not in self._opening

    def keep(self, key: bytes, opening: asyncio.Future[tuple[int, Header] | None]) -> None:
        """Keep a file open that a thread is opening (`ObjectReader.open`)."""
        token = self._opening[key] = object()
        opening.add_done_callback(lambda opened: self._opened(key, token, opened))

    def _opened(
        self, key: bytes, token: object, opened: asyncio.Future[tuple[int, Header] | None]
    ) -> None:
        wanted = self._opening.get(key) is token  # not forgotten meanwhile: it may be another now
        if wanted:
            del self._opening[key]
        found = None if opened.cancelled() or opened.exception() else opened.result()
        if found is None:
            return
        if not wanted or self._closed:
            self._files.close(found[0])
            return
        self._open[key] = _Open(*found)
        if len(self._open) > self._max_files:
            self.forget(next(iter(self._open)))

    def entry(self, key: bytes) -> Entry | None:
        """Of an open file."""
        found = self._open.get(key)
        return None if found is None else found.header.entry

    def read(self, key: bytes, start: int, end: int, etag: bytes) -> Span | None:
        """Verified bytes, if the system has them at hand."""
        found = self._open.get(key)
        if found is None or etag != found.header.entry.etag:
            return None
        self._open.move_to_end(key)
        header = found.header
        begin, stop = clip(start, end, header.entry.size_bytes)
        first, last = blocks_of(begin, stop, header)
        if last - first > MAX_AT_ONCE_BYTES:
            return None
        try:
            blocks = self._files.read_now(found.fd, last - first, header.header_bytes + first)
            if len(blocks) != last - first:
                return None
            data = verified(header, memoryview(blocks), first, begin, stop)
        except BlockingIOError:
            return None
        except (OSError, FormatError):  # the ordinary way finds out what is wrong
            self.forget(key)
            return None
        return Span(header.entry, begin, data)

    def forget(self, key: bytes) -> None:
        """It is about to change, or was not read lately."""
        self._opening.pop(key, None)
        found = self._open.pop(key, None)
        if found is not None:
            self._files.close(found.fd)

    def forget_all(self) -> None:
        for key in [*self._open, *self._opening]:
            self.forget(key)

    def close(self) -> None:
        self._closed = True
        self.forget_all()
