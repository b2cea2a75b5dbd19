"""From streams to what the GPU decoder reads: their levels in one buffer, where every section lies
in there, and where each token's values go. Plain torch; the copy to the device is not waited for.

The levels of a stream are copied as they are, one after the other: a section's place in the buffer
follows from the header's directory. So a batch of chunks takes a few operations on arrays, not one
for each of its thousands of sections. A directory must list exactly the sections that the profile
has, each of whole words: then every place is within the bytes that were copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.codec.copies_numba import copy_all
from kdn.codec.directory import section_code
from kdn.codec.format import Bitstream, Copy, Header
from kdn.codec.klt.gpu_memory import InputBuffer, aligned
from kdn.codec.klt.gpu_tables import SectionTables, Tensor
from kdn.codec.klt.kinds import KIND_MEANS, KIND_SINKS, KIND_TOKENS
from kdn.codec.klt.profile import CONTEXT_TOKENS
from kdn.codec.klt.streams import CudaStreams
from kdn.codec.threads import begin_parallel, num_cores
from kdn.errors import FormatError, KdnError, MismatchError

Ids = npt.NDArray[np.int64]
STREAM_ALIGNMENT = 16
MAX_READERS = 8
"""Threads that bring streams into a buffer; more hardly read faster."""
READER_BYTES = 6 << 20
"""For each of them: with less, threads wait longer for the interpreter than they copy. Of 20 MB
beside a transfer, each of eight threads copied for 1 ms, and all were done after 5."""
NO_SLOTS = np.full(1, -1, np.int64)
"""Slots of a chunk whose values are not written anywhere."""
MAX_LENGTHS = 4096
"""Streams whose sections' lengths are remembered; a kilobyte each."""


@dataclass(frozen=True)
class Slab:
    """Chunks on the device, ready to be decoded: `words` of all sections; `places` [part, chunk,
    group, 2], `class_places` [chunk, 2], `sink_places` [group, 2] and, of the last level,
    `mean_places` [chunk, group, 2] say where each begins and how many words it has; `ids`
    [tokens, 3] of each token and of those before it; `slots` and `positions` [tokens]. Every chunk
    has 256 tokens here: those that it lacks have slot -1. `skipped` [chunk] counts each one's
    sinks; only the first chunk's are decoded. `is_full`: no chunk lacks any. `status` [chunk] and
    `classes` [tokens] are for the kernels to fill."""

    words: Tensor
    places: Tensor
    class_places: Tensor
    sink_places: Tensor
    mean_places: Tensor
    tokens_of: Tensor
    skipped: Tensor
    ids: Tensor
    slots: Tensor
    positions: Tensor
    status: Tensor
    classes: Tensor
    num_chunks: int
    num_sinks: int
    is_full: bool
    size_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_chunks * CHUNK_TOKENS


class Job(NamedTuple):
    """A chunk to be decoded: its stream, each token's slot, the lengths of its sections, the
    position that its first token's keys are turned for, and how many sinks its stream holds."""

    stream: Bitstream
    chunk: Chunk
    slots: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    at: int
    sinks: int

    @property
    def wants_sinks(self) -> bool:
        """Not where they go nowhere: where a piece of a join drops its head, for one."""
        return bool((self.slots[: self.sinks] >= 0).any())

    @property
    def size_bytes(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Sections:
    """The sections that a stream has up to some level: `codes` as in its directory, and which of
    them (one more for none) belong to each part and group [parts, groups], are the classes, each
    group's sinks [groups], and its means at the last of these levels [groups]."""

    codes: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    classes: int
    sinks: npt.NDArray[np.int64]
    means: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, parts: Sequence[SectionTables], means: Sequence[tuple[int, int]], num_groups: int,
        levels: int, *, with_sinks: bool,
    ) -> Sections:  # fmt: skip
        """`means`: level and group of all sections that hold some."""
        wanted = np.full((len(parts), num_groups), -1)
        for p, part in enumerate(parts):
            for g in range(num_groups if part.level < levels else 0):
                if part.sizes[g]:
                    wanted[p, g] = section_code(part.level, g, part.kind)
        classes = section_code(0, 0, KIND_TOKENS)
        sinks = np.array([section_code(0, g, KIND_SINKS) for g in range(num_groups)])
        every_mean = {one: section_code(*one, KIND_MEANS) for one in means if one[0] < levels}
        last_means = np.array([every_mean.get((levels - 1, g), -1) for g in range(num_groups)])
        own_sinks = sinks if with_sinks else ()
        codes = np.unique([*wanted.ravel(), classes, *own_sinks, *every_mean.values()])
        codes = codes[codes >= 0]
        none = len(codes)
        return cls(
            codes,
            np.where(wanted >= 0, np.searchsorted(codes, wanted), none),
            int(np.searchsorted(codes, classes)),
            np.searchsorted(codes, sinks) if with_sinks else np.full(num_groups, none),
            np.where(last_means >= 0, np.searchsorted(codes, last_means), none),
        )

    def lengths(self, header: Header, levels: int) -> npt.NDArray[np.int64]:
        """Of a stream's sections up to that level, in bytes; FormatError unless they are these."""
        directory = header.directory
        count = int(np.searchsorted(directory.codes, levels << 24))
        if not np.array_equal(directory.codes[:count], self.codes):
            raise FormatError(f"expected the profile's {len(self.codes)} sections, found {count}")
        lengths = directory.lengths[:count]
        if (lengths & 1).any():
            raise FormatError("expected sections of whole 16-bit words")
        return lengths


