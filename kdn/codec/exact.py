"""The lossless codec: every bit comes back, NaN payloads and signed zeros included.

Each value is turned left by one bit, so that the exponent comes first and the sign last, and cut
into byte planes. Exponents crowd around a few values and compress; mantissas hardly do. Each plane
of a section is coded with its own order-0 table, or stored raw where that is smaller. K is coded as
the engine has it: undoing RoPE would round.

    section = for each plane, high byte first: mode (u8) | payload
    mode 0: the plane's bytes
    mode 1: length of the rANS stream (u32) | table | rANS stream
    table = 32 bytes, bit s % 8 of byte s // 8 set where symbol s occurs | its frequency - 1 (u16)
            for each that occurs

One level, one section for K and one for V per group of layers. Parameters: layers per group (u16),
rANS lanes (u16). In two parts (`windowed.py`), no group has layers of both.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.cache.windows import num_unbounded
from kdn.codec import rans, rans_numba, rope
from kdn.codec.base import Codec, check_input, info_at_hand, output_cache
from kdn.codec.format import (
    KIND_KEYS,
    KIND_VALUES,
    NO_PROFILE,
    Bitstream,
    CodecId,
    DType,
    Section,
    StreamInfo,
    write,
)
from kdn.codec.threads import parallel_map
from kdn.errors import FormatError, MismatchError, TruncatedError

LAYERS_PER_GROUP = 2
LANES = 64
MAX_LANES = 1024
IN_PARTS = b"exact in 2 parts"
"""In place of a profile's id, where streams are in two parts: nobody takes them for others."""
_PARAMS = struct.Struct("<HH")
_RAW, _CODED = 0, 1
_CODED_HEAD = struct.Struct("<I")
_BITMAP_BYTES = 32

_TORCH = {
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
}
Plane = npt.NDArray[np.uint8]


class ExactCodec(Codec):
    """Lossless; needs no profile."""

    name: ClassVar[str] = "exact"
    codec_id = CodecId.EXACT
    is_lossless = True

    def __init__(self, spec: ModelSpec, *, in_parts: bool = False) -> None:
        """`in_parts`: the layers with a window, which come last, are a part of their own."""
        self.spec = spec
        self.num_levels = 1
        self.profile_id = IN_PARTS if in_parts else NO_PROFILE
        self._border = num_unbounded(spec) if in_parts else spec.num_layers
        """Layers from here on are in the second part."""
        self.windowed_from = -(-self._border // LAYERS_PER_GROUP) if in_parts else None

    def decodes_to(self, info: StreamInfo, dtype: torch.dtype) -> bool:
        """The source's only: anything else would not be exact."""
        return _TORCH[info.dtype] == dtype

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        check_input(self.spec, chunk, cache)
        info = StreamInfo.for_chunk(
            chunk,
            self.spec,
            codec=self.codec_id,
            dtype=DType.of(cache.dtype),
            num_levels=1,
            valid_from=cache.valid_from,
            profile=self.profile_id,
            params=_PARAMS.pack(LAYERS_PER_GROUP, LANES),
            windowed_from=self.windowed_from,
        )
        groups = self._groups(LAYERS_PER_GROUP)
        jobs = [(g, k) for g in groups for k in (KIND_KEYS, KIND_VALUES)]
        sections = parallel_map(partial(_encode_section, info, cache), jobs)
        return write(info, sections, chunk.seal_key)

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype | None = None,
        at: int | None = None,
    ) -> KVCache:
        """Every bit comes back at the positions that keys were learned at; elsewhere they are
        turned, and rounded to their dtype."""
        stream.check_for(chunk, self.spec, self.profile_id, self.codec_id, self.windowed_from)
        source = _TORCH[stream.info.dtype]
        asked = {dtype or source, source if out is None else out.dtype}
        if not all(self.decodes_to(stream.info, one) for one in asked):
            raise MismatchError(f"expected to decode to {source}, the dtype of the source")
        layers_per_group, lanes = _parse_params(stream.info.params)
        if self.windowed_from is not None and layers_per_group != LAYERS_PER_GROUP:
            raise FormatError(f"expected {LAYERS_PER_GROUP} layers a group, found another number")
        cache = output_cache(info_at_hand(stream, self.spec), out, source, at)
        groups = self._groups(layers_per_group)
        if not stream.has_windowed:
            groups = groups[: self.windowed_from]
        jobs = [(g, k) for g in groups for k in (KIND_KEYS, KIND_VALUES)]
        parallel_map(partial(_decode_section, stream, cache, lanes), jobs)
        rope.move(cache.keys, self.spec, cache.start - chunk.start)
        return cache

    def _groups(self, layers_per_group: int) -> list[tuple[int, range]]:
        """Their numbers and layers; none has layers of both parts."""
        border, end = self._border, self.spec.num_layers
        parts = [range(0, border, layers_per_group), range(border, end, layers_per_group)]
        layers = [
            range(first, min(first + layers_per_group, part.stop))
            for part in parts
            for first in part
        ]
        return list(enumerate(layers))


def _parse_params(params: bytes) -> tuple[int, int]:
    if len(params) != _PARAMS.size:
        raise FormatError(f"expected {_PARAMS.size} bytes of parameters, found {len(params)}")
    layers_per_group, lanes = _PARAMS.unpack(params)
    if not layers_per_group or not 1 <= lanes <= MAX_LANES:
        raise FormatError(
            f"expected 1 to {MAX_LANES} lanes and a layer per group, found {params!r}"
        )
    return layers_per_group, lanes


