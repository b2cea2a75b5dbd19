"""The chunks of a join at all their places, in main memory and in an engine's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kdn.blend.pieces import Join, Piece
from kdn.blend.seams import Block, Seams
from kdn.cache.keys import Namespace, cut, token_ids
from kdn.cache.rows import TokenRows
from kdn.cache.spec import RopeSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.delivery.join_sink import JoinRowsSink, JoinSink
from kdn.delivery.sink import Arrival
from kdn.errors import KdnError, UnsupportedError
from tests.codec.conftest import Tiny
from tests.codec.klt_profile import make_profile

TURN = RopeSpec(tuple(100.0 ** (-i / 4) for i in range(4)))
SPEC = replace(Tiny.with_layers(4).spec, ropes=(TURN,) * 4)
HEAD = 7
EMPTY = 9.0


def piece(codec: Codec, own: int, seed: int) -> Piece:
    rng = np.random.default_rng(seed)
    tokens = token_ids([*range(HEAD), *rng.integers(0, 1000, own)])
    space = Namespace(SPEC.fingerprint, codec.profile_id)
    return Piece(tokens, HEAD, tuple(cut(tokens, space, whole=True)), f"piece {seed}")


def learned(one: Piece) -> KVCache:
    generator = torch.Generator().manual_seed(len(one.tokens))
    shape = (SPEC.num_layers, len(one.tokens), SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return KVCache(rope.redo(keys, SPEC, 0), values)


def some_seams() -> Seams:
    generator = torch.Generator().manual_seed(5)
    columns = SPEC.values_per_token // 2
    blocks = [
        Block(
            layers,
            torch.randn(columns, 3, generator=generator) / 10,
            torch.randn(3, columns, generator=generator) / 10,
            torch.randn(columns, generator=generator) / 10,
        )
        for layers in ((0, 2), (2, 4))
    ]
    return Seams(SPEC.fingerprint, blocks)


def arrivals(codec: Codec, join: Join, improves: bool = False) -> list[Arrival]:
    """Of each chunk once, also of a piece that the join has twice."""
    found: dict[bytes, Arrival] = {}
    for one in join.pieces:
        cache = learned(one)
        for chunk in one.chunks:
            data = codec.encode(chunk, cache.slice(chunk.start, chunk.end))
            found[chunk.key] = Arrival(chunk, Bitstream.parse(data), codec.num_levels, improves)
    return [found[chunk.key] for chunk in join.chunks]


def expected(codec: Codec, join: Join, seams: Seams | None) -> KVCache:
    """Piece by piece with the reference: decoded as learned, moved, repaired, without the head. How
    far a codec's own repair may be from that, its own tests say."""
    parts = []
    for number, (one, start) in enumerate(zip(join.pieces, join.starts, strict=True)):
        cache = KVCache.empty(4, len(one.tokens), SPEC.num_kv_heads, SPEC.head_dim)
        at = start - one.head
        own_repair = seams is not None and number > 0 and not codec.is_lossless
        decoder = codec.repaired(seams) if own_repair and seams else codec
        for arrival in arrivals(codec, Join((one,))):
            own = cache.slice(arrival.chunk.start, arrival.chunk.end)
            decoder.decode(arrival.stream, arrival.chunk, out=own)
        if number and seams is not None and not own_repair:
            cache = seams.repair(cache, SPEC, at)
        elif number:
            keys = rope.redo(rope.undo(cache.keys, SPEC, 0), SPEC, at)
            cache = KVCache(keys, cache.values, at)
        parts.append(cache.slice(start if number else 0, cache.end))
    keys, values = (torch.cat([getattr(p, side) for p in parts], 1) for side in ("keys", "values"))
    return KVCache(keys, values)


def memory(join: Join) -> KVCache:
    cache = KVCache.empty(4, join.num_tokens + 3, SPEC.num_kv_heads, SPEC.head_dim)
    cache.keys.fill_(EMPTY)
    cache.values.fill_(EMPTY)
    return cache


def same(found: KVCache, wanted: KVCache) -> None:
    assert (found.keys - wanted.keys).abs().max() < 2e-4
    assert (found.values - wanted.values).abs().max() < 2e-4


