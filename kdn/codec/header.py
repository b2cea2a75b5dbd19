"""The header of a stream: `docs/format.md` is the authority, this file follows its order.

Everything a reader learns about a chunk before it reads a section: identity, shape, what is absent,
the directory, a digest of each level, and the seal, which only holders of the tenant's secret can
make. Every size is checked against a limit before anything is done with it. Planners and nodes need
no more than this, so it imports neither torch nor a codec.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b, sha256
from hmac import compare_digest

from kdn.cache.keys import FORMAT_VERSION, KEY_BYTES, SEAL_KEY_BYTES, Chunk
from kdn.cache.spec import FINGERPRINT_BYTES, ModelSpec
from kdn.codec.directory import (
    LINE_BYTES,
    MAX_SECTIONS,
    Directory,
    Line,
    SectionEntry,
    check_range,
)
from kdn.errors import (
    AuthenticityError,
    ChecksumError,
    FormatError,
    TruncatedError,
    UnsupportedError,
)

MAGIC = b"\x89KDN"
NO_PROFILE = bytes(16)
LEVEL_DIGEST_BYTES = 16
SEAL_BYTES = 16
STREAM_ID_BYTES = 16
PROFILE_ID_BYTES = 16
PREFIX_COMPUTED = 255
KIND_KEYS, KIND_VALUES = 0, 1

MAX_START = 2**40
MAX_TOKENS = 4096
MAX_LAYERS = 1024
MAX_KV_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_VALUES = 2**31
MAX_LEVELS = 32
MAX_PARAMS_BYTES = 1024

_PROBE = struct.Struct("<4sHBBI")
_FIXED = struct.Struct("<4sHBBI16s16s16sQHHHHBBHBH")

PROBE_BYTES = _PROBE.size
"""So many first bytes tell the header's size."""
MIN_HEADER_BYTES = _FIXED.size + LINE_BYTES + LEVEL_DIGEST_BYTES + SEAL_BYTES + STREAM_ID_BYTES
MAX_HEADER_BYTES = (
    _FIXED.size
    + 2 * MAX_LAYERS
    + 2
    + MAX_PARAMS_BYTES
    + LINE_BYTES * MAX_SECTIONS
    + LEVEL_DIGEST_BYTES * 2 * MAX_LEVELS
    + SEAL_BYTES
    + STREAM_ID_BYTES
)

MAX_GROUPS = 2**16
_ABSENCES, _PARTS = 1, 2
"""What follows the fixed part, as bits of one byte."""

Buffer = bytes | bytearray | memoryview


MODEL_AT = slice(28, 28 + FINGERPRINT_BYTES)
"""Where a header has the model's fingerprint. For counting, not for reading a stream: nothing is
verified there."""


class CodecId(IntEnum):
    EXACT = 1
    CACHEGEN = 2
    KLT = 3
    STATE = 4


class DType(IntEnum):
    """Dtype of the tensors a stream was made from."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3

    @classmethod
    def of(cls, dtype: object) -> DType:
        """From a torch or NumPy dtype, by its name."""
        name = str(dtype).removeprefix("torch.").upper()
        if name not in cls.__members__:
            raise UnsupportedError(f"expected float16, bfloat16 or float32, found {dtype}")
        return cls[name]


_CODECS, _DTYPES = frozenset(map(int, CodecId)), frozenset(map(int, DType))


@dataclass(frozen=True)
class StreamInfo:
    """What a header says of a chunk. `valid_from[layer]` is the first absolute position that layer
    holds, as in KVCache; `params` is the codec's own. `windowed_from` is the first group of the
    stream's second part, which holds the layers with a sliding window; None: it is in one part."""

    codec: CodecId
    dtype: DType
    chunk_key: bytes
    model: bytes
    profile: bytes
    start: int
    num_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_levels: int
    valid_from: tuple[int, ...]
    params: bytes = b""
    prefix_quality: int = PREFIX_COMPUTED
    windowed_from: int | None = None

    @classmethod
    def for_chunk(
        cls,
        chunk: Chunk,
        spec: ModelSpec,
        *,
        codec: CodecId,
        dtype: DType,
        num_levels: int,
        valid_from: Sequence[int] = (),
        profile: bytes = NO_PROFILE,
        params: bytes = b"",
        prefix_quality: int = PREFIX_COMPUTED,
        windowed_from: int | None = None,
    ) -> StreamInfo:
        """Of this chunk of this model; every layer holds every token if `valid_from` is empty."""
        return cls(
            codec=codec,
            dtype=dtype,
            chunk_key=chunk.key,
            model=spec.fingerprint,
            profile=profile,
            start=chunk.start,
            num_tokens=chunk.num_tokens,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_levels=num_levels,
            valid_from=tuple(valid_from) or (chunk.start,) * spec.num_layers,
            params=params,
            prefix_quality=prefix_quality,
            windowed_from=windowed_from,
        )

    @property
    def num_parts(self) -> int:
        """That each level is in."""
        return 1 if self.windowed_from is None else 2

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of keys, and of values: [layers, tokens, kv_heads, head_dim]."""
        return (self.num_layers, self.num_tokens, self.num_kv_heads, self.head_dim)

    @property
    def absences(self) -> tuple[int, ...]:
        """How many of the chunk's first tokens each layer lacks."""
        return tuple(position - self.start for position in self.valid_from)


