"""Objects as files of a folder, bounded in bytes. What was acknowledged survives a power loss.

What is here is kept in a dictionary, filled from the index at start, so a lookup costs no I/O. All
state of this class belongs to the event loop; the file system is touched only by a few threads
(disk_folder.py, where the reasons for its safety are written). Every operation is a task of its
own that runs to its end even if its caller gives up: so dictionary, policy and files always agree.
"""

from __future__ import annotations

import gc
import logging
from asyncio import Lock, Task, shield, sleep
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from kdn.errors import FormatError, KdnError, NoSpaceError, StoreError
from kdn.store.base import Entry, Span, Stats, Store, check_put, is_taken
from kdn.store.disk_files import Files
from kdn.store.disk_folder import ObjectFolder, open_folder
from kdn.store.disk_format import header_bytes
from kdn.store.disk_index import USED, Index, Row, entry_of, row_of, used_at
from kdn.store.disk_open import OpenFiles
from kdn.store.disk_reading import file_name
from kdn.store.disk_tasks import Holds, Tasks
from kdn.store.evict import Policy, why_evicted
from kdn.store.tally import Tally, Usage, Watcher

logger = logging.getLogger(__name__)

OpenIndex = Callable[[Path], tuple[Index, list[Row]]]

SLICE_ROWS = 1000
"""Told to the policy before others may run: some milliseconds."""
READ_AT_ONCE = 16
"""Objects that one thread reads before others have their turn."""
FILE_SYSTEM_BLOCK_BYTES = 4096
OVERHEAD_BYTES = 512
"""Counted for every object besides its file: its name, inode and index row."""


