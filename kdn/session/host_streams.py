"""Streams of chunks in shared memory, for all engines of one host whose cache lies on a GPU.

A GPU decodes a stream in less time than its values would take to get there, so such a host keeps
streams as they are stored: a twentieth of the memory, and of what crosses the bus. A stream is a
file named by the chunk's key (stream_file.py), with as many levels as there were; one with more
levels takes its place. When there is no room streams fade, level by level (fading.py).

What lies here is believed: it is in a folder that only its user can open (host_folder.py), and
files appear whole. All the same a header is believed only when its seal is that of the chunk's
namespace and it is of this chunk, model and profile; that is remembered for as long as the file is
the same. Whatever is wrong with a file makes it a miss, and a damaged one goes.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kdn.cache.keys import Chunk
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream, Buffer
from kdn.codec.header import Header, header_size
from kdn.delivery.lookup import verified_head
from kdn.delivery.request import BODY_KLD, enough_levels, worst_kld
from kdn.delivery.sink import Arrival, Sink
from kdn.errors import FormatError, KdnError, MismatchError, TruncatedError, UnsupportedError
from kdn.session.delivered import Grade
from kdn.session.fading import SPARE, Kept, Room
from kdn.session.host_folder import Here, HostFolder, OnChange
from kdn.session.stream_file import FileHead, HeldLevels, ends_in_file, parse_head, read_start

logger = logging.getLogger(__name__)

TOKEN_AGE_NS = 100_000
"""A chunk counts as used so much earlier for each token before it: about as fast as a GPU reads, so
that of one prompt the end goes before the beginning, without which it is of no use."""
MAX_SEEN = 4096
"""Headers that are remembered; a few kilobytes each."""
BATCHES = 4
"""That a sink gets at once: while it decodes one it can read the next. More would be in vain if one
of them fails, and all their files are open for so long."""
_NAME = re.compile(r"(?:[0-9a-f]{2})+\.stream")


class _Seen(NamedTuple):
    """A file whose header was verified, and by what it is known again."""

    inode: int
    written_ns: int
    size_bytes: int
    header: Header
    head: FileHead
    levels: int
    checked: list[int]
    """One number: so many of its levels were checked by this process."""

    @classmethod
    def of(cls, about: os.stat_result, header: Header, head: FileHead) -> _Seen:
        inode, written_ns, size = about.st_ino, about.st_mtime_ns, about.st_size
        return cls(inode, written_ns, size, header, head, head.levels_in(size), [0])

    def is_same(self, about: os.stat_result) -> bool:
        return (self.inode, self.written_ns, self.size_bytes) == (
            about.st_ino, about.st_mtime_ns, about.st_size,
        )  # fmt: skip


class HostStreams:
    """Of one model on this host. Any thread and any process of its user may use it."""

    def __init__(
        self,
        place: Path,
        codec: Codec,
        dtype: torch.dtype,
        max_bytes: int,
        clock_ns: Callable[[], int] = time.time_ns,
        spare: float = SPARE,
        on_change: OnChange | None = None,
    ) -> None:
        """`dtype`: the engine's; streams that do not decode to it are not for it."""
        self._folder = HostFolder(place, _NAME, on_change)
        self._codec, self._dtype, self._clock_ns = codec, dtype, clock_ns
        self._expected_kld = codec.expected_kld
        self._room = Room(max_bytes, clock_ns, spare)
        self._putting = threading.Lock()  # guards _room
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._looking = threading.Lock()  # guards _seen
        self._telling = threading.Lock()  # guards what is counted as not kept

    @property
    def counts(self) -> Counter[str]:
        """Levels that this process let go (`faded`), streams (`forgotten`), and those that it could
        not keep (`unkept`)."""
        return self._room.counts

    # what is held

    @contextmanager
    def looking(self, worst_kld: float) -> Iterator[Callable[[Chunk], bool]]:
        """Whether a chunk is held well enough; reading it may still find it gone or damaged. All
        levels are always enough: nobody has more."""
        wanted = enough_levels(self._expected_kld, worst_kld)
        self._room.asked(wanted)
        with ExitStack() as stack:
            here = self._entered(stack)
            yield lambda chunk: self._num_levels(here, chunk) >= wanted

    def has(self, chunk: Chunk, worst_kld: float) -> bool:
        """The same, of one chunk."""
        with self.looking(worst_kld) as has:
            return has(chunk)

    def levels(self, chunk: Chunk) -> int:
        """How many of the first levels are held."""
        with ExitStack() as stack:
            return self._num_levels(self._entered(stack), chunk)

    def _num_levels(self, here: Here | None, chunk: Chunk) -> int:
        seen = None if here is None else self._look(here, chunk)
        return seen.levels if seen else 0

    def _entered(self, stack: ExitStack) -> Here | None:
        """The folder, open; None if there is none, or none that can be believed."""
        try:
            return stack.enter_context(self._folder.opened())
        except (OSError, UnsupportedError):
            return None

    @contextmanager
    def opened(self, chunks: Sequence[Chunk], levels: Sequence[int]) -> Iterator[list[Bitstream]]:
        """The streams of the first of these chunks, as far as each has so many levels. They can be
        read until this is left."""
        with ExitStack() as stack:
            here = self._entered(stack)
            yield [] if here is None else list(self._open(here, chunks, levels, stack))

    def _open(
        self, here: Here, chunks: Sequence[Chunk], levels: Sequence[int], stack: ExitStack
    ) -> Iterator[Bitstream]:
        for chunk, wanted in zip(chunks, levels, strict=True):
            try:
                file, about = here.take(_name(chunk))
            except (OSError, FormatError):
                return
            stack.callback(os.close, file)
            seen = self._recalled(chunk, about) or self._read(here, chunk)
            if seen is None or seen.levels < wanted or not seen.is_same(about):
                return  # it was replaced just now, if it is another
            held = HeldLevels(seen.header, seen.head, seen.levels, file, seen.checked)
            yield Bitstream(seen.header, held, verified=range(seen.levels))

    def _look(self, here: Here, chunk: Chunk) -> _Seen | None:
        """Its file, if there is one that can be believed and has a level."""
        try:
            about = here.about(_name(chunk))
        except OSError:
            return None
        if about is None:
            return None
        seen = self._recalled(chunk, about) or self._read(here, chunk)
        return seen if seen is not None and seen.levels else None

    def _recalled(self, chunk: Chunk, about: os.stat_result) -> _Seen | None:
        """What was verified before, if it is the same file."""
        with self._looking:
            seen = self._seen.get(chunk.key)
            if seen is None or not seen.is_same(about):
                return None
            self._seen.move_to_end(chunk.key)
            return seen

    def _read(self, here: Here, chunk: Chunk) -> _Seen | None:
        try:
            with here.open(_name(chunk)) as file:
                about, start = os.fstat(file), read_start(file)
            head = parse_head(start)
            header = self._believed(start[head.stream_at :], chunk)
        except (FormatError, MismatchError):
            self._discard(here, chunk)
            return None
        except (OSError, UnsupportedError):
            return None
        seen = _Seen.of(about, header, head)
        self._remember(chunk, seen)
        return seen if seen.levels else None

    def _believed(self, data: bytes, chunk: Chunk) -> Header:
        """The stream's header, if it is for this chunk and this engine."""
        header = verified_head(data, chunk, self._codec)
        if max(header.info.valid_from) > chunk.start or not self._codec.decodes_to(
            header.info, self._dtype
        ):
            raise UnsupportedError("a stream that lacks tokens, or of another dtype")
        return header

    def _remember(self, chunk: Chunk, seen: _Seen) -> None:
        with self._looking:
            self._seen[chunk.key] = seen
            self._seen.move_to_end(chunk.key)
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def _discard(self, here: Here, chunk: Chunk) -> None:
        with self._looking:
            self._seen.pop(chunk.key, None)
        with suppress(OSError):
            here.remove(_name(chunk))

    # delivering

    def deliver(
        self,
        chunks: Sequence[Chunk],
        sink: Sink,
        end: int,
        enough_kld: float,
        is_late: Callable[[], bool] = lambda: False,
    ) -> tuple[Grade, ...]:
        """Decode what is held, good enough for a context up to `end`, into the sink, as far as it
        goes without a gap and before it is late: the grades of these first chunks."""
        expected = self._expected_kld
        wanted = levels_wanted(expected, chunks, end, enough_kld)
        grades: list[Grade] = []
        size = BATCHES * sink.batch_chunks
        for first in range(0, len(chunks), size):
            if is_late():
                break
            own, levels = chunks[first : first + size], wanted[first : first + size]
            with self.opened(own, levels) as streams:
                batch = [Arrival(*one, False) for one in zip(own, streams, levels, strict=False)]
                failures = sink.decode(batch) if batch else []
                self._drop_damaged(batch, failures)
            good = next((i for i, one in enumerate(failures) if one is not None), len(batch))
            grades += [Grade.of_levels(one.levels, expected) for one in batch[:good]]
            if good < len(own):
                break
        return tuple(grades)

    def _drop_damaged(self, batch: Sequence[Arrival], failures: Sequence[KdnError | None]) -> None:
        damaged = [
            one.chunk
            for one, failure in zip(batch, failures, strict=True)
            if isinstance(failure, FormatError) and not isinstance(failure, TruncatedError)
        ]
        if damaged:
            with suppress(OSError, UnsupportedError), self._folder.opened() as here:
                for chunk in damaged:
                    self._discard(here, chunk)

    def used(self, chunks: Sequence[Chunk]) -> None:
        """These were of use just now."""
        with suppress(OSError, UnsupportedError), self._folder.opened() as here, self._putting:
            for chunk in chunks:
                about, used_ns = here.about(_name(chunk)), self._used_ns(chunk)
                if about is not None:
                    with suppress(FileNotFoundError):
                        here.touch(_name(chunk), used_ns, about.st_mtime_ns)
                    self._room.used(_name(chunk), used_ns)

    def _used_ns(self, chunk: Chunk) -> int:
        return self._clock_ns() - TOKEN_AGE_NS * chunk.start

    # keeping

    def put(self, chunk: Chunk, data: Buffer, levels: int) -> bool:
        """Keep the first `levels` levels of a stream, verified by whoever brings them, or as many
        as there is room for; unless as many are there. UnsupportedError if the folder is another's
        by now."""
        if self.levels(chunk) >= levels:  # mostly, and far sooner known than what the header says
            return False
        view = memoryview(data).cast("B")
        try:
            header = self._believed(bytes(view[: header_size(view)]), chunk)
        except KdnError:
            return False
        if not 1 <= levels <= header.info.num_levels or len(view) < header.level_end(levels - 1):
            return False
        try:
            with self._putting:
                self._folder.make()  # it may have been removed, to free the memory
                with self._folder.opened() as here:
                    return self._put(here, chunk, header, view, levels)
        except OSError as error:  # no memory left, or the folder goes just now
            self.note_unkept(str(error))
            return False

    def note_unkept(self, why: str) -> None:
        """Count a stream that is not kept; the first is told. From any thread."""
        with self._telling:
            self.counts["unkept"] += 1
            if self.counts["unkept"] > 1:
                return
        free = "unknown"
        with suppress(OSError):
            disk = os.statvfs(self._folder.path)
            free = f"{disk.f_bavail * disk.f_frsize:,}"
        logger.warning(
            "a chunk is not kept in %s (%s bytes free): %s. Later ones are only counted",
            self._folder.path, free, why,
        )  # fmt: skip

    def _put(self, here: Here, chunk: Chunk, header: Header, data: memoryview, levels: int) -> bool:
        seen = self._look(here, chunk)
        if seen is not None and seen.levels >= levels:
            return False
        used_ns = self._used_ns(chunk)
        new = Kept(_name(chunk), 0, used_ns, ends_in_file(header), levels)
        levels = self._room.make(here, new)
        if not levels:
            self.note_unkept("there is no room for it")
        if levels <= (seen.levels if seen else 0):
            return False
        head = FileHead.of(header, data, levels)
        first = head.pack(data[: header.size_bytes])
        here.write(new.name, [first, data[: header.level_end(levels - 1)]])
        here.touch(new.name, used_ns, self._clock_ns())
        about = here.about(new.name)
        if about is not None:
            self._room.note(here, replace(new, inode=about.st_ino, levels=levels))
            self._remember(chunk, _Seen.of(about, header, head))
        return True


def levels_wanted(
    expected_kld: Sequence[float], chunks: Sequence[Chunk], end: int, enough_kld: float
) -> list[int]:
    """How many levels of each chunk make a context up to `end` good enough. The last tokens count
    half: what those before them leave of what is enough, as they come in whole levels, these may
    use up."""
    body_kld = BODY_KLD * enough_kld
    body = enough_levels(expected_kld, body_kld)
    left_kld = 2 * enough_kld - expected_kld[body - 1]

    def wanted(chunk: Chunk) -> int:
        worst = worst_kld(chunk, end, enough_kld)
        is_tail = worst < body_kld
        return enough_levels(expected_kld, max(worst, left_kld)) if is_tail else body

    return [wanted(chunk) for chunk in chunks]


def _name(chunk: Chunk) -> str:
    return f"{chunk.key.hex()}.stream"