@dataclass(frozen=True)
class Header:
    """An intact header, all a planner or a node needs of a stream. `check_seal` says whether
    somebody who may has written it."""

    info: StreamInfo
    stream_id: bytes
    directory: Directory = field(repr=False, compare=False)
    level_digests: tuple[bytes, ...]
    """Of each part of each level."""
    size_bytes: int
    sealed: bytes = field(repr=False)
    """The header's bytes up to the seal, which covers them."""
    seal: bytes = field(repr=False)

    @property
    def entries(self) -> tuple[SectionEntry, ...]:
        return self.directory.entries

    @property
    def level_ends(self) -> tuple[int, ...]:
        return self.directory.level_ends

    @property
    def stream_bytes(self) -> int:
        """Size of the whole stream."""
        return self.directory.level_ends[-1]

    def level_start(self, level: int) -> int:
        """Byte offset where this level begins."""
        return self.level_ends[level - 1] if level else self.size_bytes

    def level_end(self, level: int) -> int:
        """Byte offset where this level ends: so many bytes hold it and all levels before it."""
        assert level >= 0
        return self.level_ends[level]

    @cached_property
    def part_ends(self) -> tuple[int, ...]:
        """Byte offset where the first part of each level ends: what follows it up to the level's
        end is of layers with a window."""
        border = self.info.windowed_from
        return self.level_ends if border is None else self.directory.part_ends(border)

    def check_level(self, level: int, data: Buffer, *, windowed: bool = True) -> None:
        """ChecksumError unless these are the bytes of this level; without its `windowed` part, if
        it has one that is not wanted."""
        parts = 2 if windowed else 1
        for part, own in enumerate(self._split(level, data)[:parts]):
            found = level_digest(own)
            expected = self.level_digests[level * self.info.num_parts + part]
            if found != expected:
                raise ChecksumError(
                    f"level {level}: expected {expected.hex()}, found {found.hex()}"
                )

    def _split(self, level: int, data: Buffer) -> list[Buffer]:
        """A level's parts."""
        if self.info.windowed_from is None:
            return [data]
        view = memoryview(data).cast("B")
        border = self.part_ends[level] - self.level_start(level)
        return [view[:border], view[border:]]

    def check_seal(self, seal_key: bytes) -> None:
        """AuthenticityError unless a holder of this key wrote the header, and with it every byte
        that its digests name."""
        _check_seal(self.sealed, self.seal, seal_key)

    @classmethod
    def parse(cls, data: Buffer, seal_key: bytes | None = None) -> Header:
        """Read the header at the beginning of `data` and verify it against its stream id. With a
        key its seal is checked, too, before anything else of it is read."""
        size = header_size(data)
        view = memoryview(data).cast("B")[:size]
        if len(view) < size:
            raise TruncatedError(f"expected a header of {size} bytes, found {len(view)}")
        found, expected = bytes(view[-STREAM_ID_BYTES:]), _stream_id(view[:-STREAM_ID_BYTES])
        if found != expected:
            raise ChecksumError(f"stream id: expected {expected.hex()}, found {found.hex()}")
        if seal_key is not None:
            sealed = len(view) - SEAL_BYTES - STREAM_ID_BYTES
            _check_seal(view[:sealed], view[sealed:-STREAM_ID_BYTES], seal_key)
        return _parse_header(view)


