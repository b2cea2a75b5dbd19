"""The three verbs over real places: what is known, what is delivered, and what may be published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.credentials import Credentials
from kdn.delivery.publish import Admission, Values
from kdn.delivery.sink import HostSink
from kdn.session.delivered import COMPUTED, Delivered, Grade, may_be_published
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from tests.codec.conftest import Tiny
from tests.node.harness import run

TINY = Tiny.with_layers(4)
TOKENS = [(i * i + i // 7) % 250 for i in range(700)]


def settings(place: Path, **more: Any) -> SessionSettings:
    return SessionSettings((place,), codec="exact", **{"host_bytes": 0, **more})


def with_session(own: SessionSettings, test: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
    async def work() -> Any:
        async with Session(own, TINY.spec, torch.float32) as session:
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
    assert await session.publisher.flush(10.0)
    return chunks


async def delivered(
    session: Session, chunks: Sequence[Chunk], **more: Any
) -> tuple[Delivered, KVCache]:
    sink = HostSink.of(session.codec, chunks, torch.float32)
    return await session.deliver(chunks, sink, **more), sink.cache


def test_what_one_session_published_another_delivers(tmp_path: Path) -> None:
    with_session(settings(tmp_path), publish_all)

    async def test(session: Session) -> None:
        known = await session.know([*TOKENS, 1, 2, 3])
        assert known.end == 688
        got, cache = await delivered(session, known.chunks, known=known)
        assert (got.num_ready, got.ready_until, got.exact_until) == (3, 688, None)
        assert torch.equal(cache.keys, values(known.chunks).keys)
        assert got.num_loaded_tokens == 688
        home = await session.know_home(known.chunks)
        assert [chunk.key for chunk in home.chunks] == [chunk.key for chunk in known.chunks]

    with_session(settings(tmp_path), test)


def test_another_secret_finds_nothing(tmp_path: Path) -> None:
    with_session(settings(tmp_path), publish_all)

    async def test(session: Session) -> None:
        assert (await session.know(TOKENS)).end == 0

    with_session(settings(tmp_path, credentials=Credentials(secret=b"mine")), test)


def test_what_the_host_holds_is_neither_asked_for_nor_fetched(tmp_path: Path) -> None:
    own = settings(tmp_path / "data", host_bytes=1 << 24, host_folder=tmp_path / "host")
    (tmp_path / "host").mkdir(mode=0o700)

    async def test(session: Session) -> None:
        chunks = await publish_all(session)
        every = values(chunks)
        for chunk in chunks[:2]:
            session.keep(chunk, every.slice(chunk.start, chunk.end), COMPUTED)
        assert session.host is not None
        async with asyncio.timeout(5.0):
            while not all(session.host.has(chunk, 0.0) for chunk in chunks[:2]):
                await asyncio.sleep(0.01)
        known = await session.know(TOKENS)
        assert (known.end, len(known.streams)) == (688, 1)
        got, cache = await delivered(session, known.chunks, known=known)
        assert (len(got.held), got.num_ready, got.exact_until) == (2, 3, None)
        assert torch.equal(cache.values, every.values)
        # What is gone since it was known is looked up after all.
        for file in (tmp_path / "host").rglob("*.float32"):
            file.unlink()
        got, cache = await delivered(session, known.chunks, known=known)
        assert (len(got.held), got.num_ready) == (0, 3)
        assert torch.equal(cache.keys, every.keys)

    with_session(own, test)


def test_nothing_is_published_on_top_of_losses(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        chunks = cut(TOKENS, session.namespace)
        source = Values(values(chunks))
        said = [session.publish(chunk, source, exact_until=512) for chunk in chunks]
        assert said == [Admission.QUEUED, Admission.QUEUED, Admission.LOSSY]
        assert await session.publisher.flush(10.0)
        assert (await session.know(TOKENS)).end == 512

    with_session(settings(tmp_path), test)


def test_no_time_left_delivers_nothing(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        chunks = await publish_all(session)
        got, _ = await delivered(session, chunks, deadline_s=0.0)
        assert (got.num_ready, got.ready_until, got.levels) == (0, 0, (0, 0, 0))
        assert got.exact_until is None

    with_session(settings(tmp_path), test)


KLDS = (0.02, 0.01, 0.0)
EXACT, COARSE = Grade.of_levels(3, KLDS), Grade.of_levels(2, KLDS)


@pytest.mark.parametrize(
    ("grades", "ready", "exact_until", "publishable"),
    [
        ([], 0, None, [True, True, True]),
        ([EXACT], 1, None, [True, True, True]),
        ([EXACT, COARSE], 2, 256, [True, False, False]),
        ([COARSE, EXACT], 2, 0, [False, False, False]),
    ],
)
def test_a_delivery_says_what_is_ready_and_what_may_be_published_on_top(
    grades: list[Grade], ready: int, exact_until: int | None, publishable: list[bool]
) -> None:
    chunks = tuple(cut(TOKENS, Namespace(b"m", b"p")))
    got = Delivered(chunks, tuple(grades), None, KLDS)
    assert (got.num_ready, got.exact_until) == (ready, exact_until)
    assert got.ready_until == 256 * ready
    assert [may_be_published(chunk, got.exact_until) for chunk in chunks] == publishable


def test_what_was_held_is_told_level_by_level() -> None:
    """Also where the host held a part of the levels, or values that were decoded from a part."""
    chunks = tuple(cut(TOKENS, Namespace(b"m", b"p")))
    held = (COARSE, Grade.of_values(0.02, False, KLDS))
    got = Delivered(chunks, held, None, KLDS)
    assert (got.levels, got.num_loaded_tokens) == ((2, 1, 0), 512)
    assert Grade.of_values(0.0, True, KLDS) == EXACT  # computed by another engine of this host


def test_coarse_chunks_do_not_count_where_that_is_said() -> None:
    chunks = tuple(cut(TOKENS, Namespace(b"m", b"p")))
    klds = (0.05, 0.01, 0.001, 0.0)
    got = Delivered(chunks, tuple(Grade.of_levels(n, klds) for n in (2, 1, 3)), None, klds)
    assert got.good_until(688, 0.0) == 0
    assert got.good_until(688, 0.01) == 256
    assert got.good_until(688, 0.1) == 256  # the last tokens count more
    assert got.good_until(688, 0.3) == 688
