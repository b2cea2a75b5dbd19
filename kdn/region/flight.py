"""A byte range on its way from the centre, for all who wait for some of it."""

from __future__ import annotations

import asyncio

from xxhash import xxh3_64_intdigest

from kdn.errors import ChecksumError, KdnError


class GoneError(KdnError):
    """The centre no longer has the object."""


class Flight:
    """Bytes [start, end) of an object. They can be read as far as they are `ready`: verified by the
    checksums that they travelled with."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.size_bytes = end - start
        self.ready = start
        self.error: KdnError | None = None
        self._buffer = bytearray(end - start)
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @classmethod
    def landed(cls, data: bytes) -> Flight:
        """The first bytes of an object, which came with a lookup."""
        flight = cls(0, len(data))
        flight._buffer[:] = data
        flight.ready = flight.end
        return flight

    def room(self, position: int, num_bytes: int) -> memoryview:
        at = position - self.start
        return memoryview(self._buffer)[at : at + num_bytes]

    def check(self, start: int, num_bytes: int, checksum: int) -> None:
        """The bytes from `start` on have come: ChecksumError if they are others."""
        found = xxh3_64_intdigest(self.room(start, num_bytes))
        if found != checksum:
            raise ChecksumError(f"expected bytes with xxh3-64 {checksum:016x}, found {found:016x}")
        self.ready = start + num_bytes
        self._wake()

    def fail(self, error: KdnError) -> None:
        """No more will come, so it ends with what is ready."""
        if self.ready < self.end:
            self.error, self.end = error, self.ready
            self._wake()

    async def read(self, start: int, end: int) -> bytes:
        """Some bytes from `start` on, when there are any; its error if it failed before."""
        if self.ready <= start and self.error is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((start + 1, future))
            await future
        if self.ready <= start:
            assert self.error is not None
            raise self.error
        return bytes(self.room(start, min(end, self.ready) - start))

    def data(self) -> bytes:
        """All that is ready."""
        return bytes(self.room(self.start, self.ready - self.start))

    def _wake(self) -> None:
        left = []
        for position, future in self._waiting:
            if future.done():
                continue
            if position <= self.ready or self.error is not None:
                future.set_result(None)
            else:
                left.append((position, future))
        self._waiting = left
