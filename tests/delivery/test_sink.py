"""Chunks into an engine's memory, whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.codec.threads import num_cores
from kdn.delivery.sink import Arrival, RowsSink
from kdn.errors import ChecksumError, MismatchError, UnsupportedError
from tests.codec.conftest import Tiny
from tests.codec.klt_profile import make_profile

TINY = Tiny.with_layers(4)
SPEC = TINY.spec
SLOTS = 600


@pytest.fixture(params=["exact", "klt"])
def codec(request: pytest.FixtureRequest) -> Codec:
    if request.param == "exact":
        return ExactCodec(SPEC)
    return KltCodec(SPEC, make_profile(SPEC))


def memory(dtype: torch.dtype = torch.float16) -> TokenRows:
    shape = (SPEC.num_layers, SLOTS, SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = (torch.full(shape, 7.0, dtype=dtype) for _ in range(2))
    return TokenRows(list(keys), list(values), range(SPEC.num_kv_heads))


def slots_of(chunk: Chunk) -> np.ndarray:
    return SLOTS - 1 - np.arange(chunk.start, chunk.end)


def arrival(codec: Codec, index: int, *, improves: bool = False, absent: int = 0) -> Arrival:
    chunk = TINY.chunk(codec.profile_id, 32, index)
    cache = TINY.cache(chunk, absences=(absent,) * SPEC.num_layers if absent else ())
    stream = Bitstream.parse(codec.encode(chunk, cache))
    return Arrival(chunk, stream, codec.num_levels, improves)


def spoilt(one: Arrival) -> Arrival:
    """The same with a bit of its last section turned."""
    header = one.stream.header
    data = bytearray(header.stream_bytes)
    for level in range(header.info.num_levels):
        start = header.level_start(level)
        whole = one.stream._levels[level]
        data[start : start + len(whole)] = whole
    data[-1] ^= 1
    return one._replace(stream=Bitstream.of(header, data))


def expected(codec: Codec, one: Arrival) -> KVCache:
    return codec.decode(one.stream, one.chunk, dtype=torch.float16)


def test_chunks_arrive_in_their_slots(codec: Codec) -> None:
    rows = memory()
    sink = RowsSink(codec, rows, slots_of)
    assert sink.batch_chunks == num_cores()
    batch = [arrival(codec, 0), arrival(codec, 1)]
    assert sink.decode(batch) == [None, None]
    for one in batch:
        wanted = expected(codec, one)
        for layer in range(SPEC.num_layers):
            assert torch.equal(rows.keys[layer][slots_of(one.chunk)], wanted.keys[layer])
            assert torch.equal(rows.values[layer][slots_of(one.chunk)], wanted.values[layer])
    assert torch.all(rows.keys[2][: SLOTS - 288] == 7)


@pytest.mark.parametrize("improves", [False, True])
def test_a_chunk_that_fails_leaves_memory_as_it_was(codec: Codec, improves: bool) -> None:
    rows = memory()
    sink = RowsSink(codec, rows, slots_of)
    broken = spoilt(arrival(codec, 0, improves=improves))
    found = sink.decode([broken, arrival(codec, 1)])
    assert isinstance(found[0], ChecksumError)
    assert found[1] is None
    assert torch.all(rows.keys[0][slots_of(broken.chunk)] == 7)
    assert not torch.any(rows.keys[0][SLOTS - 288 : SLOTS - 256] == 7)


def test_slots_that_are_not_there_are_an_error(codec: Codec) -> None:
    rows = memory()
    (error,) = RowsSink(codec, rows, lambda c: slots_of(c) + 1).decode([arrival(codec, 0)])
    assert isinstance(error, MismatchError)
    assert all(torch.all(side == 7) for side in rows.keys)


def test_memory_cannot_lack_tokens_but_need_not_want_them(codec: Codec) -> None:
    rows, one = memory(), arrival(codec, 0, absent=5)
    (error,) = RowsSink(codec, rows, slots_of).decode([one])
    assert isinstance(error, UnsupportedError)

    def later(chunk: Chunk) -> np.ndarray:
        return np.where(np.arange(chunk.num_tokens) < 5, -1, slots_of(chunk))

    assert RowsSink(codec, rows, later).decode([one]) == [None]
    assert torch.equal(rows.keys[0][later(one.chunk)[5:]], expected(codec, one).keys[0, 5:])


def test_computed_values_are_copied(codec: Codec) -> None:
    rows, chunk = memory(), TINY.chunk(codec.profile_id, 32, 1)
    cache = TINY.cache(chunk)
    wanted = cache.keys.clone()
    RowsSink(codec, rows, slots_of).write(chunk, cache)
    cache.keys.zero_()
    assert torch.equal(rows.keys[3][slots_of(chunk)], wanted[3])
