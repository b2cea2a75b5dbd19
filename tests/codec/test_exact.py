"""The lossless codec gives every bit back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.codec.exact import ExactCodec
from kdn.codec.format import NO_PROFILE, Bitstream
from kdn.errors import FormatError, MismatchError, UnsupportedError

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def same(a: KVCache, b: KVCache) -> bool:
    return (
        torch.equal(bits(a.keys), bits(b.keys))
        and torch.equal(bits(a.values), bits(b.values))
        and (a.start, a.valid_from, a.dtype) == (b.start, b.valid_from, b.dtype)
    )


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, infinities, denormals, and NaNs of every kind of payload, as bit patterns."""
    if dtype == torch.float32:
        patterns = [0, 1, 0x7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x00800000]
        sign, signed = 1 << 31, np.int32
    else:
        inf = 0x7C00 if dtype == torch.float16 else 0x7F80
        patterns = [0, 1, 0x7F, inf, inf | 1, inf | 0x15, 0x7FFF, inf >> 1]
        sign, signed = 1 << 15, np.int16
    all_patterns = np.array(patterns + [p | sign for p in patterns], dtype=np.uint32)
    if signed is np.int16:
        return torch.from_numpy(all_patterns.astype(np.uint16).view(np.int16)).view(dtype)
    return torch.from_numpy(all_patterns.view(np.int32)).view(dtype)


