"""Chunks that are decoded to other positions than they were learned at, and of any length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.base import Codec, Coded
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.errors import MismatchError
from tests.codec.klt_profile import make_profile
from tests.codec.rotations import MIXED

AT = 5000


@pytest.fixture(scope="module", params=["exact", "klt"])
def codec(request: pytest.FixtureRequest) -> Codec:
    if request.param == "exact":
        return ExactCodec(MIXED)
    return KltCodec(MIXED, make_profile(MIXED))


def chunk_of(codec: Codec, index: int, num_tokens: int) -> Chunk:
    """The last of a context, with so many tokens."""
    tokens = np.random.default_rng(1).integers(0, MIXED.vocab_size, 256 * index + num_tokens)
    return cut(tokens, Namespace(MIXED.fingerprint, codec.profile_id), whole=True)[index]


def cache_of(chunk: Chunk, dtype: torch.dtype = torch.float32) -> KVCache:
    """Keys as a model has them, which are alike before they are turned."""
    torch.manual_seed(2)
    shape = (MIXED.num_layers, chunk.num_tokens, MIXED.num_kv_heads, MIXED.head_dim)
    keys = rope.redo(torch.randn(shape), MIXED, chunk.start)
    return KVCache(keys.to(dtype), torch.randn(shape).to(dtype), chunk.start)


def coded(codec: Codec, chunk: Chunk, dtype: torch.dtype = torch.float32) -> Bitstream:
    return Bitstream.parse(codec.encode(chunk, cache_of(chunk, dtype)))


def moved(cache: KVCache, at: int) -> KVCache:
    """The reference."""
    keys = rope.redo(rope.undo(cache.keys, MIXED, cache.start), MIXED, at)
    return KVCache(keys.to(cache.dtype), cache.values, at)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("at", [0, 3, AT])
def test_keys_are_turned_for_where_they_come_to_stand(codec: Codec, index: int, at: int) -> None:
    chunk = chunk_of(codec, index, 37)
    stream = coded(codec, chunk)
    there, here = codec.decode(stream, chunk, at=at), codec.decode(stream, chunk)
    assert (there.start, set(there.valid_from)) == (at, {at})
    assert torch.equal(there.values, here.values)
    assert (there.keys - moved(here, at).keys).abs().max() < 1e-4
    if at not in (chunk.start, 0):
        assert (there.keys - here.keys).abs().max() > 1


def test_a_chunk_that_stays_keeps_every_bit(codec: Codec) -> None:
    chunk = chunk_of(codec, 1, 16)
    stream = coded(codec, chunk)
    stays, plain = codec.decode(stream, chunk, at=chunk.start), codec.decode(stream, chunk)
    assert torch.equal(stays.keys, plain.keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_exact_chunk_is_rounded_once(dtype: torch.dtype) -> None:
    codec = ExactCodec(MIXED)
    chunk = chunk_of(codec, 1, 21)
    cache = cache_of(chunk, dtype)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    found = codec.decode(stream, chunk, dtype=dtype, at=AT)

    expected = moved(KVCache(cache.keys.float(), cache.values.float(), cache.start), AT).keys
    error = (found.keys.float() - expected).abs()
    assert bool((error <= expected.abs() * torch.finfo(dtype).eps * 0.51 + 1e-5).all())
    assert torch.equal(found.values, cache.values)


def test_memory_to_decode_into_begins_where_the_chunk_comes_to_stand(codec: Codec) -> None:
    chunk = chunk_of(codec, 1, 16)
    stream = coded(codec, chunk)
    out = KVCache.empty(6, 16, 3, 16, start=AT)
    assert torch.equal(
        codec.decode(stream, chunk, out=out, at=AT).keys, codec.decode(stream, chunk, at=AT).keys
    )
    for wrong in (AT + 1, None):
        with pytest.raises(MismatchError, match="expected to decode"):
            codec.decode(stream, chunk, out=out, at=wrong)
    with pytest.raises(MismatchError, match="expected a position"):
        codec.decode(stream, chunk, at=-1)


def test_what_a_layer_lacks_moves_along(codec: Codec) -> None:
    chunk = chunk_of(codec, 1, 16)
    plain = cache_of(chunk)
    lacking = (chunk.start + 7, *(chunk.start,) * 5)
    plain.keys[0, :7], plain.values[0, :7] = 0, 0
    cache = KVCache(plain.keys, plain.values, chunk.start, lacking)
    found = codec.decode(Bitstream.parse(codec.encode(chunk, cache)), chunk, at=AT)
    assert found.valid_from == (AT + 7, *(AT,) * 5)
    assert not found.keys[0, :7].any()
    assert found.keys[0, 7:].any()


def test_heads_of_a_chunk_elsewhere(codec: Codec) -> None:
    chunk = chunk_of(codec, 1, 19)
    stream = coded(codec, chunk)
    levels, dtype = codec.num_levels, torch.float32
    whole = codec.decode(stream, chunk, levels=levels, at=AT)
    own = codec.decode_heads(stream, chunk, range(1, 3), levels=levels, dtype=dtype, at=AT)
    assert torch.equal(own.keys, whole.of_heads(range(1, 3)).keys)
    assert own.start == AT


def test_the_same_chunk_to_several_places_of_an_engine(codec: Codec) -> None:
    chunk = chunk_of(codec, 1, 19)
    stream, slots = coded(codec, chunk), np.arange(19)
    sides = [[torch.zeros(60, 3, 16) for _ in range(6)] for _ in range(2)]
    rows = TokenRows(*sides, range(3))
    behind = np.where(slots < 4, -1, slots + 19)
    batch = [
        Coded(stream, chunk, codec.num_levels, slots),
        Coded(stream, chunk, codec.num_levels, behind, AT),
        Coded(stream, chunk, codec.num_levels, slots, -5),
    ]
    errors = codec.decode_rows(batch, rows)
    assert errors[:2] == [None, None]
    assert isinstance(errors[2], MismatchError)
    here, there = codec.decode(stream, chunk), codec.decode(stream, chunk, at=AT)
    keys = torch.stack(sides[0])
    assert torch.equal(keys[:, :19], here.keys)
    assert torch.equal(keys[:, 23:38], there.keys[:, 4:])
    assert not keys[:, 19:23].any()
    assert not keys[:, 38:].any()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 15, 17, 31, 33, 127, 253, 255])
@pytest.mark.parametrize("index", [0, 1])
def test_chunks_of_any_length(codec: Codec, index: int, num_tokens: int) -> None:
    """A piece ends where it ends."""
    chunk = chunk_of(codec, index, num_tokens)
    assert chunk.num_tokens == num_tokens
    cache = cache_of(chunk)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    found = codec.decode(stream, chunk)
    assert stream.info.num_tokens == num_tokens
    if codec.is_lossless:
        assert torch.equal(found.keys, cache.keys)
        assert torch.equal(found.values, cache.values)
        return
    # The last level rounds to whole steps: 0.01 and, of the first tokens, 0.02.
    for a, b in ((found.keys, cache.keys), (found.values, cache.values)):
        assert float((a - b).abs().max()) < 0.03
    for levels in range(1, codec.num_levels):
        coarse = codec.decode(stream, chunk, levels=levels)
        assert coarse.num_tokens == num_tokens
        assert bool(torch.isfinite(coarse.keys).all())


def test_a_stream_is_of_one_length(codec: Codec) -> None:
    chunk, other = chunk_of(codec, 1, 17), chunk_of(codec, 1, 18)
    stream = coded(codec, chunk)
    with pytest.raises(MismatchError):
        codec.decode(stream, other)
    with pytest.raises(MismatchError, match="num_tokens"):
        codec.decode(stream, replace(other, key=chunk.key))
