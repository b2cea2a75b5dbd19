"""What is published with fewer levels: as good as before for those who ask for no more, and missing
for those who do, until one of them has published it whole."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from xxhash import xxh3_64_intdigest

from kdn.cache.keys import Chunk, cut
from kdn.cache.tensors import KVCache
from kdn.codec.header import Header
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.known import Known
from kdn.delivery.publish import Admission, Values
from kdn.delivery.sink import HostSink
from kdn.errors import UnsupportedError
from kdn.session.delivered import Delivered
from kdn.session.exporting import verify
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from kdn.store.base import Entry, Store
from tests.codec.conftest import Tiny
from tests.delivery.world import Proxy
from tests.node.harness import Running, run, with_node
from tests.session.calibrated import profile_of

TINY = Tiny.with_layers(4)
TOKENS = [(i * i + i // 7) % 250 for i in range(700)]
MIDDLE = 0.00625
"""What three of four levels promise (tests/session/calibrated.py)."""
Test = Callable[[Session], Coroutine[Any, Any, Any]]


def with_session(place: Path | str, folder: Path, test: Test, stored: str | float = "exact") -> Any:
    profile = folder / "profile"
    profile.write_bytes(profile_of(TINY.spec).to_bytes())
    settings = SessionSettings(
        (place,), codec="klt", profile=profile, host_bytes=0, spool_bytes=0, stored_quality=stored
    )

    async def work() -> Any:
        async with Session(settings, TINY.spec, torch.float32) as session:
            return await test(session)

    return run(work())


def values(chunks: Sequence[Chunk]) -> KVCache:
    parts = [TINY.reseed(str(chunk.start)).cache(chunk, torch.float32) for chunk in chunks]
    keys, found = (
        torch.cat([getattr(one, name) for one in parts], 1) for name in ("keys", "values")
    )
    return KVCache(keys, found)


async def publish_all(session: Session) -> list[Chunk]:
    chunks = cut(TOKENS, session.namespace)
    for chunk in chunks:
        assert session.publish(chunk, Values(values(chunks)), exact_until=None) is Admission.QUEUED
    assert await session.publisher.flush(30.0)
    return chunks


async def delivered(
    session: Session, chunks: Sequence[Chunk], enough_kld: float, known: Known | None = None
) -> tuple[Delivered, KVCache]:
    sink = HostSink.of(session.codec, chunks, torch.float32)
    got = await session.deliver(chunks, sink, known=known, enough_kld=enough_kld, deadline_s=20.0)
    return got, sink.cache


async def stored(session: Session) -> list[tuple[int, int]]:
    """Of each chunk: levels that the place has, and levels of the stream."""
    store = session.places.publish_to.store
    found = []
    for entry in await store.lookup([c.key for c in cut(TOKENS, session.namespace)]):
        assert entry is not None
        span = await store.get(entry.key)
        assert span is not None
        header = Header.parse(span.data)
        verify(entry.key, entry.etag, bytes(span.data))  # as an export does
        assert header.stream_id == entry.etag
        assert len(span.data) == entry.size_bytes
        found.append((header.level_ends.index(entry.size_bytes) + 1, header.info.num_levels))
    return found


def test_as_good_as_before_for_those_who_ask_for_no_more(tmp_path: Path) -> None:
    caches: list[KVCache] = []

    async def test(session: Session) -> None:
        chunks = await publish_all(session)
        got, cache = await delivered(session, chunks, MIDDLE)
        assert got.levels == (3, 3, 3)
        assert got.exact_until == 0
        assert session.publish(chunks[2], Values(cache), exact_until=0) is Admission.LOSSY
        caches.append(cache)
        known = await session.know(TOKENS, enough_kld=MIDDLE)
        assert known.end == 688
        told, again = await delivered(session, chunks, MIDDLE, known)
        assert told.levels == (3, 3, 3)
        assert torch.equal(again.keys, cache.keys)
        assert await stored(session) == [(session.stored_levels(), 4)] * 3
        home = await session.know_home(chunks)
        assert len(home.chunks) == 3

    with_session(tmp_path / "whole", tmp_path, test)
    with_session(tmp_path / "less", tmp_path, test, stored=MIDDLE)
    whole, less = caches
    assert torch.equal(whole.keys, less.keys)
    assert torch.equal(whole.values, less.values)


def test_missing_for_those_who_ask_for_more_until_they_publish_it_whole(tmp_path: Path) -> None:
    with_session(tmp_path / "data", tmp_path, publish_all, stored=MIDDLE)

    async def test(session: Session) -> None:
        chunks = cut(TOKENS, session.namespace)
        for asked in (0.0, MIDDLE / 2):
            assert (await session.know(TOKENS, enough_kld=asked)).end == 0
            assert (await session.know_each(chunks, enough_kld=asked)).chunks == ()
            got, _ = await delivered(session, chunks, asked)
            assert (got.num_ready, got.levels) == (0, (0, 0, 0))
        assert len((await session.know_home(chunks)).chunks) == 0, "it would publish more"
        assert len((await session.know_home(chunks, MIDDLE)).chunks) == 3
        await publish_all(session)
        assert (session.publisher.counts.published, session.publisher.counts.replaced) == (3, 3)
        assert await stored(session) == [(4, 4)] * 3
        got, _ = await delivered(session, chunks, 0.0)
        assert (got.levels, got.exact_until) == ((4, 4, 4), None)

    with_session(tmp_path / "data", tmp_path, test)


def test_over_a_node(tmp_path: Path) -> None:
    """The same, where another publisher's values differ: its stream names the one it replaces."""

    async def less(session: Session) -> None:
        await publish_all(session)
        assert await stored(session) == [(3, 4)] * 3

    async def more(session: Session) -> None:
        chunks = cut(TOKENS, session.namespace)
        assert (await session.know(TOKENS)).end == 0
        own = values(chunks)
        own.keys[0] += 0.5
        for chunk in chunks:
            session.publish(chunk, Values(own), exact_until=None)
        assert await session.publisher.flush(30.0)
        assert session.publisher.counts.replaced == 3
        assert await stored(session) == [(4, 4)] * 3

    async def work(session_of: Any) -> None:
        async with Session(*session_of) as session:
            await (less if session.settings.stored_quality == MIDDLE else more)(session)

    async def test(node: Running) -> None:
        profile = tmp_path / "profile"
        profile.write_bytes(profile_of(TINY.spec).to_bytes())
        settings = SessionSettings(
            (node.url,), codec="klt", profile=profile, host_bytes=0, spool_bytes=0,
            stored_quality=MIDDLE,
        )  # fmt: skip
        await work((settings, TINY.spec, torch.float32))
        await work((replace(settings, stored_quality="exact"), TINY.spec, torch.float32))

    with_node(tmp_path / "node", test)


