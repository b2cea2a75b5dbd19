"""kvtc, the strongest published codec, rebuilt from its description (arXiv 2511.01815).

Rows are projected on the profile's basis, quantised run by run as its plan says, packed and
compressed with DEFLATE, K and V apart, the whole context at once. The first 4 tokens stay raw, and
so do the last 128 in the variant with a window: on a short context the window is most of the bytes,
so both are measured.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import torch

from kdn.bench.rivals.base import ExactContext, Separate
from kdn.bench.rivals.kvtc_profile import (
    KvtcProfile,
    KvtcSide,
    Run,
    dequantise,
    from_fp8,
    quantise,
    rows_of,
    to_fp8,
)
from kdn.bench.rivals.plain import SINK_TOKENS
from kdn.cache.keys import TokenIds
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope

WINDOW_TOKENS = 128
DEFLATE_LEVEL = 6
Bytes = npt.NDArray[np.uint8]

_LENGTHS = struct.Struct("<II")


class Kvtc(Separate):
    def __init__(self, spec: ModelSpec, profile: KvtcProfile, *, window: bool) -> None:
        self.spec = spec
        self.profile = profile
        self.window = WINDOW_TOKENS if window else 0
        self.name = "kvtc" if window else "kvtc-nowindow"
        self.labels = tuple(f"{ratio:g}x" for ratio in profile.ratios)

    def encode(self, context: ExactContext, level: int) -> bytes:
        cache = context.cache
        end = cache.num_tokens - self.window
        raw = [_raw(cache.slice(0, SINK_TOKENS)), _raw(cache.slice(end, cache.num_tokens))]
        rows = rows_of(cache.slice(SINK_TOKENS, end), self.spec)
        sides = self.profile.keys, self.profile.values
        packed = [_pack(r, side, level) for r, side in zip(rows, sides, strict=True)]
        return b"".join((_LENGTHS.pack(*map(len, packed)), *packed, *raw))

    def decode(self, data: bytes, tokens: TokenIds, level: int) -> KVCache:
        spec = self.spec
        out = KVCache.empty(spec.num_layers, len(tokens), spec.num_kv_heads, spec.head_dim)
        end = len(tokens) - self.window
        sizes = _LENGTHS.unpack_from(data)
        offset = _LENGTHS.size
        sides = self.profile.keys, self.profile.values
        for target, side, size in zip((out.keys, out.values), sides, sizes, strict=True):
            rows = _unpack(data[offset : offset + size], end - SINK_TOKENS, side, level)
            shape = (len(rows), spec.num_layers, spec.num_kv_heads, spec.head_dim)
            target[:, SINK_TOKENS:end] = rows.view(shape).transpose(0, 1)
            offset += size
        middle = out.keys[:, SINK_TOKENS:end]
        rope.redo(middle, spec, SINK_TOKENS, out=middle)
        offset += _unraw(data, offset, out.slice(0, SINK_TOKENS))
        _unraw(data, offset, out.slice(end, len(tokens)))
        return out


def _pack(rows: torch.Tensor, side: KvtcSide, level: int) -> bytes:
    projected = (rows - side.mean) @ side.basis_of(level)
    parts = [_pack_run(projected[:, run.start : run.end], run) for run in side.plans[level]]
    return zlib.compress(b"".join(parts), DEFLATE_LEVEL)


def _pack_run(rows: torch.Tensor, run: Run) -> bytes:
    if run.bits == 8:
        return to_fp8(rows, run.scale).T.contiguous().numpy().tobytes()
    codes, offsets, steps = quantise(rows, run.bits)
    flat = codes.T.contiguous().numpy().reshape(-1, 8 // run.bits)  # component after component
    shifts = np.arange(0, 8, run.bits, dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(flat << shifts, axis=1)
    return offsets.numpy().tobytes() + steps.numpy().tobytes() + packed.tobytes()


def _unpack(data: bytes, num_tokens: int, side: KvtcSide, level: int) -> torch.Tensor:
    basis = side.basis_of(level)
    plain = np.frombuffer(bytearray(zlib.decompress(data)), np.uint8)
    projected = torch.zeros(num_tokens, basis.shape[1])
    offset = 0
    for run in side.plans[level]:
        target = projected[:, run.start : run.end]
        offset += _unpack_run(plain[offset:], run, target)
    return torch.addmm(side.mean, projected, basis.T)


def _unpack_run(plain: Bytes, run: Run, out: torch.Tensor) -> int:
    """Fill [tokens, components] from the front of `plain`; returns the bytes used."""
    num_tokens, size = out.shape
    if run.bits == 8:
        codes = torch.from_numpy(plain[: size * num_tokens]).view(size, num_tokens)
        out.copy_(from_fp8(codes, run.scale).T)
        return size * num_tokens
    params = torch.from_numpy(plain[: 4 * num_tokens].view(np.float16)).view(2, num_tokens, 1)
    used = 4 * num_tokens + size * num_tokens * run.bits // 8
    shifts = np.arange(0, 8, run.bits, dtype=np.uint8)
    flat = (plain[4 * num_tokens : used, None] >> shifts) & np.uint8(2**run.bits - 1)
    codes = torch.from_numpy(flat.reshape(size, num_tokens)).T
    out.copy_(dequantise(codes, params[0], params[1]))
    return used


def _raw(cache: KVCache) -> bytes:
    return torch.stack((cache.keys, cache.values)).cpu().half().numpy().tobytes()


def _unraw(data: bytes, offset: int, out: KVCache) -> int:
    """Fill a cache from half-precision bytes; returns how many were read."""
    count = 2 * out.keys.numel()
    halves = np.frombuffer(data, np.float16, count, offset).astype(np.float32)
    keys, values = torch.from_numpy(halves).view(2, *out.keys.shape)
    out.keys.copy_(keys)
    out.values.copy_(values)
    return 2 * count
