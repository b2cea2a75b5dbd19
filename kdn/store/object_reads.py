"""Reading from a bucket, many requests at a time: large objects in parts, many spans at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from kdn.errors import ChecksumError, TruncatedError
from kdn.store.base import Span, clip
from kdn.store.disk_format import BLOCK_BYTES, Header, verify_blocks
from kdn.store.object_bucket import PIECE_BYTES, Bucket
from kdn.store.object_heads import TRIES, Heads, There
from kdn.store.object_layout import path_of
from kdn.store.object_requests import ChangedError
from kdn.store.streaming import Ask, Piece, Receiver, hand_over

PART_BYTES = 8 << 20
"""Of a large object, one request brings so much."""
FIRST_BYTES = 1 << 20
"""An unknown object is asked for from its beginning, header and all, if what is wanted begins
within this."""
SKIPPED_BYTES = 2048
"""A short range that begins so near the beginning is asked for from there, header and all: servers
that stand before files may have to seek otherwise. (32 reads of 60 KB from rclone take 15 ms, not
34.)"""
AHEAD_BYTES = 64 << 20
AHEAD = 32
"""So many spans are read at once, and in order so far ahead."""

T = TypeVar("T")


class Reads:
    """`verified` reads are checked against their blocks' checksums. `into` and `in_order` are for
    readers who verify for themselves: they are pinned to one version, and no more."""

    def __init__(self, bucket: Bucket, heads: Heads) -> None:
        self._bucket, self._heads = bucket, heads
        self._streams = asyncio.Semaphore(AHEAD)

    async def _there(self, key: bytes, etag: bytes | None, more_bytes: int = 0) -> There | None:
        """The object that `etag` names (None: any), as remembered or as found."""
        there = self._heads.recall(key)
        if not _is(there, etag):
            there = await self._heads.find(key, more_bytes)
        return there if _is(there, etag) else None

    # one object, verified

    async def verified(
        self, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        damages = 0
        for _ in range(TRIES):
            there = await self._there(key, etag, _at_first(start, end))
            if there is None or there.header is None:
                return None
            try:
                return await self._verified(key, there, there.header, start, end)
            except ChecksumError:
                damages += 1
                if damages == 2:  # so it was not the way here
                    self._heads.set_aside(key, there.version)
                    return None
            except (ChangedError, TruncatedError):
                pass
            self._heads.forget(key)
        return None

    async def _verified(
        self, key: bytes, there: There, header: Header, start: int, end: int | None
    ) -> Span | None:
        entry = header.entry
        begin, stop = clip(start, end, entry.size_bytes)
        if begin == stop:
            return Span(entry, begin, b"")
        first = begin // BLOCK_BYTES
        low = first * BLOCK_BYTES
        high = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, entry.size_bytes)
        if len(there.head) >= high:
            data = memoryview(there.head)[low:high]
        else:
            data = await self._parts(key, there, header.header_bytes + low, high - low)
        verify_blocks(header, first, data)
        return Span(entry, begin, data[begin - low : stop - low])

    async def _parts(self, key: bytes, there: There, start: int, size_bytes: int) -> memoryview:
        """ChangedError if it is not there any more."""
        step = PART_BYTES if self._bucket.has_ranges else size_bytes

        async def part(begin: int) -> memoryview:
            end = min(begin + step, start + size_bytes)
            found = await self._bucket.get(path_of(key), begin, end, pin=there.version)
            if found is None or len(found.data) != end - begin:
                raise ChangedError(key.hex())
            return found.data

        if size_bytes <= step:
            return await part(start)
        whole = memoryview(bytearray(size_bytes))

        async def place(begin: int) -> None:
            data = await part(begin)
            whole[begin - start : begin - start + len(data)] = data

        await at_once(place(begin) for begin in range(start, start + size_bytes, step))
        return whole

    # many spans

    async def into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """All at once, each straight to the receiver as it arrives: nothing is held here."""
        await at_once(self._into_one(number, ask, receiver) for number, ask in enumerate(asks))

    async def _into_one(self, number: int, ask: Ask, receiver: Receiver) -> None:
        async with self._streams:
            await self._into(number, ask, receiver)

    async def _into(self, number: int, ask: Ask, receiver: Receiver) -> None:
        position = ask.start
        for _ in range(TRIES):
            there = await self._there(ask.key, ask.etag)
            if there is None or there.header is None:
                break
            try:
                async with aclosing(self._pieces(ask, there, there.header)) as pieces:
                    async for data in pieces:
                        hand_over(receiver, number, position, data)
                        position += len(data)
                return
            except (ChangedError, TruncatedError):
                self._heads.forget(ask.key)  # at the first byte, if ever: a stream is of one object
        receiver.gone(number)

    async def _pieces(self, ask: Ask, there: There, header: Header) -> AsyncGenerator[memoryview]:
        begin, stop = clip(ask.start, ask.end, header.entry.size_bytes)
        if begin == stop:
            return
        if not there.version.is_known:  # nothing tells two objects apart but their bytes
            span = await self._verified(ask.key, there, header, begin, stop)
            yield memoryview(span.data if span else b"")
            return
        path, at = path_of(ask.key), header.header_bytes
        if stop - begin <= PIECE_BYTES:
            low = 0 if at + begin <= SKIPPED_BYTES else at + begin
            found = await self._bucket.get(path, low, at + stop, pin=there.version)
            if found is None or len(found.data) != at + stop - low:
                raise ChangedError(path)
            yield found.data[at + begin - low :]
            return
        pieces = self._bucket.stream(path, at + begin, at + stop, pin=there.version)
        async with aclosing(pieces):
            async for data in pieces:
                yield data

    async def in_order(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece]:
        """Asked for ahead, within AHEAD_BYTES, and handed on one after the other."""
        parts = deque(
            (number, ask._replace(start=start, end=min(start + PART_BYTES, ask.end)))
            for number, ask in enumerate(asks)
            for start in range(ask.start, max(ask.end, ask.start + 1), PART_BYTES)
        )
        flights: deque[tuple[int, Ask, asyncio.Task[memoryview | None]]] = deque()
        gone = -1
        try:
            while parts or flights:
                while parts and len(flights) < AHEAD and _bytes(flights) < AHEAD_BYTES:
                    number, ask = parts.popleft()
                    flights.append((number, ask, asyncio.create_task(self._one(ask))))
                number, ask, task = flights.popleft()
                data = await task
                if number != gone:
                    gone = number if data is None else gone
                    yield Piece(number, ask.start, data)
        finally:
            await _end(task for _, _, task in flights)

    async def _one(self, ask: Ask) -> memoryview | None:
        collected: list[bytes | memoryview] = []
        for _ in range(TRIES):
            there = await self._there(ask.key, ask.etag)
            if there is None or there.header is None:
                return None
            try:
                async with aclosing(self._pieces(ask, there, there.header)) as pieces:
                    collected = [piece async for piece in pieces]
                return memoryview(collected[0] if len(collected) == 1 else b"".join(collected))
            except (ChangedError, TruncatedError):
                self._heads.forget(ask.key)
        return None


def _is(there: There | None, etag: bytes | None) -> bool:
    """Whether this is sound, and the one that `etag` names."""
    return there is not None and there.entry is not None and etag in (None, there.entry.etag)


def _at_first(start: int, end: int | None) -> int:
    """How much of an unknown object to ask for with its header. Blocks are verified whole."""
    if start > FIRST_BYTES:
        return 0
    stop = PART_BYTES if end is None else min(end, PART_BYTES)
    return -(-stop // BLOCK_BYTES) * BLOCK_BYTES


def _bytes(flights: Iterable[tuple[int, Ask, object]]) -> int:
    return sum(ask.end - ask.start for _, ask, _ in flights)


async def at_once(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. If one fails, the others have ended when this raises."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.gather(*running, return_exceptions=True)
