"""Joins on the worker's side: pieces out of a place, into vLLM's blocks, moved and repaired."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kdn.blend.pieces import Join, Piece
from kdn.blend.seams import Seams
from kdn.cache.keys import Namespace, TokenIds, cut, token_ids
from kdn.cache.spec import RopeSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.delivery.known import Known
from kdn.engines.vllm.join_lookup import KnownJoin, Wanted, know_join, with_join
from kdn.engines.vllm.joined_load import good_until
from kdn.engines.vllm.layout import Heads, PagedCache
from kdn.engines.vllm.loader import EndedLoad, Loader
from kdn.engines.vllm.messages import LoadOrder
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.shared import SharedSession
from kdn.session.delivered import COMPUTED, Grade
from kdn.session.seams import share_seams
from tests.blend.test_seams import random_seams
from tests.codec.conftest import Tiny

TURN = RopeSpec(tuple(100.0 ** (-i / 4) for i in range(4)))
SPEC = replace(Tiny.with_layers(4).spec, ropes=(TURN,) * 4)
HEAD, BLOCK, BLOCKS = 21, 16, 80
LENGTHS = (70, 301, 43)
BLOCK_IDS = tuple(reversed(range(60)))
SEAMS = random_seams(model=SPEC.fingerprint)


@contextmanager
def session_at(folder: Path, **settings: Any) -> Iterator[SharedSession]:
    given = {"url": str(folder / "place"), "codec": "exact", "spool_bytes": 0, "host_bytes": 0}
    parsed = Settings.parse({**given, **settings}).session
    shared = SharedSession.acquire(parsed, SPEC, torch.float32)
    try:
        yield shared
    finally:
        shared.release()


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedSession]:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    with session_at(tmp_path) as shared:
        yield shared


def prompt() -> TokenIds:
    """A head, three pieces, and something behind them."""
    return token_ids(np.random.default_rng(1).integers(0, 1000, HEAD + sum(LENGTHS) + 17))


def ranges() -> tuple[tuple[int, int], ...]:
    ends = np.cumsum([HEAD, *LENGTHS]).tolist()
    return tuple(itertools.pairwise(ends))


def pieces(space: Namespace) -> list[Piece]:
    ids = prompt()
    found = []
    for start, end in ranges():
        tokens = np.concatenate([ids[:HEAD], ids[start:end]])
        found.append(Piece(tokens, HEAD, tuple(cut(tokens, space, whole=True))))
    return found


def learned(piece: Piece) -> KVCache:
    generator = torch.Generator().manual_seed(len(piece.tokens))
    shape = (SPEC.num_layers, len(piece.tokens), SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return KVCache(rope.redo(keys, SPEC, 0), values)


def publish(shared: SharedSession, some: Sequence[Piece]) -> None:
    count = shared.session.publisher.counts.published
    for piece in some:
        cache = learned(piece)
        for chunk in piece.chunks:
            shared.publish(chunk, cache.slice(chunk.start, chunk.end), None, 0.0)
            count += 1
    until_s = time.monotonic() + 30
    while shared.session.publisher.counts.published < count:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def know(shared: SharedSession, plain: Known | None = None, **more: Any) -> Known:
    wanted = Wanted(**{"pieces": ranges(), "repaired": False, "join_kld": 1.0, "enough_kld": 0.0,
                       "limit_s": 20.0, **more})  # fmt: skip

    async def ask() -> Known:
        session = shared.session
        found = await know_join(session, shared.seams, prompt(), session.namespace, wanted)
        return with_join(plain or Known(), found)

    return shared.submit(ask).result(30)


def paged_cache(layout: str, held: Heads | None = None) -> PagedCache:
    held, dim = held or Heads(0, SPEC.num_kv_heads), SPEC.head_dim
    heads = held.count
    shape = (BLOCKS, heads, BLOCK, 2 * dim) if layout == "cpu" else (2, BLOCKS, BLOCK, heads, dim)
    layers = [torch.full(shape, 7.0) for _ in range(SPEC.num_layers)]
    return PagedCache(layers, SPEC, held, BLOCK)


def order_of(known: Known, start: int = 0, end: int | None = None) -> LoadOrder:
    assert isinstance(known, KnownJoin)
    assert known.join is not None
    end = known.join.num_tokens // BLOCK * BLOCK if end is None else end
    chunks = known.parts.chunks
    return LoadOrder(
        "r", chunks, known.parts.heads(chunks), start, end, BLOCK_IDS, 30.0, 0.0,
        join=known.order(),
    )  # fmt: skip


def load(
    shared: SharedSession, paged: PagedCache, order: LoadOrder
) -> tuple[EndedLoad, Counter[str]]:
    counts: Counter[str] = Counter()
    loader = Loader(shared, paged, counts, 1.0)
    loader.begin(order)
    until_s = time.monotonic() + 30
    while not (ended := loader.take_ended()):
        assert time.monotonic() < until_s
        loader.wait(0.1)
    return ended[0], counts


def expected(join: Join, seams: Seams | None) -> KVCache:
    parts = []
    for number, (piece, start) in enumerate(zip(join.pieces, join.starts, strict=True)):
        cache, at = learned(piece), start - piece.head
        if number and seams is not None:
            cache = seams.repair(cache, SPEC, at)
        elif number:
            rope.move(cache.keys, SPEC, at)
        first = piece.head if number else 0
        parts.append((cache.keys[:, first:], cache.values[:, first:]))
    keys, values = (torch.cat([part[side] for part in parts], 1) for side in (0, 1))
    return KVCache(keys, values)


def check(paged: PagedCache, order: LoadOrder, join: Join, seams: Seams | None) -> None:
    found = paged.read(order.start, order.end, BLOCK_IDS)
    wanted = expected(join, seams).slice(order.start, order.end).of_heads(paged.heads.range)
    assert (found.keys - wanted.keys).abs().max() < 1e-4
    assert (found.values - wanted.values).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["cpu", "rows"])
@pytest.mark.parametrize("start", [0, 6 * BLOCK])
@pytest.mark.parametrize("repaired", [False, True])
def test_a_join_in_its_blocks(
    shared: SharedSession, layout: str, start: int, repaired: bool
) -> None:
    publish(shared, pieces(shared.session.namespace))
    if repaired:
        shared.submit(lambda: share_seams(shared.session, SEAMS)).result(30)
    known = know(shared, repaired=repaired)
    order, paged = order_of(known, start), paged_cache(layout)
    ended, counts = load(shared, paged, order)
    assert (ended.good_until, ended.exact_until) == (order.end, start)
    assert counts["joined_tokens"] == order.end - start
    assert counts["moved_tokens"] == order.end - max(start, HEAD + LENGTHS[0])
    assert counts["repaired_tokens"] == (counts["moved_tokens"] if repaired else 0)
    join = Join(tuple(pieces(shared.session.namespace)))
    check(paged, order, join, SEAMS if repaired else None)
    if start:  # what was there already stays as it is
        assert (paged.read(0, start, BLOCK_IDS).keys == 7.0).all()


@pytest.mark.parametrize("layout", ["cpu", "rows"])
def test_a_rank_has_its_own_heads(shared: SharedSession, layout: str) -> None:
    publish(shared, pieces(shared.session.namespace))
    shared.submit(lambda: share_seams(shared.session, SEAMS)).result(30)
    order, paged = order_of(know(shared, repaired=True)), paged_cache(layout, Heads(1, 1))
    ended, _ = load(shared, paged, order)
    assert ended.good_until == order.end
    check(paged, order, Join(tuple(pieces(shared.session.namespace))), SEAMS)


def test_values_that_this_host_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are moved and repaired like what is decoded."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "host").mkdir()
    own = {"host_bytes": 1 << 26, "host_folder": str(tmp_path / "host")}
    with session_at(tmp_path, **own) as shared:
        some = pieces(shared.session.namespace)
        for piece in some:
            cache = learned(piece)
            for chunk in piece.chunks:
                shared.session.keep(chunk, cache.slice(chunk.start, chunk.end), COMPUTED)
        shared.submit(lambda: share_seams(shared.session, SEAMS)).result(30)
        host = shared.session.host
        assert host is not None
        until_s = time.monotonic() + 30
        while not all(host.has(chunk, 0.0) for piece in some for chunk in piece.chunks):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        known = know(shared, repaired=True)
        order, paged = order_of(known), paged_cache("cpu")
        assert set(order.heads) == {b""}
        ended, counts = load(shared, paged, order)
        assert ended.good_until == order.end
        assert counts["fetched_bytes"] == 0
        check(paged, order, Join(tuple(some)), SEAMS)


def test_what_is_lost_since_is_computed(shared: SharedSession) -> None:
    """From the first block on that lacks a token."""
    some = pieces(shared.session.namespace)
    publish(shared, some)
    known = know(shared)
    lost = some[1].chunks[1]
    [store] = [one.store for one in shared.session.places.endpoints]
    shared.submit(lambda: store.delete(lost.key)).result(30)
    order, paged = replace(order_of(known), deadline_s=0.5), paged_cache("cpu")
    ended, counts = load(shared, paged, order)
    first = HEAD + LENGTHS[0] + (256 - HEAD)  # of the second piece, what its first chunk holds
    assert ended.good_until == first // BLOCK * BLOCK
    assert counts["joined_tokens"] == ended.good_until
    check(paged, replace(order, end=ended.good_until), Join(tuple(some)), None)


def test_other_seams_than_were_ordered(shared: SharedSession) -> None:
    publish(shared, pieces(shared.session.namespace))
    shared.submit(lambda: share_seams(shared.session, SEAMS)).result(30)
    known = know(shared, repaired=True)
    order, paged = order_of(known), paged_cache("cpu")
    assert order.join is not None
    other = replace(order, join=replace(order.join, seams=b"other"))
    ended, _ = load(shared, paged, other)
    assert ended.good_until == 0
    assert (paged.read(0, order.end, BLOCK_IDS).keys == 7.0).all()


def test_the_first_unknown_piece_ends_a_join(shared: SharedSession) -> None:
    some = pieces(shared.session.namespace)
    publish(shared, some[:2])
    known = know(shared)
    assert isinstance(known, KnownJoin)
    assert known.join is not None
    assert known.join.num_tokens == HEAD + sum(LENGTHS[:2])


def test_one_piece_is_an_ordinary_beginning(shared: SharedSession) -> None:
    """All of it, exact, and for everybody."""
    some = pieces(shared.session.namespace)
    publish(shared, [some[0], some[2]])
    known = know(shared)
    assert not isinstance(known, KnownJoin)
    assert known.end == HEAD + LENGTHS[0]
    assert all(known.heads(known.chunks))


def test_changed_by_one_token(shared: SharedSession) -> None:
    some = pieces(shared.session.namespace)
    publish(shared, [some[1]])
    assert know(shared) == Known()


def test_pieces_of_another_salt(shared: SharedSession) -> None:
    space = shared.session.namespace.with_salt(b"of another")
    publish(shared, pieces(space))
    assert know(shared) == Known()


@pytest.mark.parametrize(
    ("seams", "join_kld", "why"),
    [(None, 1.0, "no seams"), (SEAMS, 0.05, "0.1 nats"), (replace(SEAMS, expected={}), 1.0, "inf")],
)
def test_no_seams_that_are_good_enough(
    shared: SharedSession, seams: Seams | None, join_kld: float, why: str
) -> None:
    publish(shared, pieces(shared.session.namespace))
    if seams is not None:
        shared.submit(lambda: share_seams(shared.session, seams)).result(30)
    known = know(shared, repaired=True, join_kld=join_kld)
    assert isinstance(known, KnownJoin)
    assert known.join is None
    assert why in known.refusal


def test_what_is_known_as_it_is_stays_known(shared: SharedSession) -> None:
    publish(shared, pieces(shared.session.namespace))
    plain = Known(tuple(cut(prompt()[:256], shared.session.namespace)))
    known = know(shared, plain=plain)
    assert isinstance(known, KnownJoin)
    assert known.chunks == plain.chunks
    assert known.join is not None


def test_seams_that_come_too_late_are_there_the_next_time(shared: SharedSession) -> None:
    shared.submit(lambda: share_seams(shared.session, SEAMS)).result(30)
    source = shared.seams
    assert shared.submit(lambda: source.find(0.0)).result(30) is None
    until_s = time.monotonic() + 30
    while (found := shared.submit(lambda: source.find(0.0)).result(30)) is None:
        assert time.monotonic() < until_s
    assert found.kld == SEAMS.expected[0.0][1]
    assert shared.submit(lambda: source.find(0.0)).result(30) is found


def test_nobody_is_asked_again_and_again_for_seams(shared: SharedSession) -> None:
    source = shared.seams
    assert shared.submit(lambda: source.find(20.0)).result(30) is None
    shared.submit(lambda: share_seams(shared.session, SEAMS)).result(30)
    assert shared.submit(lambda: source.find(20.0)).result(30) is None
    source._again_s = 0.0
    assert shared.submit(lambda: source.find(20.0)).result(30) is not None


def test_what_nobody_expects_costs_no_more_than_the_join(shared: SharedSession) -> None:
    class Broken:
        async def find(self, limit_s: float) -> None:
            raise RuntimeError("a mistake")

    session, source = shared.session, cast(Any, Broken())
    publish(shared, pieces(session.namespace))
    wanted = Wanted(ranges(), True, 1.0, 0.0, 20.0)

    async def ask() -> KnownJoin:
        return await know_join(session, source, prompt(), session.namespace, wanted)

    found = shared.submit(ask).result(30)
    assert found.join is None
    assert "a mistake" in found.refusal


def test_a_long_piece_before_a_short_one_is_not_the_end() -> None:
    """Where coarse chunks are not used, those that are good enough for the middle are, wherever
    they were learned."""
    space = Namespace(b"m" * 16, b"p" * 16)
    ids = np.random.default_rng(1).integers(0, 1000, 2000)
    ends = [HEAD, HEAD + 700, HEAD + 700 + 300]
    some = []
    for start, end in itertools.pairwise(ends):
        tokens = token_ids(np.concatenate([ids[:HEAD], ids[start:end]]))
        some.append(Piece(tokens, HEAD, tuple(cut(tokens, space, whole=True))))
    join = Join(tuple(some))
    assert join.chunks[2].end > join.chunks[-1].end
    end = join.num_tokens // BLOCK * BLOCK
    order = LoadOrder("r", join.chunks, (), 0, end, BLOCK_IDS, 1.0, 1.0, strict=True)
    middle, last = Grade(1.5, False, 1), Grade(0.2, False, 1)
    grades = [*[middle] * (len(join.chunks) - 2), last, last]
    got: Any = SimpleNamespace(chunks=join.chunks, grades=grades)
    assert good_until(order, join, got) == end
    got.grades = [middle] * len(join.chunks)
    assert good_until(order, join, got) < end