def test_who_would_store_no_more_replaces_nothing(tmp_path: Path) -> None:
    with_session(tmp_path / "data", tmp_path, publish_all, stored=MIDDLE)

    async def test(session: Session) -> None:
        assert (await session.know(TOKENS)).end == 0  # it wanted all levels
        await publish_all(session)
        assert session.publisher.counts.replaced == 0
        assert await stored(session) == [(3, 4)] * 3

    with_session(tmp_path / "data", tmp_path, test, stored=MIDDLE)


def test_a_quality_that_there_is_not_is_refused(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        with pytest.raises(UnsupportedError, match="quality"):
            session.stored_levels("best")
        assert [session.stored_levels(one) for one in ("exact", MIDDLE, 0.1)] == [4, 3, 1]

    with_session(tmp_path / "data", tmp_path, test)


def test_what_is_there_is_told_to_other_processes(tmp_path: Path) -> None:
    with_session(tmp_path / "data", tmp_path, publish_all, stored=MIDDLE)

    async def test(session: Session) -> None:
        known = await session.know(TOKENS, enough_kld=MIDDLE)
        heads = known.packed().heads(known.chunks)
        told = Known.of_heads(known.chunks, heads, session.codec)
        every = [one.assembly.stored for one in told.streams.values() if one]
        assert every == [3, 3, 3]
        assert told.size_bytes(4) == told.size_bytes(3) == known.size_bytes(3)
        got, _ = await delivered(session, known.chunks, MIDDLE, told)
        assert got.levels == (3, 3, 3)

    with_session(tmp_path / "data", tmp_path, test)


# places that are not what they say


class Claims(Proxy):
    """Says that it has more, or other sizes, than it has."""

    def __init__(self, store: Store, claim: Callable[[Entry, Header], int]) -> None:
        super().__init__(store)
        self._claim = claim

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        found = await super().lookup(keys, head_bytes=head_bytes)
        return [e and replace(e, size_bytes=self._claim(e, Header.parse(e.head))) for e in found]


@pytest.mark.parametrize(
    ("claim", "levels"),
    [
        (lambda entry, header: header.level_ends[3], 0),
        (lambda entry, header: entry.size_bytes - 1, 0),
        (lambda entry, header: 0, 0),
        (lambda entry, header: header.level_ends[1], 2),
    ],
    ids=["more", "within a level", "nothing", "less"],
)
def test_a_place_that_lies_about_sizes(tmp_path: Path, claim: Any, levels: int) -> None:
    """It ends in time, with right values or none."""
    with_session(tmp_path / "data", tmp_path, publish_all, stored=MIDDLE)

    async def test(session: Session) -> None:
        chunks = cut(TOKENS, session.namespace)
        honest, right = await delivered(session, chunks, 0.025)
        assert honest.levels == (2, 2, 2)
        store = session.places.publish_to.store
        places = replace(session.places, endpoints=Endpoints([Endpoint(Claims(store, claim))]))
        session.places = places
        got, cache = await delivered(session, chunks, 0.0 if levels == 0 else 0.025)
        assert 4 not in got.levels
        if levels:
            assert got.levels == (levels,) * 3
            assert torch.equal(cache.keys, right.keys)

    with_session(tmp_path / "data", tmp_path, test)


def test_cut_since_it_was_looked_up(tmp_path: Path) -> None:
    """What was known with four levels has three by now: enough for some, missing for others."""

    async def cut_all(session: Session, chunks: Sequence[Chunk]) -> None:
        store = session.places.publish_to.store
        for chunk in chunks:
            span = await store.get(chunk.key)
            assert span is not None
            short = bytes(span.data)[: Header.parse(span.data).level_ends[2]]
            await store.delete(chunk.key)
            checksum = xxh3_64_intdigest(short)
            await store.put(chunk.key, short, etag=span.entry.etag, checksum=checksum)

    async def test(session: Session) -> None:
        chunks = await publish_all(session)
        whole = await session.know(TOKENS)
        _, right = await delivered(session, chunks, MIDDLE, whole)
        before = await session.know(TOKENS)
        await cut_all(session, chunks)
        got, cache = await delivered(session, chunks, 0.0, before)
        assert got.exact_until is not None or got.num_ready == 0
        assert 4 not in got.levels
        got, cache = await delivered(session, chunks, MIDDLE, before)
        assert got.levels == (3, 3, 3)
        assert torch.equal(cache.keys, right.keys)

    with_session(tmp_path / "data", tmp_path, test)


def test_another_place_may_have_all_levels(tmp_path: Path) -> None:
    with_session(tmp_path / "less", tmp_path, publish_all, stored=MIDDLE)
    with_session(tmp_path / "more", tmp_path, publish_all)
    profile = tmp_path / "profile"

    async def work() -> None:
        settings = SessionSettings(
            (tmp_path / "less", tmp_path / "more"), codec="klt", profile=profile, host_bytes=0,
            spool_bytes=0,
        )  # fmt: skip
        async with Session(settings, TINY.spec, torch.float32) as session:
            chunks = cut(TOKENS, session.namespace)
            got, _ = await delivered(session, chunks, 0.0)
            assert (got.levels, got.exact_until) == ((4, 4, 4), None)
            got, _ = await delivered(session, chunks, MIDDLE)
            assert got.levels == (3, 3, 3)

    run(work())