def _encode_section(
    info: StreamInfo, cache: KVCache, job: tuple[tuple[int, range], int]
) -> Section:
    (group, layers), kind = job
    tensor = cache.keys if kind == KIND_KEYS else cache.values
    words = [_to_words(tensor[layer, info.absences[layer] :]) for layer in layers]
    planes = _split(np.concatenate(words))
    data = b"".join(_encode_plane(plane) for plane in planes)
    return Section(0, kind, group, data)


def _decode_section(
    stream: Bitstream, cache: KVCache, lanes: int, job: tuple[tuple[int, range], int]
) -> None:
    (group, layers), kind = job
    info = stream.info
    tensor = cache.keys if kind == KIND_KEYS else cache.values
    present = [info.num_tokens - info.absences[layer] for layer in layers]
    row = info.num_kv_heads * info.head_dim
    data = stream.section(0, group, kind)
    words = _join(data, sum(present) * row, _TORCH[info.dtype].itemsize, lanes)
    at = 0
    for layer, tokens in zip(layers, present, strict=True):
        part = torch.from_numpy(words[at : at + tokens * row]).view(tensor.dtype)
        tensor[layer, info.absences[layer] :] = part.view(tokens, *info.shape[2:])
        at += tokens * row


def _to_words(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """The values' bits, flat, as unsigned integers."""
    signed = torch.int32 if tensor.dtype.itemsize == 4 else torch.int16
    bits: npt.NDArray[np.signedinteger] = tensor.detach().cpu().contiguous().view(signed).numpy()
    return bits.reshape(-1).view(f"u{tensor.dtype.itemsize}")


def _split(words: npt.NDArray[np.unsignedinteger]) -> list[Plane]:
    width = 8 * words.itemsize
    turned = words << 1 | words >> (width - 1)
    return [(turned >> shift).astype(np.uint8) for shift in range(width - 8, -1, -8)]


def _join(
    data: memoryview, num_values: int, itemsize: int, lanes: int
) -> npt.NDArray[np.signedinteger]:
    """The values' bits from all planes of a section."""
    width = 8 * itemsize
    turned = np.zeros(num_values, dtype=f"u{itemsize}")
    for _ in range(itemsize):
        plane, data = _decode_plane(data, num_values, lanes)
        turned <<= 8
        turned |= plane
    if len(data):
        raise FormatError(f"expected a section to end with its last plane, found {len(data)} more")
    words = turned >> 1 | turned << (width - 1)
    return words.view(f"i{itemsize}")


def _encode_plane(plane: Plane) -> bytes:
    raw = struct.pack("<B", _RAW) + plane.tobytes()
    counts = np.bincount(plane, minlength=256)
    if not len(plane) or _estimated_bytes(counts) >= len(raw):
        return raw
    freqs = rans.normalise(counts)
    tables = rans.Tables.from_freqs(freqs[None])
    widths = rans.even_widths(len(plane), LANES)
    stream = rans_numba.encode(plane, tables, np.zeros(len(widths), np.int32), widths)
    head = struct.pack("<B", _CODED) + _CODED_HEAD.pack(len(stream))
    coded = head + _table_bytes(freqs) + stream
    return min(coded, raw, key=len)


def _estimated_bytes(counts: npt.NDArray[np.int64]) -> float:
    """Below the size of a coded plane: spares the coder where it cannot win."""
    used = counts[counts > 0]
    return float((used * np.log2(used.sum() / used)).sum() / 8) + _BITMAP_BYTES + 2 * len(used)


def _decode_plane(data: memoryview, num_values: int, lanes: int) -> tuple[Plane, memoryview]:
    """A plane, and what follows it."""
    mode, data = _take(data, 1)
    if mode[0] == _RAW:
        raw, data = _take(data, num_values)
        return np.frombuffer(raw, dtype=np.uint8), data
    if mode[0] != _CODED:
        raise FormatError(f"expected plane mode {_RAW} or {_CODED}, found {mode[0]}")
    head, data = _take(data, _CODED_HEAD.size)
    freqs, data = _parse_table(data)
    stream, data = _take(data, _CODED_HEAD.unpack(head)[0])
    widths = rans.even_widths(num_values, lanes)
    tables = rans.Tables.from_freqs(freqs[None])
    return rans_numba.decode(stream, tables, np.zeros(len(widths), np.int32), widths), data


def _table_bytes(freqs: npt.NDArray[np.uint16]) -> bytes:
    bitmap = np.packbits(freqs > 0, bitorder="little").tobytes()
    return bitmap + (freqs[freqs > 0] - 1).astype("<u2").tobytes()


def _parse_table(data: memoryview) -> tuple[npt.NDArray[np.int64], memoryview]:
    bitmap, data = _take(data, _BITMAP_BYTES)
    occurs = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").astype(bool)
    listed, data = _take(data, 2 * int(occurs.sum()))
    freqs = np.zeros(256, dtype=np.int64)
    freqs[occurs] = np.frombuffer(listed, dtype="<u2").astype(np.int64) + 1
    return freqs, data


def _take(data: memoryview, length: int) -> tuple[memoryview, memoryview]:
    if len(data) < length:
        raise TruncatedError(f"expected {length} more bytes in a section, found {len(data)}")
    return data[:length], data[length:]
