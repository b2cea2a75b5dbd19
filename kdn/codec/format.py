"""The container of an encoded chunk (`docs/format.md`): write one, read what is there of one.

A stream is a header (see `header.py`) and sections ordered by level, so that a prefix of levels is
a byte prefix. Readers get a `Bitstream` from a whole stream, a truncated one, or a header and some
sections fetched apart; a section's checksum is verified when it is first read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.codec.header import (
    KIND_KEYS,
    KIND_VALUES,
    NO_PROFILE,
    PREFIX_COMPUTED,
    PROBE_BYTES,
    Buffer,
    CodecId,
    DType,
    Entry,
    Header,
    StreamInfo,
    build_header,
    front_of,
    header_size,
    section_checksum,
    stream_digest,
)
from kdn.errors import ChecksumError, FormatError, MismatchError, TruncatedError

__all__ = [
    "KIND_KEYS",
    "KIND_VALUES",
    "NO_PROFILE",
    "PREFIX_COMPUTED",
    "PROBE_BYTES",
    "Bitstream",
    "Buffer",
    "CodecId",
    "DType",
    "Entry",
    "Header",
    "Section",
    "StreamInfo",
    "header_size",
    "write",
]


@dataclass(frozen=True)
class Section:
    """One separately readable part of a stream, to be written."""

    level: int
    kind: int
    group: int
    data: Buffer


def write(info: StreamInfo, sections: Iterable[Section]) -> bytes:
    """The whole stream. Sections may come in any order and are put into the format's."""
    ordered = sorted(sections, key=lambda s: (s.level, s.group, s.kind))
    header = build_header(info, [(s.level, s.kind, s.group, _bytes_of(s.data)) for s in ordered])
    return b"".join([header, *(s.data for s in ordered)])


class Bitstream:
    """A header and those of its sections that are at hand. Nothing is copied."""

    def __init__(self, header: Header, header_bytes: memoryview, parts: dict[int, memoryview]):
        self.header = header
        self._header_bytes = header_bytes
        self._parts = parts
        self._index = {(e.level, e.group, e.kind): i for i, e in enumerate(header.entries)}
        self._verified: set[int] = set()

    @classmethod
    def parse(cls, data: Buffer) -> Bitstream:
        """A whole stream, or one that was cut anywhere after the header."""
        header = Header.parse(data)
        view = _bytes_of(data)
        if len(view) > header.stream_bytes:
            raise FormatError(f"expected {header.stream_bytes} bytes, found {len(view)}")
        parts = {
            index: view[entry.offset : entry.end]
            for index, entry in enumerate(header.entries)
            if entry.end <= len(view)
        }
        return cls(header, view[: header.size_bytes], parts)

    @classmethod
    def from_parts(cls, header_bytes: Buffer, sections: Mapping[int, Buffer]) -> Bitstream:
        """From exactly the header, and sections by their index in its directory."""
        header = Header.parse(header_bytes)
        if len(header_bytes) != header.size_bytes:
            raise FormatError(
                f"expected a header of {header.size_bytes} bytes, found {len(header_bytes)}"
            )
        parts = {}
        for index, data in sections.items():
            if not 0 <= index < len(header.entries):
                raise FormatError(f"expected a section below {len(header.entries)}, found {index}")
            view = _bytes_of(data)
            _check_length(index, header.entries[index].length, len(view))
            parts[index] = view
        return cls(header, _bytes_of(header_bytes), parts)

    @property
    def info(self) -> StreamInfo:
        return self.header.info

    @property
    def stream_id(self) -> bytes:
        return self.header.stream_id

    @property
    def levels_available(self) -> int:
        """How many of the first levels are wholly here."""
        missing = [e.level for i, e in enumerate(self.header.entries) if i not in self._parts]
        return min(missing, default=self.info.num_levels)

    def has_level(self, level: int) -> bool:
        """Whether this level is wholly here, whichever others are."""
        return 0 <= level < self.info.num_levels and all(
            i in self._parts for i, e in enumerate(self.header.entries) if e.level == level
        )

    def has_section(self, level: int, group: int, kind: int) -> bool:
        """Whether this section is in the directory and its bytes are here."""
        return self._index.get((level, group, kind)) in self._parts

    def level_end(self, level: int) -> int:
        """See Header.level_end."""
        return self.header.level_end(level)

    def section(self, level: int, group: int, kind: int) -> memoryview:
        """The verified bytes of one section."""
        index = self._index.get((level, group, kind))
        if index is None:
            raise FormatError(f"expected a section (level {level}, group {group}, kind {kind})")
        if index not in self._parts:
            raise TruncatedError(
                f"section (level {level}, group {group}, kind {kind}) is not at hand"
            )
        data = self._parts[index]
        if index not in self._verified:
            expected = self.header.entries[index].checksum
            found = section_checksum(self.stream_id, index, data)
            if found != expected:
                raise ChecksumError(
                    f"section {index} checksum: expected {expected:016x}, found {found:016x}"
                )
            self._verified.add(index)
        return data

    def verify(self) -> None:
        """Check every byte of a whole stream against its stream id."""
        for entry in self.header.entries:
            self.section(entry.level, entry.group, entry.kind)
        entries = self.header.entries
        parts = [self._parts[index] for index in range(len(entries))]
        found = stream_digest(front_of(self._header_bytes, len(entries)), entries, parts)
        if found != self.stream_id:
            raise ChecksumError(f"stream id: expected {self.stream_id.hex()}, found {found.hex()}")

    def check_for(self, chunk: Chunk, spec: ModelSpec, profile_id: bytes, codec: CodecId) -> None:
        """That this is the stream of this chunk, model, profile and codec."""
        info = self.info
        wanted = StreamInfo.for_chunk(
            chunk, spec, codec=codec, dtype=info.dtype, num_levels=1, profile=profile_id
        )
        for name in (
            "codec", "model", "profile", "chunk_key", "start", "num_tokens", "num_layers",
            "num_kv_heads", "head_dim",
        ):  # fmt: skip
            expected, found = getattr(wanted, name), getattr(info, name)
            if expected != found:
                raise MismatchError(f"{name}: expected {_show(expected)}, found {_show(found)}")


def _bytes_of(data: Buffer) -> memoryview:
    return memoryview(data).toreadonly().cast("B")


def _check_length(index: int, expected: int, found: int) -> None:
    if found < expected:
        raise TruncatedError(f"section {index}: expected {expected} bytes, found {found}")
    if found > expected:
        raise FormatError(f"section {index}: expected {expected} bytes, found {found}")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