def header_size(prefix: Buffer) -> int:
    """Size of the header whose first PROBE_BYTES (at least) these are."""
    if len(prefix) < PROBE_BYTES:
        raise TruncatedError(f"expected at least {PROBE_BYTES} bytes, found {len(prefix)}")
    magic, version, _, _, size = _PROBE.unpack_from(prefix)
    if magic != MAGIC:
        raise FormatError(f"expected magic {MAGIC!r}, found {bytes(magic)!r}")
    if version != FORMAT_VERSION:
        raise FormatError(f"expected format version {FORMAT_VERSION}, found {version}")
    check_range("header size", size, MIN_HEADER_BYTES, MAX_HEADER_BYTES)
    return int(size)


def _parse_header(view: memoryview) -> Header:
    (
        _, _, codec, dtype, size, chunk_key, model, profile, start, tokens, layers, kv_heads,
        head_dim, prefix_quality, levels, num_sections, follows, params_bytes,
    ) = _FIXED.unpack_from(view)  # fmt: skip
    if codec not in _CODECS:
        raise FormatError(f"expected codec 1, 2, 3 or 4, found {codec}")
    if dtype not in _DTYPES:
        raise FormatError(f"expected dtype 1, 2 or 3, found {dtype}")
    if follows & ~(_ABSENCES | _PARTS):
        raise FormatError(f"expected 0 to 3 for what follows, found {follows}")
    absences_follow, is_parted = bool(follows & _ABSENCES), bool(follows & _PARTS)
    check_range("layers", layers, 1, MAX_LAYERS)
    check_range("sections", num_sections, 1, MAX_SECTIONS)
    check_range("parameter bytes", params_bytes, 0, MAX_PARAMS_BYTES)
    at = _FIXED.size
    check_range("levels", levels, 1, MAX_LEVELS)
    directory_at = at + 2 * layers * absences_follow + 2 * is_parted + params_bytes
    digests_at = directory_at + LINE_BYTES * num_sections
    seal_at = digests_at + LEVEL_DIGEST_BYTES * levels * (1 + is_parted)
    expected = seal_at + SEAL_BYTES + STREAM_ID_BYTES
    if size != expected:
        raise FormatError(f"expected a header of {expected} bytes by its fields, found {size}")
    valid_from = (start,) * layers
    if absences_follow:
        absences = struct.unpack_from(f"<{layers}H", view, at)
        valid_from = tuple(start + absent for absent in absences)
        at += 2 * layers
        if not any(absences):
            raise FormatError("expected an absent token where absences follow, found none")
    windowed_from = None
    if is_parted:
        (windowed_from,) = struct.unpack_from("<H", view, at)
        at += 2
    info = StreamInfo(
        codec=CodecId(codec),
        dtype=DType(dtype),
        chunk_key=chunk_key,
        model=model,
        profile=profile,
        start=start,
        num_tokens=tokens,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_levels=levels,
        valid_from=valid_from,
        params=bytes(view[at : at + params_bytes]),
        prefix_quality=prefix_quality,
        windowed_from=windowed_from,
    )
    _check_info(info)
    directory = Directory.parse(view[directory_at:digests_at], size, levels)
    _check_parts(info, directory)
    return Header(
        info=info,
        stream_id=bytes(view[-STREAM_ID_BYTES:]),
        directory=directory,
        level_digests=tuple(
            bytes(view[at : at + LEVEL_DIGEST_BYTES])
            for at in range(digests_at, seal_at, LEVEL_DIGEST_BYTES)
        ),
        size_bytes=size,
        sealed=bytes(view[:seal_at]),
        seal=bytes(view[seal_at : seal_at + SEAL_BYTES]),
    )