def cache_of(tiny: Any, flat: torch.Tensor, chunk: Any) -> KVCache:
    shape = (tiny.spec.num_layers, chunk.num_tokens, 2, 8)
    repeats = -(-int(np.prod(shape)) // flat.numel())
    keys = bits(flat).repeat(repeats)[: int(np.prod(shape))].view(flat.dtype).view(shape)
    return KVCache(keys, bits(keys).flip(1).view(flat.dtype), chunk.start)


def round_trip(tiny: Any, cache: KVCache, chunk: Any) -> tuple[KVCache, bytes]:
    codec = ExactCodec(tiny.spec)
    data = codec.encode(chunk, cache)
    stream = Bitstream.parse(data)
    stream.verify()
    return codec.decode(stream, chunk), data


@DTYPES
@pytest.mark.parametrize("kind", ["random bits", "constant", "special", "smooth"])
def test_round_trip_is_bit_identical(tiny: Any, dtype: torch.dtype, kind: str) -> None:
    chunk = tiny.chunk(NO_PROFILE)
    if kind == "smooth":
        cache = tiny.cache(chunk, dtype)
    else:
        generator = torch.Generator().manual_seed(7)
        signed = torch.int32 if dtype == torch.float32 else torch.int16
        info = torch.iinfo(signed)
        flat = {
            "random bits": torch.randint(
                info.min, info.max, (3072,), generator=generator, dtype=signed
            ).view(dtype),
            "constant": torch.full((8,), -1.5, dtype=dtype),
            "special": special_values(dtype),
        }[kind]
        cache = cache_of(tiny, flat, chunk)
    decoded, data = round_trip(tiny, cache, chunk)
    assert same(decoded, cache)
    if kind == "constant":
        assert len(data) < cache.size_bytes
    overhead = len(data) - cache.size_bytes
    assert overhead < 400  # never larger than raw but for header and directory


@DTYPES
def test_all_special_values_are_there(dtype: torch.dtype) -> None:
    flat = special_values(dtype)
    assert flat.isnan().any()
    assert flat.isinf().any()
    assert ((flat == 0) & flat.signbit()).any()
    tiny_value = torch.finfo(dtype).tiny
    assert ((flat != 0) & (flat.abs().double() < tiny_value)).any()


@pytest.mark.parametrize("num_tokens", [16, 64, 256])
def test_partial_and_later_chunks(tiny: Any, num_tokens: int) -> None:
    chunk = tiny.chunk(NO_PROFILE, num_tokens, index=1)
    cache = tiny.cache(chunk)
    assert chunk.start == 256
    assert same(round_trip(tiny, cache, chunk)[0], cache)


def test_absent_tokens_are_not_coded_and_come_back_zero(tiny: Any) -> None:
    chunk = tiny.chunk(NO_PROFILE, index=1)
    cache = tiny.cache(chunk, absences=(0, 20, 48, 0))
    data = ExactCodec(tiny.spec).encode(chunk, cache)
    junk = KVCache(cache.keys.clone(), cache.values.clone(), cache.start, cache.valid_from)
    junk.keys[1, :20] = 9
    junk.values[2] = 9
    assert ExactCodec(tiny.spec).encode(chunk, junk) == data
    out = KVCache(torch.full_like(cache.keys, 3), torch.full_like(cache.keys, 3), cache.start)
    decoded = ExactCodec(tiny.spec).decode(Bitstream.parse(data), chunk, out=out)
    assert same(decoded, cache)
    assert decoded.keys is out.keys


def test_real_looking_data_gets_smaller(tiny: Any) -> None:
    chunk = tiny.chunk(NO_PROFILE, 256)
    cache = tiny.cache(chunk, torch.bfloat16)
    _, data = round_trip(tiny, cache, chunk)
    assert len(data) < 0.9 * cache.size_bytes


def test_decodes_into_a_view_of_a_larger_cache(tiny: Any) -> None:
    chunk = tiny.chunk(NO_PROFILE, 48, index=1)
    cache = tiny.cache(chunk)
    whole = KVCache.empty(4, 400, 2, 8, dtype=torch.float16)
    codec = ExactCodec(tiny.spec)
    out = whole.slice(chunk.start, chunk.end)
    codec.decode(Bitstream.parse(codec.encode(chunk, cache)), chunk, out=out)
    assert torch.equal(whole.keys[:, 256:304], cache.keys)
    assert not whole.keys[:, :256].any()
    assert not whole.keys[:, 304:].any()


def test_what_it_refuses(tiny: Any) -> None:
    chunk = tiny.chunk(NO_PROFILE)
    cache = tiny.cache(chunk)
    codec = ExactCodec(tiny.spec)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    with pytest.raises(UnsupportedError, match="float64"):
        codec.encode(chunk, KVCache(cache.keys.double(), cache.values.double()))
    with pytest.raises(MismatchError, match="float16"):
        codec.decode(stream, chunk, dtype=torch.float32)
    with pytest.raises(MismatchError, match="float16"):
        codec.decode(stream, chunk, out=KVCache.empty(4, 48, 2, 8))
    with pytest.raises(MismatchError, match="found a cache of"):
        codec.decode(stream, chunk, out=KVCache.empty(4, 47, 2, 8, dtype=torch.float16))
    with pytest.raises(MismatchError, match="expected a cache of"):
        codec.encode(chunk, cache.slice(0, 32))
    with pytest.raises(MismatchError, match="expected a cache from"):
        codec.encode(chunk, replace(cache, start=16, valid_from=()))
    with pytest.raises(MismatchError, match="chunk_key"):
        codec.decode(stream, tiny.reseed("another").chunk(NO_PROFILE))


def test_wrong_parameters_are_refused(tiny: Any) -> None:
    from kdn.codec.format import Section, write

    chunk = tiny.chunk(NO_PROFILE)
    codec = ExactCodec(tiny.spec)
    good = Bitstream.parse(codec.encode(chunk, tiny.cache(chunk)))
    sections = [
        Section(e.level, e.kind, e.group, good.section(e.level, e.group, e.kind))
        for e in good.header.entries
    ]
    for params in (b"", b"\0\0\1\0", b"\2\0\0\0", b"\2\0\1\4", b"\2\0\x40\0\0", b"\1\0\x40\0"):
        bad = Bitstream.parse(write(replace(good.info, params=params), sections, chunk.seal_key))
        with pytest.raises(FormatError):
            codec.decode(bad, chunk)
