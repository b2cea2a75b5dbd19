"""The container of an encoded chunk (`docs/format.md`): write one, read what is there of one.

A stream is a header (see `header.py`) and sections ordered by level, so that a prefix of levels is
a byte prefix. Readers get a `Bitstream` from a whole stream, a truncated one, or a header and some
levels fetched apart. A level is verified when one of its sections is first read; whoever has done
that already, as a delivery does when bytes arrive, says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.codec.directory import Line, SectionEntry
from kdn.codec.header import (
    KIND_KEYS,
    KIND_VALUES,
    NO_PROFILE,
    PREFIX_COMPUTED,
    PROBE_BYTES,
    Buffer,
    CodecId,
    DType,
    Header,
    StreamInfo,
    build_header,
    header_size,
    level_digest,
)
from kdn.errors import FormatError, MismatchError, TruncatedError

__all__ = [
    "KIND_KEYS",
    "KIND_VALUES",
    "NO_FILE",
    "NO_PROFILE",
    "PREFIX_COMPUTED",
    "PROBE_BYTES",
    "Bitstream",
    "Buffer",
    "CodecId",
    "Copy",
    "DType",
    "Header",
    "LevelSource",
    "Section",
    "SectionEntry",
    "StreamInfo",
    "header_size",
    "write",
    "write_levels",
]


@dataclass(frozen=True)
class Section:
    """One separately readable part of a stream, to be written."""

    level: int
    kind: int
    group: int
    data: Buffer


def write(info: StreamInfo, sections: Iterable[Section], seal_key: bytes) -> bytes:
    """The whole stream, sealed. Sections may come in any order and are put into the format's."""
    ordered = sorted(sections, key=lambda s: (s.level, s.group, s.kind))
    lines = [(s.level, s.kind, s.group, len(_bytes_of(s.data))) for s in ordered]
    levels = [
        b"".join(s.data for s in ordered if s.level == level) for level in range(info.num_levels)
    ]
    return write_levels(info, lines, levels, seal_key)


def write_levels(
    info: StreamInfo, lines: Sequence[Line], levels: Sequence[Buffer], seal_key: bytes
) -> bytes:
    """The same of sections that lie in the format's order already: what each is, and the bytes of
    whole levels."""
    digests = [
        level_digest(part)
        for level, data in enumerate(levels)
        for part in _parts_of(info, lines, level, data)
    ]
    return _joined([build_header(info, lines, digests, seal_key), *levels])


def _parts_of(info: StreamInfo, lines: Sequence[Line], level: int, data: Buffer) -> list[Buffer]:
    """What each digest of a level is of."""
    if info.windowed_from is None:
        return [data]
    own = (line for line in lines if line[0] == level and line[2] < info.windowed_from)
    border, view = sum(line[3] for line in own), _bytes_of(data)
    return [view[:border], view[border:]]


def _joined(parts: Sequence[Buffer]) -> bytes:
    """One after the other. Large ones without the interpreter's lock: to touch so much new memory
    takes long, and beside an engine somebody always waits for the lock."""
    views = [np.frombuffer(part, np.uint8) for part in parts]
    sizes = np.array([len(view) for view in views], np.uint64)
    if sizes.sum() < LARGE_BYTES:
        return b"".join(parts)
    from kdn.codec.copies_numba import copy_all

    out = bytes(int(sizes.sum()))  # nobody else has it yet, so it may still be written to
    first = np.uint64(np.frombuffer(out, np.uint8).ctypes.data)
    copies = [Copy(NO_FILE, view.ctypes.data, len(view)) for view in views]
    copy_all(copies, first + np.cumsum(sizes) - sizes)
    return out


LARGE_BYTES = 4 << 20
NO_FILE = -1


class Copy(NamedTuple):
    """Where some bytes lie: at an offset of an open file, or at an address (NO_FILE)."""

    file: int
    source: int
    num_bytes: int


class LevelSource(Mapping[int, memoryview]):
    """Levels of a stream that are not in memory yet, in a file perhaps. `source[level]` brings one
    there, and the same bytes whenever it is asked for. What it holds no longer is a
    TruncatedError."""

    @abstractmethod
    def read_into(self, buffer: memoryview, first: int, last: int) -> None:
        """The bytes of levels [first, last), one after the other, which fill `buffer`."""

    def copies(self, levels: int) -> list[Copy] | None:
        """See Bitstream; None if only `read_into` can tell whether they are right."""
        return None