class Fields:
    """Arrays one after the other at the beginning of a buffer, on the host and on the device."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self.size_bytes = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        kind = np.dtype(dtype)
        self._fields[name] = (self.size_bytes, shape, kind)
        self.size_bytes += aligned(int(np.prod(shape)) * kind.itemsize)

    def on_host(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        return {
            name: np.ndarray(shape, kind, buffer, first)
            for name, (first, shape, kind) in self._fields.items()
        }

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, (first, shape, kind) in self._fields.items():
            size = int(np.prod(shape)) * kind.itemsize
            dtype: torch.dtype = getattr(torch, kind.name)
            found[name] = buffer[first : first + size].view(dtype).view(shape)
        return found


class Filling(NamedTuple):
    """A buffer that threads fill with streams. `finish` waits for them and sends it to the device,
    for what follows in the current stream, and says which chunks could not be read: their tokens
    have slot -1. Whoever does not call it calls `wait`: until then the buffer is the threads'."""

    buffer: InputBuffer
    wait: Callable[[], object]
    finish: Callable[[CudaStreams], tuple[Slab, list[int]]]


class SlabMaker:
    """Makes slabs; holds everything that all slabs of a decoder share."""

    def __init__(
        self,
        parts: Sequence[SectionTables],
        num_groups: int,
        num_sinks: int,
        vocab_size: int,
        spare_words: int,
        means: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`spare_words`: as far as a damaged section may read beyond its end. `means`: level and
        group of sections that hold some."""
        self._parts, self._num_groups, self._num_sinks = parts, num_groups, num_sinks
        self._means = means
        self._vocab_size, self._spare_words = vocab_size, spare_words
        self._sections: dict[tuple[int, bool], Sections] = {}
        self._lengths: dict[tuple[bytes, int, bool], npt.NDArray[np.int64]] = {}

    def _sections_of(self, levels: int, *, with_sinks: bool) -> Sections:
        key = (levels, with_sinks)
        if key not in self._sections:
            self._sections[key] = Sections.of(
                self._parts, self._means, self._num_groups, levels, with_sinks=with_sinks
            )
        return self._sections[key]

    def job(
        self,
        stream: Bitstream,
        chunk: Chunk,
        levels: int,
        slots: npt.NDArray[np.int64],
        at: int | None = None,
    ) -> Job:
        """KdnError unless kernels can read nothing but what is there."""
        check_ids(chunk, self._vocab_size)
        sinks = min(self._num_sinks, chunk.num_tokens) if chunk.start == 0 else 0
        with_sinks = sinks > 0
        # The id is a digest of the header. The same streams are decoded over and over.
        key = (stream.stream_id, levels, with_sinks)
        lengths = self._lengths.get(key)
        if lengths is None:
            sections = self._sections_of(levels, with_sinks=with_sinks)
            lengths = sections.lengths(stream.header, levels)
            if len(self._lengths) >= MAX_LENGTHS:
                self._lengths.clear()
            self._lengths[key] = lengths
        return Job(stream, chunk, slots, lengths, chunk.start if at is None else at, sinks)

    def fields(self, num_chunks: int) -> Fields:
        tokens, groups = num_chunks * CHUNK_TOKENS, self._num_groups
        fields = Fields()
        fields.add("places", (len(self._parts), num_chunks, groups, 2), np.int64)
        fields.add("class_places", (num_chunks, 2), np.int64)
        fields.add("sink_places", (groups, 2), np.int64)
        fields.add("mean_places", (num_chunks, groups, 2), np.int64)
        fields.add("tokens_of", (num_chunks,), np.int32)
        fields.add("skipped", (num_chunks,), np.int32)
        fields.add("ids", (tokens, CONTEXT_TOKENS), np.int64)
        fields.add("slots", (tokens,), np.int64)
        fields.add("positions", (tokens,), np.int64)
        fields.add("status", (num_chunks,), np.int32)
        fields.add("classes", (tokens,), np.uint8)
        return fields

    def overhead_bytes(self, num_chunks: int) -> int:
        """What a slab takes beside its streams."""
        return self.fields(num_chunks).size_bytes + num_chunks * STREAM_ALIGNMENT

    def begin(
        self,
        jobs: Sequence[Job],
        levels: int,
        take: Callable[[int, int], InputBuffer],
        count: int | None = None,
    ) -> Filling:
        """Bring chunks, of which only the first may want sinks, into a buffer: `take` gives
        one of so many bytes on the host and on the device. Threads do it; see `Filling`. A slab of
        more chunks (`count`) repeats the last, and its values go nowhere."""
        spares = (count or len(jobs)) - len(jobs)
        every = [*jobs, *[jobs[-1]._replace(slots=NO_SLOTS)] * spares]
        chunks = [job.chunk for job in every]
        fields = self.fields(len(every))
        starts = stream_starts(jobs, fields.size_bytes)
        spare = 2 * self._spare_words
        buffer = take(int(starts[-1]), int(starts[-1]) + spare)
        raw, arrays = buffer.bytes, fields.on_host(buffer.bytes)
        sinks = every[0].sinks if every[0].wants_sinks else 0

        places = [
            (c, job.stream, raw[starts[c] : starts[c] + job.size_bytes])
            for c, job in enumerate(jobs)
        ]
        readers = min(MAX_READERS, num_cores(), -(-int(starts[-1] - starts[0]) // READER_BYTES))
        share = -(-len(jobs) // max(1, readers))
        pieces = [places[i : i + share] for i in range(0, len(jobs), share)]
        wait = begin_parallel([partial(_read, piece, levels) for piece in pieces])
        begins = np.append(starts[:-1], [starts[-2]] * spares) - fields.size_bytes
        try:
            self._fill_places(arrays, every, begins, levels)
            fill_tokens(arrays, every, self._vocab_size)
            arrays["skipped"][:] = [job.sinks for job in every]
        except BaseException:
            wait()
            raise

        def finish(on: CudaStreams) -> tuple[Slab, list[int]]:
            failed = [c for one in wait() for c in one]
            for c in failed:
                arrays["slots"][c * CHUNK_TOKENS : (c + 1) * CHUNK_TOKENS] = -1
            buffer.send(int(starts[-1]), on)
            words = buffer.device[fields.size_bytes : int(starts[-1]) + spare].view(torch.int16)
            is_full = all(chunk.num_tokens == CHUNK_TOKENS for chunk in chunks)
            known = buffer.fields.get(len(every))
            if known is None:
                known = buffer.fields[len(every)] = fields.on_device(buffer.device)
            slab = Slab(words, **known, num_chunks=len(chunks), num_sinks=sinks, is_full=is_full,
                        size_bytes=int(starts[-1]) + spare)  # fmt: skip
            return slab, failed

        return Filling(buffer, wait, finish)

    def _fill_places(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        jobs: Sequence[Job],
        begins: npt.NDArray[np.int64],
        levels: int,
    ) -> None:
        arrays["sink_places"][:] = 0
        for with_sinks in (True, False):
            rows = [c for c, job in enumerate(jobs) if bool(job.sinks) == with_sinks]
            if not rows:
                continue
            sections = self._sections_of(levels, with_sinks=with_sinks)
            places = section_places(np.stack([jobs[c].lengths for c in rows]), begins[rows])
            arrays["places"][:, rows] = places[:, sections.parts].swapaxes(0, 1)
            arrays["class_places"][rows] = places[:, sections.classes]
            arrays["mean_places"][rows] = places[:, sections.means]
            if with_sinks and rows[0] == 0:
                arrays["sink_places"][:] = places[0, sections.sinks]


def spare_words(num_rows: int) -> int:
    """As far as a damaged section of so many rows may read beyond its end: its 32 lanes begin with
    a state of two words each, and then take up to two a token and row."""
    return 2 * 32 + 2 * CHUNK_TOKENS * num_rows


def _read(piece: Sequence[tuple[int, Bitstream, npt.NDArray[np.uint8]]], levels: int) -> list[int]:
    """Streams into a buffer; returns which could not be read: the reference says why."""
    copies: list[Copy] = []
    owners, places, failed = [], [], []
    for index, stream, buffer in piece:
        found = stream.copies(levels)
        if found is None:
            try:
                stream.read_into(buffer.data, levels)
            except KdnError:
                failed.append(index)
            continue
        place = buffer.ctypes.data
        for one in found:
            owners.append(index)
            places.append(place)
            place += one.num_bytes
        copies += found
    done = copy_all(copies, np.array(places, np.uint64))
    return failed + sorted({owners[i] for i in np.flatnonzero(~done)})


def stream_starts(jobs: Sequence[Job], first: int) -> npt.NDArray[np.int64]:
    """Where streams begin in a buffer, and where the last ends."""
    sizes = np.array([job.size_bytes for job in jobs])
    sizes = -(-sizes // STREAM_ALIGNMENT) * STREAM_ALIGNMENT
    return first + np.concatenate([[0], np.cumsum(sizes)])


def section_places(
    lengths: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """First word and number of words [chunks, sections + 1, 2] of sections that follow one another
    from where each chunk's stream starts; the last is none."""
    places = np.zeros((len(lengths), lengths.shape[1] + 1, 2), np.int64)
    places[:, :-1, 1] = lengths
    places[:, :-1, 0] = starts[:, None] + np.cumsum(lengths, axis=1) - lengths
    return places >> 1


def fill_tokens(
    arrays: dict[str, npt.NDArray[Any]],
    jobs: Sequence[Job],
    vocab_size: int,
) -> None:
    """Ids, slots and positions, and what kernels begin with."""
    before, count = CONTEXT_TOKENS - 1, len(jobs)
    ids = np.full((count, before + CHUNK_TOKENS), vocab_size, np.int64)
    places = arrays["slots"].reshape(count, CHUNK_TOKENS)
    places[:] = -1
    for c, job in enumerate(jobs):
        chunk = job.chunk
        known = chunk.history[-before:]
        ids[c, before - len(known) : before] = known
        ids[c, before : before + chunk.num_tokens] = chunk.tokens
        places[c, : chunk.num_tokens] = job.slots
    rows = arrays["ids"].reshape(count, CHUNK_TOKENS, CONTEXT_TOKENS)
    for i in range(CONTEXT_TOKENS):
        rows[:, :, i] = ids[:, before - i : before - i + CHUNK_TOKENS]
    starts = np.array([job.at for job in jobs])
    positions = arrays["positions"].reshape(count, CHUNK_TOKENS)
    positions[:] = starts[:, None] + np.arange(CHUNK_TOKENS)
    arrays["tokens_of"][:] = [job.chunk.num_tokens for job in jobs]
    arrays["status"][:] = 0
    arrays["classes"][:] = 2  # of tokens that a chunk lacks


def check_ids(chunk: Chunk, vocab_size: int) -> None:
    """MismatchError unless kernels find all of them in the profile's table."""
    for ids in (chunk.history[-(CONTEXT_TOKENS - 1) :], chunk.tokens):
        if len(ids) and int(ids.max()) >= vocab_size:
            raise MismatchError(f"expected token ids below {vocab_size}, found {int(ids.max())}")


def token_rows(chunk: Chunk, vocab_size: int) -> Ids:
    """Of each token: its id and those of the tokens before it, [tokens, 3]; `vocab_size` stands for
    none."""
    check_ids(chunk, vocab_size)
    before = CONTEXT_TOKENS - 1
    history = chunk.history[-before:]
    none = np.full(before - len(history), vocab_size, np.int64)
    ids = np.concatenate([none, history, chunk.tokens]).astype(np.int64)
    count = chunk.num_tokens
    return np.stack([ids[before - i : before - i + count] for i in range(before + 1)], axis=1)


def split_slabs(jobs: Sequence[Job], most: int, most_bytes: int) -> list[range]:
    """Runs of at most so many chunks and bytes (a single chunk may have more); one that wants its
    sinks begins a run."""
    runs: list[range] = []
    total = 0
    for index, job in enumerate(jobs):
        total += job.size_bytes
        is_full = bool(runs) and (len(runs[-1]) == most or total > most_bytes)
        if not runs or is_full or job.wants_sinks:
            runs.append(range(index, index))
            total = job.size_bytes
        runs[-1] = range(runs[-1].start, index + 1)
    return runs