def footprint_bytes(row: Row) -> int:
    """What an object counts against the capacity: its file in whole blocks of a file system."""
    key, etag, size_bytes, parent, _, _, cuts = row
    names_bytes = len(key) + len(etag) + (len(parent) if parent else 0) + len(cuts)
    file_bytes = header_bytes(size_bytes, names_bytes) + size_bytes
    blocks = -(-file_bytes // FILE_SYSTEM_BLOCK_BYTES)
    return blocks * FILE_SYSTEM_BLOCK_BYTES + OVERHEAD_BYTES


class DiskStore(Store):
    """Opened by `open_disk`."""

    kind = "disk"

    def __init__(
        self,
        folder: ObjectFolder,
        files: Files,
        tasks: Tasks,
        unlock: Callable[[], None],
        capacity_bytes: int,
        policy: Policy,
    ) -> None:
        self._folder = folder
        self._tasks = tasks
        self._unlock = unlock
        self._counts = Stats(capacity_bytes=capacity_bytes)  # bytes: with what is being written
        self._policy = policy
        self._rows: dict[bytes, Row] = {}
        self._tally = Tally()  # of the rows
        self._used: dict[bytes, int] = {}  # those used since the start, in the index at the end
        # A key with a row is free, or held by one who waits for nothing, or who cuts its object.
        self._holds = Holds()
        self._policy_filled: Task[None]
        self._entering: set[bytes] = set()  # held by puts that wait for `_room`
        self._room = Lock()  # one put at a time makes room, so that no two evict for the same bytes
        self._ticks = count()
        self._open = OpenFiles(files)

    def _fill(self, rows: Sequence[Row], corruptions: int) -> None:
        """Take over what `heal` found; `_fill_policy` is yet to come."""
        self._counts.size_bytes = sum(footprint_bytes(row) for row in rows)
        self._rows = {row[0]: row for row in rows}
        self._ticks = count(rows[-1][USED] + 1 if rows else 0)
        self._counts.corruptions = corruptions

    async def _fill_policy(self, rows: Sequence[Row]) -> None:
        """Tell the policy what is here, a little at a time: a third of all that a start takes, and
        only the first eviction needs it."""
        for start in range(0, len(rows), SLICE_ROWS):
            for row in rows[start : start + SLICE_ROWS]:
                if self._rows.get(row[0]) is row:
                    self._tell_policy(row)
            await sleep(0)
        for key in self._used:
            self._policy.touch(key)

    # Store

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        return await self._tasks.finish(self._put(entry, data, checksum, replacing))

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        row = self._rows.get(key)
        span = None
        if row is not None and etag in (None, row[1]):
            [span] = await self._tasks.finish(self._read([row], start, end))
        if span is None:
            self._counts.misses += 1
            return None
        self._counts.hits += 1
        self._use(key, start, end)
        return span

    def peek(self, key: bytes) -> Entry | None:
        row = self._rows.get(key)
        return None if row is None else entry_of(row)

    def get_now(self, key: bytes, start: int, end: int, etag: bytes) -> Span | None:
        row = self._rows.get(key)
        if row is None or row[1] != etag:
            return None
        span = self._open.read(key, start, end, etag)
        if span is not None:
            self._counts.hits += 1
            self._use(key, start, end)
        elif self._open.wants(key) and self._tasks.has_room:
            self._open.keep(key, self._tasks.in_reader(self._folder.open, entry_of(row)))
        return span

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        rows = [self._rows.get(key) for key in keys]
        if not head_bytes:
            return [None if row is None else entry_of(row) for row in rows]
        known = [row for row in rows if row is not None]
        if not known:
            return [None] * len(rows)
        spans = iter(await self._tasks.finish(self._read(known, 0, head_bytes)))
        return [_with_head(next(spans)) if row else None for row in rows]

    async def delete(self, key: bytes) -> bool:
        return await self._tasks.finish(self._delete(key))

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        for key in await self._tasks.finish(self._keys(prefix)):
            row = self._rows.get(key)
            if row is not None:
                yield entry_of(row)

    def used(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._rows:
                self._use(key)

    def usage(self, prefix: bytes) -> Usage:
        return self._tally.of(prefix, ((row[0], row[2]) for row in self._rows.values()))

    @property
    def own(self) -> Store:
        return self

    def watch(self, watcher: Watcher) -> None:
        self._tally.watcher = watcher

    async def stats(self) -> Stats:
        evicted = self._counts.evicted.copy()
        return replace(self._counts, objects=len(self._rows), evicted=evicted)

    async def close(self) -> None:
        if not await self._tasks.drain():
            return
        used = [used_at(self._rows[key], tick) for key, tick in self._used.items()]
        try:
            await self._tasks.in_thread(self._folder.close, used)
        finally:
            self._open.close()
            self._unlock()
            self._tasks.shut_down()

    # Operations, each in a task of its own

    async def _put(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None
    ) -> Entry:
        await self._tasks.in_thread(check_put, entry, data, checksum)
        async with self._holds.hold(entry.key):
            known, whole = self._rows.get(entry.key), None
            if known is not None:
                old = entry_of(known)
                if is_taken(old, replacing, entry):
                    return old
                self._remove(known)
                if old.is_beginning_of(entry):
                    whole = known  # its file has the new one's name, and is there until then
                else:
                    # First gone for good, then the new one: never two objects of one key.
                    await self._tasks.in_thread(self._folder.delete, entry.key, old)
            if not self._policy.may_cut:
                entry = replace(entry, hints=replace(entry.hints, cuts=()))
            row = row_of(entry, next(self._ticks))
            try:
                await self._make_room(row)
            except BaseException:
                if whole is not None:
                    self._add(whole)
                raise
            try:
                await self._tasks.in_thread(self._folder.write, row, data)
            except BaseException:
                self._discount(row)
                if whole is not None and self._folder.has(entry_of(whole)):
                    self._add(whole)
                raise
            self._add_row(row)
            self._counts.puts += 1
            return entry

    async def _make_room(self, newcomer: Row) -> None:
        """Count the newcomer and evict until all fits; refuse it if it is what should go."""
        size_bytes = footprint_bytes(newcomer)
        if size_bytes > self._counts.capacity_bytes:
            raise NoSpaceError(
                f"expected at most {self._counts.capacity_bytes} bytes, found {size_bytes}"
            )
        # Whoever has the room may be waiting to evict this key, of which nothing is here.
        self._entering.add(newcomer[0])
        self._holds.stir(newcomer[0])
        await shield(self._policy_filled)
        async with self._room:
            self._entering.remove(newcomer[0])
            self._count(newcomer)
            try:
                await self._shrink(newcomer[0])
            except BaseException:
                self._discount(newcomer)
                raise

    async def _shrink(self, newcomer: bytes | None = None) -> None:
        """Evict until all fits into the capacity. The policy must be filled."""
        while self._counts.size_bytes > self._counts.capacity_bytes:
            victim = self._policy.victim()
            if victim is None or victim == newcomer:
                raise NoSpaceError(
                    f"no room within {self._counts.capacity_bytes} bytes: all else is to be kept"
                )
            kept_bytes = self._policy.kept_bytes(victim)
            if not kept_bytes or not await self._cut(victim, kept_bytes):
                why = "smaller" if newcomer is None else why_evicted(self._policy, victim)
                self._policy.remove(victim)
                await self._evict(victim, why)

    async def _cut(self, key: bytes, kept_bytes: int) -> bool:
        """Only the beginning of an object stays; False if it is to go as a whole."""
        if not await self._is_free(key):
            return False
        with self._holds.hold_free(key):
            row = self._rows.get(key)
            if row is None:
                return False
            try:
                shorter = await self._tasks.in_thread(
                    self._folder.cut, entry_of(row), kept_bytes, row[USED]
                )
            except KdnError as error:
                logger.warning("%s is evicted: %s", file_name(entry_of(row)), error)
                return False
            self._swap(row, shorter)
            self._counts.cuts += 1
            return True

    async def _is_free(self, key: bytes) -> bool:
        """When nobody holds it. False if a put does that has nothing here yet, and waits for
        room."""
        while self._holds.is_held(key):  # it may still be being written
            if key in self._entering:
                return False
            await self._holds.change(key)
        return True

    async def _evict(self, key: bytes, why: str) -> None:
        if not await self._is_free(key):
            return
        with self._holds.hold_free(key):
            row = self._rows.get(key)
            if row is None:
                return
            self._remove(row)
            try:
                await self._tasks.in_thread(self._folder.evict, entry_of(row))
            except BaseException:
                self._add(row)
                raise
            self._counts.count_eviction(key, why)

    async def _delete(self, key: bytes) -> bool:
        async with self._holds.hold(key):
            row = self._rows.get(key)
            if row is not None:
                self._remove(row)
            entry = entry_of(row) if row else None
            return await self._tasks.in_thread(self._folder.delete, key, entry)

    async def _read(
        self, rows: Sequence[Row], start: int, end: int | None
    ) -> Sequence[Span | None]:
        """Verified bytes of each; None where there are none any more."""
        entries = [entry_of(row) for row in rows]
        readings: list[Span | FormatError | None] = []
        for at in range(0, len(entries), READ_AT_ONCE):
            some = entries[at : at + READ_AT_ONCE]
            readings += await self._tasks.in_reader(_read_all, self._folder, some, start, end)
        found: list[Span | None] = []
        for row, reading in zip(rows, readings, strict=True):
            if isinstance(reading, Span):
                if reading.entry != entry_of(row):
                    await self._correct(row, reading.entry)
                found.append(reading)
            else:
                await self._lose(row, reading)
                found.append(None)
        return found

    async def _keys(self, prefix: bytes) -> Sequence[bytes]:
        return await self._tasks.in_reader(_sorted, tuple(self._rows), prefix)

    async def _lose(self, row: Row, damage: FormatError | None) -> None:
        """An object's file is damaged or, without our doing, gone."""
        entry = entry_of(row)
        if self._rows.get(entry.key) is not row or self._holds.is_held(entry.key):
            return  # evicted or deleted meanwhile, or being cut, or another reader was here first
        with self._holds.hold_free(entry.key):
            self._remove(row)
            if damage is None:
                logger.warning("%s was removed by somebody else", file_name(entry))
                await self._tasks.in_thread(self._folder.forget, entry.key)
            else:
                logger.warning("%s is damaged and set aside: %s", file_name(entry), damage)
                self._counts.corruptions += 1
                await self._tasks.in_thread(self._folder.set_aside, entry.key, file_name(entry))

    async def _correct(self, row: Row, entry: Entry) -> None:
        """The index was wrong about an object; its file, which carries checksums, is believed."""
        if self._rows.get(entry.key) is not row or self._holds.is_held(entry.key):
            return
        with self._holds.hold_free(entry.key):
            self._remove(row)
            corrected = row_of(entry, row[USED])
            await self._tasks.in_thread(self._folder.correct, corrected)
            self._add(corrected)

    # State: changed on the event loop only

    def _add(self, row: Row) -> None:
        self._add_row(row)
        self._count(row)

    def _add_row(self, row: Row) -> None:
        self._rows[row[0]] = row
        self._tally.add(row[0], row[2])

    def _remove(self, row: Row) -> None:
        del self._rows[row[0]]
        self._open.forget(row[0])
        self._tally.remove(row[0], row[2])
        self._used.pop(row[0], None)
        self._discount(row)

    def _swap(self, row: Row, shorter: Row) -> None:
        """Of an object that was cut."""
        key = row[0]
        self._rows[key] = shorter
        self._open.forget(key)
        self._tally.remove(key, row[2])
        self._tally.add(key, shorter[2])
        self._counts.size_bytes += footprint_bytes(shorter) - footprint_bytes(row)
        self._policy.cut(key, footprint_bytes(shorter), shorter[2])

    def _count(self, row: Row) -> None:
        self._counts.size_bytes += footprint_bytes(row)
        self._tell_policy(row)

    def _tell_policy(self, row: Row) -> None:
        entry, size_bytes = entry_of(row), footprint_bytes(row)
        self._policy.add(entry.key, size_bytes, entry.hints)
        if entry.is_cut:
            self._policy.cut(entry.key, size_bytes, entry.size_bytes)

    def _discount(self, row: Row) -> None:
        self._counts.size_bytes -= footprint_bytes(row)
        self._policy.remove(row[0])

    def _use(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        self._policy.touch(key, start, end)
        if key in self._rows:
            self._used.pop(key, None)  # so that the order is that of the last use
            self._used[key] = next(self._ticks)


async def open_disk(
    path: Path,
    capacity_bytes: int,
    policy: Policy,
    *,
    threads: int = 4,
    deadline_s: float = 30.0,
    files: Files | None = None,
    open_index: OpenIndex = Index.open,
) -> DiskStore:
    """The store in the folder `path`, made if it is not there.

    `policy` must be new, but may already retain keys: what is here beyond `capacity_bytes`
    is evicted before this returns. `deadline_s` bounds every operation.
    """
    tasks = Tasks(threads, deadline_s)
    opening = partial(_open, path, capacity_bytes, policy, tasks, files or Files(), open_index)
    try:
        store = await tasks.in_thread(opening)
    except BaseException:
        tasks.shut_down()
        raise
    store._policy_filled = tasks.start(store._fill_policy(tuple(store._rows.values())))
    try:
        if store._counts.size_bytes > capacity_bytes:
            await store._policy_filled
            await store._shrink()
    except StoreError as error:
        logger.warning("%s holds more than its capacity: %s", path, error)
    return store


def _open(
    path: Path,
    capacity_bytes: int,
    policy: Policy,
    tasks: Tasks,
    files: Files,
    open_index: OpenIndex,
) -> DiskStore:
    with ExitStack() as stack, _no_cycle_collection():
        lock = open_folder(path, files)
        stack.callback(files.close, lock)
        index, rows = open_index(path / "index.sqlite")
        stack.callback(index.close)
        folder = ObjectFolder(path, files, index)
        store = DiskStore(folder, files, tasks, partial(files.close, lock), capacity_bytes, policy)
        store._fill(*folder.heal(rows))
        stack.pop_all()
    return store


@contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """A hundred thousand rows that all stay: looking for garbage among them again and again while
    they come in took a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _sorted(keys: Sequence[bytes], prefix: bytes) -> Sequence[bytes]:
    return sorted(key for key in keys if key.startswith(prefix))


def _read_all(
    folder: ObjectFolder, entries: Sequence[Entry], start: int, end: int | None
) -> list[Span | FormatError | None]:
    return [_read_one(folder, entry, start, end) for entry in entries]


def _read_one(
    folder: ObjectFolder, entry: Entry, start: int, end: int | None
) -> Span | FormatError | None:
    """Damage is a value here: one damaged object does not spoil a batch."""
    try:
        return folder.read(entry, start, end)
    except FormatError as error:
        return error


def _with_head(span: Span | None) -> Entry | None:
    return None if span is None else replace(span.entry, head=bytes(span.data))
