"""Some heads of a chunk, decoded alone: bit by bit what slicing the whole gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.codec.klt.columns import bands, share_of
from kdn.errors import MismatchError
from tests.codec.klt_profile import LEVELS, make_profile


@pytest.fixture(params=["exact", "klt"])
def codec(request: pytest.FixtureRequest, tiny: Any) -> Codec:
    if request.param == "exact":
        return ExactCodec(tiny.spec)
    return KltCodec(tiny.spec, make_profile(tiny.spec))


def shares(num_heads: int) -> Iterator[range]:
    for first in range(num_heads):
        for end in range(first + 1, num_heads + 1):
            yield range(first, end)


def equal(found: KVCache, expected: KVCache) -> bool:
    return (
        torch.equal(found.keys, expected.keys)
        and torch.equal(found.values, expected.values)
        and (found.start, found.valid_from) == (expected.start, expected.valid_from)
    )


@pytest.mark.parametrize("index", [0, 1])  # the first chunk of a context has sinks
def test_some_heads_are_a_slice_of_all(codec: Codec, tiny: Any, index: int) -> None:
    chunk = tiny.chunk(codec.profile_id, 48, index)
    stream = Bitstream.parse(codec.encode(chunk, tiny.cache(chunk, torch.float32)))
    dtypes = [torch.float32] if codec.is_lossless else [torch.float32, torch.bfloat16]
    for levels in range(1, codec.num_levels + 1):
        for dtype in dtypes:
            whole = codec.decode(stream, chunk, levels=levels, dtype=dtype)
            for heads in shares(tiny.spec.num_kv_heads):
                own = codec.decode_heads(stream, chunk, heads, levels=levels, dtype=dtype)
                assert own.num_kv_heads == len(heads)
                assert equal(own, whole.of_heads(heads)), (levels, dtype, heads)


def test_layers_that_lack_tokens(tiny: Any) -> None:
    codec = KltCodec(tiny.spec, make_profile(tiny.spec))
    chunk = tiny.chunk(codec.profile_id, 48, 1)
    cache = tiny.cache(chunk, torch.float32)
    lacking = (chunk.start + 7,) + (chunk.start,) * (tiny.spec.num_layers - 1)
    cache = KVCache(cache.keys, cache.values, cache.start, lacking)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    whole = codec.decode(stream, chunk, levels=LEVELS)
    own = codec.decode_heads(stream, chunk, range(1), levels=LEVELS, dtype=torch.float32)
    assert equal(own, whole.of_heads(range(1)))
    assert not own.keys[0, :7].any()


@pytest.mark.parametrize("heads", [range(0), range(1, 99), range(-1, 1), range(0, 2, 2)])
def test_heads_that_there_are_not(codec: Codec, tiny: Any, heads: range) -> None:
    chunk = tiny.chunk(codec.profile_id, 48, 0)
    stream = Bitstream.parse(codec.encode(chunk, tiny.cache(chunk, torch.float32)))
    with pytest.raises(MismatchError):
        codec.decode_heads(stream, chunk, heads, levels=1, dtype=torch.float32)


def test_columns_of_all_shares_are_the_columns_of_the_whole() -> None:
    spec = ModelSpec(5, 4, 8, 100, (None,) * 5, (None,) * 5, b"m" * 16)
    found = [
        column
        for heads in (range(1), range(1, 3), range(3, 4))
        for whole in bands(spec, (1, 4))
        for band in share_of(whole, spec, heads)
        for column in range(band.columns.start, band.columns.stop)
    ]
    assert sorted(found) == list(range(2 * 3 * 4 * 8))