def _check_info(info: StreamInfo) -> None:
    check_range("start", info.start, 0, MAX_START)
    check_range("tokens", info.num_tokens, 1, MAX_TOKENS)
    check_range("layers", info.num_layers, 1, MAX_LAYERS)
    check_range("KV heads", info.num_kv_heads, 1, MAX_KV_HEADS)
    check_range("head size", info.head_dim, 1, MAX_HEAD_DIM)
    num_values = 2 * info.num_layers * info.num_tokens * info.num_kv_heads * info.head_dim
    check_range("values", num_values, 1, MAX_VALUES)
    check_range("levels", info.num_levels, 1, MAX_LEVELS)
    check_range("prefix quality", info.prefix_quality, 0, 255)
    check_range("parameter bytes", len(info.params), 0, MAX_PARAMS_BYTES)
    check_range("first group with windows", info.windowed_from or 0, 0, MAX_GROUPS - 1)
    for position in set(info.valid_from):  # nearly always one, the start
        absent = position - info.start
        if not 0 <= absent <= info.num_tokens:
            raise FormatError(f"expected 0 to {info.num_tokens} absent tokens, found {absent}")


def _check_parts(info: StreamInfo, directory: Directory) -> None:
    border = info.windowed_from
    if border is not None and border > directory.last_group:
        raise FormatError(f"expected a second part from group {border} on, found none")


def build_header(
    info: StreamInfo, lines: Sequence[Line], digests: Sequence[bytes], seal_key: bytes
) -> bytes:
    """The header bytes for ordered sections, and the digests of their levels' parts."""
    assert len(info.chunk_key) == KEY_BYTES
    assert len(info.model) == FINGERPRINT_BYTES
    assert len(info.profile) == PROFILE_ID_BYTES
    assert len(info.valid_from) == info.num_layers
    _check_info(info)
    assert len(digests) == info.num_levels * info.num_parts
    front = _front_bytes(info, len(lines))
    directory = Directory.of(lines, _FIXED.unpack_from(front)[4], info.num_levels)
    _check_parts(info, directory)
    sealed = b"".join([front, directory.packed(), *digests])
    header = sealed + _seal(sealed, seal_key)
    return header + _stream_id(header)


def _front_bytes(info: StreamInfo, num_sections: int) -> bytes:
    """Fixed part, absences, border of the parts and parameters."""
    absences = border = b""
    follows = 0
    if any(info.absences):
        absences = struct.pack(f"<{info.num_layers}H", *info.absences)
        follows |= _ABSENCES
    if info.windowed_from is not None:
        border = struct.pack("<H", info.windowed_from)
        follows |= _PARTS
    tail = absences + border + info.params
    size = _FIXED.size + len(tail) + LINE_BYTES * num_sections
    size += LEVEL_DIGEST_BYTES * info.num_levels * info.num_parts + SEAL_BYTES + STREAM_ID_BYTES
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, info.codec, info.dtype, size, info.chunk_key, info.model,
        info.profile, info.start, info.num_tokens, info.num_layers, info.num_kv_heads,
        info.head_dim, info.prefix_quality, info.num_levels, num_sections, follows,
        len(info.params),
    )  # fmt: skip
    return fixed + tail


def level_digest(data: Buffer) -> bytes:
    """Of the bytes of one level, or of a part of it. SHA-256, which processors have instructions
    for: everything else here is short."""
    digest = sha256(b"kdn-level")
    digest.update(data)
    return digest.digest()[:LEVEL_DIGEST_BYTES]


def _check_seal(sealed: Buffer, found: Buffer, seal_key: bytes) -> None:
    if not compare_digest(found, _seal(sealed, seal_key)):
        raise AuthenticityError("no holder of this namespace's secret has sealed the stream")


def _seal(header_bytes: Buffer, seal_key: bytes) -> bytes:
    """Covers the header up to here, and through its digests every section."""
    assert len(seal_key) == SEAL_KEY_BYTES  # without a key anybody could
    return blake2b(header_bytes, digest_size=SEAL_BYTES, key=seal_key, person=b"kdn-seal").digest()


def _stream_id(header_bytes: Buffer) -> bytes:
    """Covers the seal too: the same values under another seal are another stream."""
    return blake2b(header_bytes, digest_size=STREAM_ID_BYTES, person=b"kdn-stream").digest()
