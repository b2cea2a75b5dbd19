"""Room in the host's memory: which levels of which streams go when there is none left.

A stream fades before it is forgotten: its finest level goes first, and what is left of it is still
a coarser stream. Which goes next is decided by how long a stream was of no use and by how much the
level in question is worth. A level finer than readers ask for stays a sixteenth of the time of the
finest that they do ask for; each coarser one stays half as long again as the next finer. So streams
that were used about as recently fade together, all of them from four levels to three, to two, to
one, before the first is forgotten. But one that has not been used for long goes before a fresh one
loses what its readers need: if everything had to fade first, a full memory would end as single
levels of old texts, of use to nobody, with no room for better.

The order is exact among what this process knows. It looks at the whole folder when it begins, when
another process has put something there, and before it removes anything, but no more than every
SCAN_S; and it frees some more than it needs, so that not every stream has to make room for itself.
Before a file is cut it is looked at: one that was used meanwhile stays.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from kdn.errors import FormatError
from kdn.session.host_folder import Here, is_half_written
from kdn.session.stream_file import parse_head, read_start

PAGE_BYTES = 4096
"""Files take whole pages of memory."""
MAX_SHARE = 0.5
"""At most this share of the file system is used: other programs need shared memory, too."""
SPARE = 1 / 32
"""This share of the allowed room is freed in addition to what is needed now."""
SCAN_S = 10.0
COARSER_STAYS = 1.5
UNASKED_STAYS = 1 / 16
ASKED, ASKED_SHARE = 64, 0.9
"""Levels that satisfy this share of the last `ASKED` readers count as asked for."""
MIN_AGE_NS = 10 * 10**9
"""Files used within this time are equally fresh: only their levels decide, then their order."""
STALE_NS = 60 * 10**9
"""A file that is half-written for this long was left by a process that died."""
SLICE, PAUSE_S = 256, 0.002
"""A scan pauses after this many files, because it runs inside an engine's process."""
ROUNDS = 3


@dataclass(frozen=True)
class Kept:
    """A file, as far as room is concerned."""

    name: str
    inode: int
    used_ns: int
    level_ends: tuple[int, ...]
    """Where the stream's levels end in the file, those included that are not there."""
    levels: int
    """That are there; 0: none that anybody could read."""

    @property
    def size_bytes(self) -> int:
        end = self.level_ends[self.levels - 1] if self.levels else PAGE_BYTES
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    def turn(self, now_ns: int, asked: int) -> tuple[float, int, str]:
        """Whose finest level goes next: the least of these first."""
        age_ns = max(now_ns - self.used_ns, MIN_AGE_NS)
        stay = stays(self.levels, asked)
        return -age_ns / stay if stay else -math.inf, self.used_ns, self.name


def stays(levels: int, asked: int) -> float:
    """How long the finest of `levels` levels stays, beside the finest that readers ask for."""
    if levels > asked:
        return UNASKED_STAYS
    return COARSER_STAYS ** (asked - levels) if levels else 0.0