class Bitstream:
    """A header and those of its levels that are at hand. Nothing is copied."""

    def __init__(
        self,
        header: Header,
        levels: Mapping[int, memoryview],
        verified: Collection[int] = (),
        *,
        windowed: bool = True,
    ) -> None:
        """`verified` levels are known to be what the header's digests say. Levels may be a
        LevelSource. Not `windowed`: of each level its first part alone is at hand, without the
        layers that have a window."""
        self.header = header
        self.has_windowed = windowed or header.info.windowed_from is None
        """Whether the layers with a window are at hand as well, if the model has any."""
        self._levels = levels
        self._verified = set(verified)

    @classmethod
    def parse(cls, data: Buffer, verified: Collection[int] = ()) -> Bitstream:
        """A whole stream, or one that was cut anywhere after the header."""
        return cls.of(Header.parse(data), data, verified)

    @classmethod
    def of(cls, header: Header, data: Buffer, verified: Collection[int] = ()) -> Bitstream:
        """The same, where the header was parsed before."""
        view = _bytes_of(data)
        if len(view) > header.stream_bytes:
            raise FormatError(f"expected {header.stream_bytes} bytes, found {len(view)}")
        levels = {
            level: view[header.level_start(level) : end]
            for level, end in enumerate(header.level_ends)
            if end <= len(view)
        }
        return cls(header, levels, verified)

    @classmethod
    def without_windowed(
        cls, header: Header, data: Buffer, levels: int, verified: Collection[int] = ()
    ) -> Bitstream:
        """The first parts of so many levels, each at its place in `data`; what lies between them
        was not fetched."""
        view = _bytes_of(data)
        ends = header.part_ends[:levels]
        parts = {n: view[header.level_start(n) : end] for n, end in enumerate(ends)}
        return cls(header, parts, verified, windowed=False)

    @classmethod
    def from_levels(cls, header_bytes: Buffer, levels: Mapping[int, Buffer]) -> Bitstream:
        """From exactly the header, and any of its levels."""
        header = Header.parse(header_bytes)
        if len(header_bytes) != header.size_bytes:
            raise FormatError(
                f"expected a header of {header.size_bytes} bytes, found {len(header_bytes)}"
            )
        parts = {}
        for level, data in levels.items():
            if not 0 <= level < header.info.num_levels:
                raise FormatError(f"expected a level below {header.info.num_levels}, found {level}")
            parts[level] = _bytes_of(data)
            expected = header.level_end(level) - header.level_start(level)
            _check_length(level, expected, len(parts[level]))
        return cls(header, parts)

    @property
    def info(self) -> StreamInfo:
        return self.header.info

    @property
    def stream_id(self) -> bytes:
        return self.header.stream_id

    @property
    def levels_available(self) -> int:
        """How many of the first levels are wholly here."""
        every = self.info.num_levels
        return next((level for level in range(every) if level not in self._levels), every)

    @property
    def is_in_memory(self) -> bool:
        """Not so if its levels are read from elsewhere when they are asked for."""
        return not isinstance(self._levels, LevelSource)

    def has_level(self, level: int) -> bool:
        """Whether this level is wholly here, whichever others are."""
        return level in self._levels

    def level_end(self, level: int) -> int:
        """See Header.level_end."""
        return self.header.level_end(level)

    def section(self, level: int, group: int, kind: int) -> memoryview:
        """The verified bytes of one section."""
        span = self.header.directory.spans.get((level, group, kind))
        if span is None:
            raise FormatError(f"expected a section (level {level}, group {group}, kind {kind})")
        border = self.info.windowed_from
        if not self.has_windowed and border is not None and group >= border:
            raise TruncatedError(f"level {level}: layers with a window are not at hand")
        data = self._verified_level(level)
        first = self.header.level_start(level)
        return data[span[0] - first : span[1] - first]

    def read_into(self, buffer: memoryview, levels: int) -> None:
        """The verified bytes of the first levels, one after the other; `buffer` has exactly their
        size. Other threads run meanwhile: copies and digests are made without the GIL."""
        self._check_whole()
        header, start = self.header, self.header.size_bytes
        for level in range(levels):
            if level not in self._levels:
                raise TruncatedError(f"level {level} is not at hand")
        parts = [
            buffer[header.level_start(n) - start : header.level_end(n) - start]
            for n in range(levels)
        ]
        if isinstance(self._levels, LevelSource):
            self._levels.read_into(buffer, 0, levels)
        else:
            for level, part in enumerate(parts):
                np.copyto(_array(part), _array(self._levels[level]))
        for level, part in enumerate(parts):
            if level not in self._verified:
                # The copy is what will be decoded. A source may hold other bytes the next time.
                header.check_level(level, part)
                if not isinstance(self._levels, LevelSource):
                    self._verified.add(level)

    def copies(self, levels: int) -> list[Copy] | None:
        """Where the bytes of the first levels lie, for those who copy many streams' at once; None
        if they have to be verified first, or are not all at hand. Good as long as this is."""
        if not self.has_windowed:
            return None
        for level in range(levels):
            if level not in self._levels or level not in self._verified:
                return None
        if isinstance(self._levels, LevelSource):
            return self._levels.copies(levels)
        views = [self._levels[level] for level in range(levels)]
        return [Copy(NO_FILE, _array(view).ctypes.data, len(view)) for view in views]

    def _verified_level(self, level: int) -> memoryview:
        if level not in self._levels:
            raise TruncatedError(f"level {level} is not at hand")
        data = self._levels[level]
        if level not in self._verified:  # two threads may both do it: once is enough, twice right
            self.header.check_level(level, data, windowed=self.has_windowed)
            self._verified.add(level)
        return data

    def _check_whole(self) -> None:
        """That a level's bytes at hand are all of it."""
        if not self.has_windowed:
            raise TruncatedError("layers with a window are not at hand")

    def parts(self, levels: int) -> list[bytes | memoryview]:
        """The stream up to the end of so many levels, verified: its header, then each of them."""
        self._check_whole()
        header = self.header
        first = header.sealed + header.seal + header.stream_id
        return [first, *(self._verified_level(level) for level in range(levels))]

    def verify(self, levels: int | None = None) -> None:
        """Check that so many levels are here, all if None: every byte of them."""
        self._check_whole()
        for level in range(self.info.num_levels if levels is None else levels):
            self._verified_level(level)

    @classmethod
    def parse_stored(cls, data: Buffer) -> Bitstream:
        """A stream as places keep it, every byte of it verified: whole, or cut where a level ends.
        TruncatedError if it was cut elsewhere, or has no level."""
        stream = cls.parse(data)
        if len(data) not in stream.header.level_ends:
            raise TruncatedError(
                f"expected a stream cut at {stream.header.level_ends}, found {len(data)} bytes"
            )
        stream.verify(stream.levels_available)
        return stream

    def check_for(
        self,
        chunk: Chunk,
        spec: ModelSpec,
        profile_id: bytes,
        codec: CodecId,
        windowed_from: int | None = None,
    ) -> None:
        """That this is the stream of this chunk, model, profile and codec, in the parts that the
        codec makes, and that a holder of the secret that named the chunk has written it."""
        info = self.info
        for name, expected, found in (
            ("codec", codec, info.codec),
            ("model", spec.fingerprint, info.model),
            ("profile", profile_id, info.profile),
            ("chunk_key", chunk.key, info.chunk_key),
            ("start", chunk.start, info.start),
            ("num_tokens", chunk.num_tokens, info.num_tokens),
            ("num_layers", spec.num_layers, info.num_layers),
            ("num_kv_heads", spec.num_kv_heads, info.num_kv_heads),
            ("head_dim", spec.head_dim, info.head_dim),
            ("windowed_from", windowed_from, info.windowed_from),
        ):
            if expected != found:
                raise MismatchError(f"{name}: expected {_show(expected)}, found {_show(found)}")
        self.header.check_seal(chunk.seal_key)


def _bytes_of(data: Buffer) -> memoryview:
    return memoryview(data).toreadonly().cast("B")


def _array(data: memoryview) -> npt.NDArray[np.uint8]:
    return np.asarray(data, np.uint8)


def _check_length(level: int, expected: int, found: int) -> None:
    if found < expected:
        raise TruncatedError(f"level {level}: expected {expected} bytes, found {found}")
    if found > expected:
        raise FormatError(f"level {level}: expected {expected} bytes, found {found}")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
