"""The container: literal bytes, every way to be wrong, and reading parts of a stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b, sha256
from typing import Any

import pytest

from kdn.cache.keys import PUBLIC_SEAL_KEY, Chunk, seal_key
from kdn.codec import header as h
from kdn.codec.directory import MAX_SECTION_BYTES
from kdn.codec.format import (
    Bitstream,
    CodecId,
    DType,
    Header,
    LevelSource,
    Section,
    StreamInfo,
    header_size,
    write,
)
from kdn.errors import (
    AuthenticityError,
    ChecksumError,
    FormatError,
    LimitError,
    MismatchError,
    TruncatedError,
    UnsupportedError,
)

INFO = StreamInfo(
    codec=CodecId.EXACT,
    dtype=DType.BFLOAT16,
    chunk_key=b"k" * 16,
    model=b"m" * 16,
    profile=b"p" * 16,
    start=512,
    num_tokens=48,
    num_layers=2,
    num_kv_heads=3,
    head_dim=64,
    num_levels=2,
    valid_from=(512, 512),
    params=b"xyz",
)
SECTIONS = [
    Section(1, 0, 0, b"third"),
    Section(0, 1, 0, b"second"),
    Section(0, 0, 0, b"first"),
    Section(1, 0, 1, b""),
]
STREAM = write(INFO, SECTIONS, PUBLIC_SEAL_KEY)
DIRECTORY_AT = 83 + 3
DIGESTS_AT = DIRECTORY_AT + 4 * 8
SEAL_AT = DIGESTS_AT + 2 * 16
HEADER_BYTES = SEAL_AT + 16 + 16


def named(header: bytes) -> bytes:
    """With the stream id that these header bytes have."""
    front = header[:-16]
    return front + blake2b(front, digest_size=16, person=b"kdn-stream").digest()


def repaired(stream: bytes, at: int, new: bytes) -> bytes:
    """With header bytes replaced and the stream id made to fit."""
    header = stream[:at] + new + stream[at + len(new) : HEADER_BYTES]
    return named(header) + stream[HEADER_BYTES:]


def test_layout_is_the_documented_one() -> None:
    header = b"\x89KDN" + struct.pack("<HBBI", 2, 1, 2, HEADER_BYTES)
    header += b"k" * 16 + b"m" * 16 + b"p" * 16
    header += struct.pack("<QHHHHBBHBH", 512, 48, 2, 3, 64, 255, 2, 4, 0, 3) + b"xyz"
    for line in [(0, 0, 0, 5), (0, 1, 0, 6), (1, 0, 0, 5), (1, 0, 1, 0)]:
        header += struct.pack("<BBHI", *line)
    for level in (b"firstsecond", b"third"):
        header += sha256(b"kdn-level" + level).digest()[:16]
    key = blake2b(key=b"kdn public namespace", digest_size=32, person=b"kdn-seal-key").digest()
    header += blake2b(header, digest_size=16, key=key, person=b"kdn-seal").digest()
    header += blake2b(header, digest_size=16, person=b"kdn-stream").digest()
    assert header + b"firstsecondthird" == STREAM
    assert len(header) == HEADER_BYTES


def test_reads_what_was_written() -> None:
    stream = Bitstream.parse(STREAM)
    assert stream.info == INFO
    assert bytes(stream.section(0, 0, 0)) == b"first"
    assert bytes(stream.section(0, 0, 1)) == b"second"
    assert bytes(stream.section(1, 0, 0)) == b"third"
    assert bytes(stream.section(1, 1, 0)) == b""
    assert stream.levels_available == 2
    assert stream.header.stream_bytes == len(STREAM)
    assert [stream.level_end(i) for i in range(2)] == [HEADER_BYTES + 11, HEADER_BYTES + 16]
    stream.verify()


def test_the_directory_says_where_each_section_lies() -> None:
    directory = Header.parse(STREAM).directory
    found = {name: STREAM[start:end] for name, (start, end) in directory.spans.items()}
    assert found == {(one.level, one.group, one.kind): one.data for one in SECTIONS}
    lines = [(one.level, one.group, one.kind) for one in directory.entries]
    assert lines == list(directory.spans)
    assert [(one.offset, one.end) for one in directory.entries] == list(directory.spans.values())


def test_accepts_any_byte_buffer() -> None:
    for data in (bytearray(STREAM), memoryview(STREAM)):
        assert bytes(Bitstream.parse(data).section(1, 0, 0)) == b"third"


def test_absences_round_trip() -> None:
    info = replace(INFO, valid_from=(512, 560))
    stream = Bitstream.parse(write(info, SECTIONS, PUBLIC_SEAL_KEY))
    assert stream.info == info
    assert stream.info.absences == (0, 48)


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_every_truncation_keeps_what_is_whole(cut: int) -> None:
    if cut < HEADER_BYTES:
        with pytest.raises(TruncatedError):
            Bitstream.parse(STREAM[:cut])
        return
    stream = Bitstream.parse(STREAM[:cut])
    body = cut - HEADER_BYTES
    assert stream.levels_available == (body >= 11) + (body >= 16)
    for level, group, kind, end in ((0, 0, 0, 11), (0, 0, 1, 11), (1, 0, 0, 16), (1, 1, 0, 16)):
        assert stream.has_level(level) == (body >= end)
        if body >= end:
            stream.section(level, group, kind)
        else:
            with pytest.raises(TruncatedError):
                stream.section(level, group, kind)


def test_every_single_bit_flip_is_found() -> None:
    for bit in range(8 * len(STREAM)):
        damaged = bytearray(STREAM)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            Bitstream.parse(bytes(damaged)).verify()


def test_header_size_from_the_first_bytes() -> None:
    assert header_size(STREAM[: h.PROBE_BYTES]) == HEADER_BYTES
    with pytest.raises(TruncatedError):
        header_size(STREAM[: h.PROBE_BYTES - 1])
    assert Header.parse(STREAM[:HEADER_BYTES]).info == INFO


def test_trailing_bytes_are_an_error() -> None:
    with pytest.raises(FormatError, match="found"):
        Bitstream.parse(STREAM + b"\0")


@pytest.mark.parametrize(
    ("at", "new", "error"),
    [
        (0, b"PK\3\4", FormatError),
        (4, b"\1\0", FormatError),
        (4, b"\3\0", FormatError),
        (6, b"\5", FormatError),
        (6, b"\0", FormatError),
        (7, b"\0", FormatError),
        (8, struct.pack("<I", HEADER_BYTES - 1), ChecksumError),
        (8, struct.pack("<I", h.MIN_HEADER_BYTES - 1), LimitError),
        (8, struct.pack("<I", h.MAX_HEADER_BYTES + 1), LimitError),
        (8, struct.pack("<I", HEADER_BYTES + 1), ChecksumError),
        (60, struct.pack("<Q", h.MAX_START + 1), LimitError),
        (68, struct.pack("<H", 0), LimitError),
        (68, struct.pack("<H", h.MAX_TOKENS + 1), LimitError),
        (70, struct.pack("<H", 0), LimitError),
        (70, struct.pack("<H", h.MAX_LAYERS + 1), LimitError),
        (72, struct.pack("<H", 0), LimitError),
        (72, struct.pack("<H", h.MAX_KV_HEADS + 1), LimitError),
        (74, struct.pack("<H", 0), LimitError),
        (74, struct.pack("<H", h.MAX_HEAD_DIM + 1), LimitError),
        (68, struct.pack("<HHHH", 4096, 1024, 1024, 4096), LimitError),
        (77, b"\0", LimitError),
        (77, bytes([h.MAX_LEVELS + 1]), LimitError),
        (77, b"\1", FormatError),
        (77, b"\3", FormatError),
        (78, struct.pack("<H", 0), LimitError),
        (78, struct.pack("<H", 3), FormatError),
        (78, struct.pack("<H", h.MAX_SECTIONS + 1), LimitError),
        (80, b"\1", FormatError),
        (80, b"\2", FormatError),
        (81, struct.pack("<H", 2), FormatError),
        (81, struct.pack("<H", h.MAX_PARAMS_BYTES + 1), LimitError),
        (DIRECTORY_AT, b"\1", FormatError),  # first section's level: order broken
        (DIRECTORY_AT + 4, struct.pack("<I", MAX_SECTION_BYTES + 1), LimitError),
    ],
)
def test_every_wrong_field_has_its_error(at: int, new: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Bitstream.parse(repaired(STREAM, at, new)).section(0, 0, 0)
    assert type(caught.value) is error


@pytest.mark.parametrize("at", [12, 28, 44, 60, 76, DIGESTS_AT, SEAL_AT - 1, SEAL_AT])
def test_a_field_in_range_that_nobody_sealed(at: int) -> None:
    """The stream id can be made to fit by anybody, the seal only by those who have its key."""
    header = Header.parse(repaired(STREAM, at, bytes([STREAM[at] ^ 1])))
    with pytest.raises(AuthenticityError):
        header.check_seal(PUBLIC_SEAL_KEY)
    Header.parse(STREAM).check_seal(PUBLIC_SEAL_KEY)


def test_only_the_same_secret_accepts_a_seal() -> None:
    secret = seal_key(b"a secret of a tenant")
    header = Header.parse(write(INFO, SECTIONS, secret))
    header.check_seal(secret)
    for other in (PUBLIC_SEAL_KEY, seal_key(b"a secret of another")):
        with pytest.raises(AuthenticityError, match="secret"):
            header.check_seal(other)


def test_the_seal_is_checked_before_the_directory_is_read() -> None:
    """What others wrote costs a reader no more than a digest."""
    wrong = repaired(STREAM, DIRECTORY_AT, b"\1")  # sections out of order
    with pytest.raises(AuthenticityError):
        Header.parse(wrong, PUBLIC_SEAL_KEY)
    with pytest.raises(FormatError, match="increasing"):
        Header.parse(wrong)


def test_the_same_values_under_another_seal_are_another_stream() -> None:
    """So that a right stream can take the place of a forged one with the same contents."""
    ids = [
        Header.parse(write(INFO, SECTIONS, key)).stream_id
        for key in map(seal_key, (b"one", b"other"))
    ]
    assert ids[0] != ids[1]


def test_a_level_is_verified_once() -> None:
    data = bytearray(STREAM)
    stream = Bitstream.parse(data)
    stream.section(0, 0, 0)
    data[HEADER_BYTES] ^= 1
    assert bytes(stream.section(0, 0, 0)) != b"first"
    Bitstream.parse(data, verified=[0]).section(0, 0, 0)
    with pytest.raises(ChecksumError, match="level 0"):
        Bitstream.parse(data).section(0, 0, 1)


def test_an_absence_without_any_is_not_canonical() -> None:
    info = replace(INFO, valid_from=(513, 512))
    stream = write(info, SECTIONS, PUBLIC_SEAL_KEY)
    header = stream[: HEADER_BYTES + 4]
    for absences in ((0, 0), (0, 49)):
        wrong = header[:83] + struct.pack("<HH", *absences) + header[87:]
        with pytest.raises(FormatError, match="absent"):
            Header.parse(named(wrong))


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ([], LimitError),
        ([Section(0, 0, 0, b"")], FormatError),
        ([Section(0, 0, 0, b"a"), Section(1, 0, 0, b""), Section(0, 0, 0, b"b")], FormatError),
        ([Section(level, 0, 0, b"") for level in (0, 1, 2)], FormatError),
    ],
)
def test_writes_nothing_it_would_not_read(sections: list[Section], error: type[Exception]) -> None:
    with pytest.raises(error):
        write(INFO, sections, PUBLIC_SEAL_KEY)


def test_writer_keeps_the_limits() -> None:
    for wrong in (
        {"num_tokens": h.MAX_TOKENS + 1},
        {"params": bytes(h.MAX_PARAMS_BYTES + 1)},
        {"start": h.MAX_START + 1, "valid_from": (h.MAX_START + 1,) * 2},
    ):
        with pytest.raises(LimitError):
            write(replace(INFO, **wrong), SECTIONS, PUBLIC_SEAL_KEY)


def test_levels_fetched_apart() -> None:
    header, body = STREAM[:HEADER_BYTES], STREAM[HEADER_BYTES:]
    stream = Bitstream.from_levels(header, {1: body[11:16]})
    assert stream.levels_available == 0
    assert stream.has_level(1)
    assert not stream.has_level(0)
    assert not stream.has_level(2)
    assert bytes(stream.section(1, 0, 0)) == b"third"
    with pytest.raises(TruncatedError):
        stream.section(0, 0, 0)
    with pytest.raises(FormatError, match="expected a section"):
        stream.section(0, 7, 0)


@pytest.mark.parametrize(
    ("levels", "error"),
    [({1: b"thir"}, TruncatedError), ({1: b"third!"}, FormatError), ({2: b""}, FormatError)],
)
def test_levels_of_a_wrong_length(levels: dict[int, bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        Bitstream.from_levels(STREAM[:HEADER_BYTES], levels)
    with pytest.raises(FormatError):
        Bitstream.from_levels(STREAM, {})


def test_swapped_levels_do_not_verify() -> None:
    data = write(INFO, [Section(0, 0, 0, b"left!"), Section(1, 0, 0, b"right")], PUBLIC_SEAL_KEY)
    header = data[: header_size(data)]
    stream = Bitstream.from_levels(header, {0: b"right", 1: b"left!"})
    for level in (0, 1):
        with pytest.raises(ChecksumError):
            stream.section(level, 0, 0)


def test_check_for_names_what_differs(tiny: Any) -> None:
    chunk: Chunk = tiny.chunk(b"p" * 16)
    info = StreamInfo.for_chunk(
        chunk, tiny.spec, codec=CodecId.KLT, dtype=DType.FLOAT16, num_levels=1, profile=b"p" * 16
    )
    good = Bitstream.parse(write(info, [Section(0, 0, 0, b"")], PUBLIC_SEAL_KEY))
    good.check_for(chunk, tiny.spec, b"p" * 16, CodecId.KLT)
    with pytest.raises(MismatchError, match="codec"):
        good.check_for(chunk, tiny.spec, b"p" * 16, CodecId.EXACT)
    with pytest.raises(MismatchError, match="profile"):
        good.check_for(chunk, tiny.spec, b"q" * 16, CodecId.KLT)
    for name, wrong in {
        "model": {"model": b"x" * 16},
        "chunk_key": {"chunk_key": b"x" * 16},
        "start": {"start": 1, "valid_from": (1,) * 4},
        "num_tokens": {"num_tokens": 32},
        "num_layers": {"num_layers": 3, "valid_from": (0,) * 3},
        "num_kv_heads": {"num_kv_heads": 1},
        "head_dim": {"head_dim": 16},
    }.items():
        bad = Bitstream.parse(
            write(replace(info, **wrong), [Section(0, 0, 0, b"")], PUBLIC_SEAL_KEY)
        )
        with pytest.raises(MismatchError, match=name):
            bad.check_for(chunk, tiny.spec, b"p" * 16, CodecId.KLT)


def test_dtype_by_name() -> None:
    assert DType.of("torch.bfloat16") is DType.BFLOAT16
    with pytest.raises(UnsupportedError):
        DType.of("torch.float64")


class FromFile(LevelSource):
    """Levels as a file would have them: read when asked for."""

    def __init__(self, stream: Bitstream, data: bytes) -> None:
        self._header, self._data, self.reads = stream.header, data, 0

    def __getitem__(self, level: int) -> memoryview:
        start, end = self._header.level_start(level), self._header.level_end(level)
        return memoryview(self._data)[start:end]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._header.info.num_levels))

    def __len__(self) -> int:
        return self._header.info.num_levels

    def read_into(self, buffer: memoryview, first: int, last: int) -> None:
        self.reads += 1
        buffer[:] = self._data[self._header.level_start(first) : self._header.level_end(last - 1)]


@pytest.mark.parametrize("from_file", [False, True])
def test_first_levels_are_read_in_one_go(from_file: bool) -> None:
    data = STREAM
    parsed = Bitstream.parse(data)
    source = FromFile(parsed, data)
    if from_file:
        parsed = Bitstream(parsed.header, source)
    for levels in range(1, parsed.info.num_levels + 1):
        start, end = parsed.header.size_bytes, parsed.level_end(levels - 1)
        buffer = bytearray(end - start)
        parsed.read_into(memoryview(buffer), levels)
        assert buffer == data[start:end]
    assert source.reads == (parsed.info.num_levels if from_file else 0)


@pytest.mark.parametrize("from_file", [False, True])
def test_reading_levels_checks_what_was_read(from_file: bool) -> None:
    data = bytearray(STREAM)
    header = Header.parse(data)
    data[header.level_end(0)] ^= 1
    parsed = Bitstream.of(header, data)
    if from_file:
        parsed = Bitstream(header, FromFile(parsed, bytes(data)))
    first = memoryview(bytearray(header.level_end(0) - header.size_bytes))
    parsed.read_into(first, 1)
    both = memoryview(bytearray(header.level_end(1) - header.size_bytes))
    for _ in range(2):  # the second time, too
        with pytest.raises(ChecksumError):
            parsed.read_into(both, 2)
    trusted = Bitstream.of(header, data, verified=range(header.info.num_levels))
    trusted.read_into(both, 2)


def test_levels_that_are_not_there_cannot_be_read() -> None:
    data = STREAM
    header = Header.parse(data)
    parsed = Bitstream.of(header, data[: header.level_end(0)])
    with pytest.raises(TruncatedError, match="level 1"):
        parsed.read_into(memoryview(bytearray(header.level_end(1) - header.size_bytes)), 2)