class Room:
    """Of one folder. For one thread at a time."""

    def __init__(
        self,
        max_bytes: int,
        clock_ns: Callable[[], int] = time.time_ns,
        spare: float = SPARE,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """`faded` levels, and `forgotten` streams, by this process."""
        self._max_bytes, self._clock_ns, self._spare = max_bytes, clock_ns, spare
        self._pause = pause
        self._files: dict[str, Kept] = {}
        self._total_bytes = 0
        self._scanned_ns = -(10**18)
        self._changed_ns = -1  # of the folder, when we last knew all that is in it
        self._asked: deque[int] = deque(maxlen=ASKED)

    def asked(self, levels: int) -> None:
        """A reader is content with so many levels. From any thread."""
        self._asked.append(levels)

    def _asked_for(self, num_levels: int) -> int:
        """As long as nobody has read, all but the last are thought to be of use."""
        asked = sorted(self._asked.copy())
        return asked[int(ASKED_SHARE * (len(asked) - 1))] if asked else max(1, num_levels - 1)

    def note(self, here: Here, kept: Kept) -> None:
        """This file is there now, put by this process."""
        self._set(kept)
        self._changed_ns = here.changed_ns

    def used(self, name: str, used_ns: int) -> None:
        if name in self._files:
            self._files[name] = replace(self._files[name], used_ns=used_ns)

    def forget(self, name: str) -> None:
        """This file is gone."""
        kept = self._files.pop(name, None)
        self._total_bytes -= kept.size_bytes if kept else 0

    def _set(self, kept: Kept) -> None:
        self.forget(kept.name)
        self._files[kept.name] = kept
        self._total_bytes += kept.size_bytes

    # making room

    def make(self, here: Here, new: Kept) -> int:
        """For how many of a new file's levels there is room, after older ones made some. Two who do
        this at once may keep a little more than allowed, or less."""
        self._look(here, is_full=False)
        if self._with(new) > self._allowed(here):
            self._look(here, is_full=True)
        allowed = self._allowed(here)
        if self._with(new) > allowed:  # what would be the first to go need not come
            asked = self._asked_for(len(new.level_ends))
            new = replace(new, levels=min(new.levels, asked))
        for _ in range(ROUNDS):
            levels, cuts = self._plan(new, allowed)
            done = [self._cut(here, *cut) for cut in cuts]
            if all(done):  # else some had been used meanwhile, and others have to go
                return levels
        return 0

    def _allowed(self, here: Here) -> int:
        return min(self._max_bytes, here.allowed_bytes(MAX_SHARE, self._total_bytes))

    def _with(self, new: Kept) -> int:
        """Bytes of all, if it took the place of the one that has its name."""
        old = self._files.get(new.name)
        return self._total_bytes - (old.size_bytes if old else 0) + new.size_bytes

    def _plan(self, new: Kept, allowed: int) -> tuple[int, list[tuple[Kept, int]]]:
        """How many levels of the new file to keep, and of which others how many. It competes as
        they do: if it is its own turn, it has to do with less."""
        total = self._with(new)
        if total <= allowed:
            return new.levels, []
        goal, now_ns = int(allowed * (1 - self._spare)), self._clock_ns()
        asked = self._asked_for(len(new.level_ends))
        every = {**self._files, new.name: new}
        heap = [kept.turn(now_ns, asked) for kept in every.values()]
        heapify(heap)
        cut: dict[str, int] = {}
        while total > goal:
            name = heappop(heap)[2]
            kept = every[name]
            if name == new.name and total <= allowed:
                break
            less = replace(kept, levels=max(0, kept.levels - 1))
            total -= kept.size_bytes - (less.size_bytes if less.levels else 0)
            every[name], cut[name] = less, less.levels
            if less.levels:
                heappush(heap, less.turn(now_ns, asked))
            elif name == new.name:
                return 0, []  # nobody has to make room for it
        levels = cut.pop(new.name, new.levels)
        return levels, [(self._files[name], left) for name, left in cut.items()]

    def _cut(self, here: Here, kept: Kept, levels: int) -> bool:
        """Down to so many levels; False if somebody had use for it, or replaced it, meanwhile."""
        about = here.about(kept.name)
        if about is None:
            self.forget(kept.name)
            return True
        if about.st_ino != kept.inode or about.st_atime_ns > kept.used_ns:
            self._set(_looked_at(here, kept.name, about, None))
            return False
        if levels:
            with suppress(FileNotFoundError, FormatError, BlockingIOError):
                _truncate(here, kept.name, kept.level_ends[levels - 1])
            self._set(replace(kept, levels=levels))
            self.counts["faded"] += kept.levels - levels
        else:
            here.remove(kept.name)
            self.forget(kept.name)
            self.counts["forgotten"] += 1
        return True

    # what there is

    def _look(self, here: Here, is_full: bool) -> None:
        """At all of it, if others may have changed it."""
        now_ns = self._clock_ns()
        first = self._changed_ns < 0
        may_differ = is_full or here.changed_ns != self._changed_ns
        if not first and not (may_differ and now_ns - self._scanned_ns >= SCAN_S * 10**9):
            return
        self._scanned_ns, self._changed_ns = now_ns, here.changed_ns
        self._files = {kept.name: kept for kept in self._scan(here, now_ns)}
        self._total_bytes = sum(kept.size_bytes for kept in self._files.values())

    def _scan(self, here: Here, now_ns: int) -> Iterator[Kept]:
        for number, (name, about) in enumerate(here.entries(), 1):
            if number % SLICE == 0:
                self._pause(PAUSE_S)
            if is_half_written(name):
                if about.st_mtime_ns < now_ns - STALE_NS:
                    here.remove(name)
                continue
            yield _looked_at(here, name, about, self._files.get(name))


def _looked_at(here: Here, name: str, about: os.stat_result, known: Kept | None) -> Kept:
    """A file, read only if it is not the one that was known. One that is not ours to understand
    counts as a single level."""
    if known is not None and known.inode == about.st_ino:
        ends = known.level_ends
    else:
        ends = (about.st_size,)
        with suppress(OSError, FormatError), here.open(name) as file:
            ends = parse_head(read_start(file)).level_ends
    levels = sum(end <= about.st_size for end in ends)
    return Kept(name, about.st_ino, about.st_atime_ns, ends, levels)


def _truncate(here: Here, name: str, end: int) -> None:
    """Readers see a short read. One at a time: a second, who knows of more levels, would make it
    longer again."""
    with here.open(name, change=True) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_size > end:
            os.ftruncate(file, end)