@pytest.fixture(params=["exact", "klt"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return ExactCodec(SPEC) if request.param == "exact" else KltCodec(SPEC, make_profile(SPEC))


@pytest.fixture
def join(codec: Codec) -> Join:
    """A first piece of one chunk and a bit, others that repeat, one of a single token."""
    first, second, third = piece(codec, 263, 1), piece(codec, 40, 2), piece(codec, 1, 3)
    return Join((first, second, third, second, first))


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("improves", [False, True])
def test_chunks_stand_at_all_their_places(
    codec: Codec, join: Join, repaired: bool, improves: bool
) -> None:
    seams = some_seams() if repaired else None
    cache = memory(join)
    sink = JoinSink(codec, codec.repaired(seams) if seams else None, join, cache)
    batch = arrivals(codec, join, improves)
    assert sink.decode(batch) == [None] * len(batch) == [None] * 4
    wanted = expected(codec, join, seams)
    same(cache.slice(0, join.num_tokens), wanted)
    first = len(join.pieces[0].tokens)
    assert torch.equal(cache.keys[:, :first], wanted.keys[:, :first]), "it stays bit by bit"
    assert bool((cache.keys[:, join.num_tokens :] == EMPTY).all())


@pytest.mark.parametrize("repaired", [False, True])
def test_rows_get_the_same(codec: Codec, join: Join, repaired: bool) -> None:
    seams = some_seams() if repaired else None
    slots = join.num_tokens + 2
    shape = (SPEC.num_layers, slots, SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = (torch.full(shape, EMPTY) for _ in range(2))
    rows = TokenRows(list(keys), list(values), range(SPEC.num_kv_heads))

    def backwards(start: int, end: int) -> np.ndarray:
        return slots - 1 - np.arange(start, end)

    sink = JoinRowsSink(codec, codec.repaired(seams) if seams else None, join, rows, backwards)
    batch = arrivals(codec, join)
    assert sink.decode(batch) == [None] * len(batch)
    found = KVCache(keys.flip(1)[:, :-2], values.flip(1)[:, :-2])
    same(found, expected(codec, join, seams))
    assert bool((keys[:, :2] == EMPTY).all())


@pytest.mark.parametrize("repaired", [False, True])
def test_values_as_learned_are_moved_and_repaired(join: Join, repaired: bool) -> None:
    codec = ExactCodec(SPEC)
    join = Join(tuple(replace(one, chunks=_named(one, codec)) for one in join.pieces))
    seams = some_seams() if repaired else None
    cache = memory(join)
    sink = JoinSink(codec, codec.repaired(seams) if seams else None, join, cache, seams=seams)
    for one in join.pieces:
        for chunk in one.chunks:
            sink.write(chunk, learned(one))
    same(cache.slice(0, join.num_tokens), expected(codec, join, seams))


def _named(one: Piece, codec: Codec) -> tuple:  # type: ignore[type-arg]
    return tuple(cut(one.tokens, Namespace(SPEC.fingerprint, codec.profile_id), whole=True))


def test_a_chunk_that_fails_leaves_what_was_there(codec: Codec, join: Join) -> None:
    cache = memory(join)
    sink = JoinSink(codec, None, join, cache)
    good = arrivals(codec, join)
    assert sink.decode(good) == [None] * 4
    before = cache.keys.clone()
    other = piece(codec, 41, 9)
    stream = arrivals(codec, Join((other,)))[0].stream
    wrong = [one._replace(stream=stream, improves=True) for one in good]
    assert all(isinstance(error, KdnError) for error in sink.decode(wrong))
    assert torch.equal(cache.keys, before)


def test_a_layer_that_lacks_tokens_cannot_be_joined(join: Join) -> None:
    codec = ExactCodec(SPEC)
    one = piece(codec, 20, 4)
    cache = learned(one)
    part = KVCache(cache.keys.clone(), cache.values.clone(), 0, (0, 0, 5, 0))
    part.keys[2, :5] = part.values[2, :5] = 0
    stream = Bitstream.parse(codec.encode(one.chunks[0], part))
    alone = Join((one,))
    sink = JoinSink(codec, None, alone, memory(alone))
    [error] = sink.decode([Arrival(one.chunks[0], stream, 1, False)])
    assert isinstance(error, UnsupportedError)
