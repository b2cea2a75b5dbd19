"""A session on a host whose device decodes: its memory holds streams, which the session itself
keeps, and delivers before it asks any place."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import Chunk, cut
from kdn.cache.tensors import KVCache
from kdn.codec.klt import KltCodec
from kdn.delivery.publish import Values
from kdn.delivery.sink import HostSink
from kdn.session import keeper as keeper_module
from kdn.session import session as session_module
from kdn.session.delivered import COMPUTED, Delivered, Grade
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from tests.codec.conftest import Tiny
from tests.node.harness import run
from tests.session.calibrated import profile_of

TINY = Tiny.with_layers(4)
TOKENS = [(i * i + i // 7) % 250 for i in range(700)]
KLDS = (0.1, 0.025, 0.00625, 0.0015625)
GPU = torch.device("cuda")
Test = Callable[[Session], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def decoding_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some device; sinks are in main memory all the same."""
    monkeypatch.setattr(KltCodec, "decodes_on", lambda _, device: device == GPU)
    monkeypatch.setattr(keeper_module, "KEEP_AFTER_S", 0.0)


def with_session(
    folder: Path, test: Test, *, host: str = "host", device: torch.device = GPU
) -> None:
    folder.mkdir(exist_ok=True)
    profile = folder / "profile"
    profile.write_bytes(profile_of(TINY.spec).to_bytes())
    settings = SessionSettings(
        (folder / "data",), codec="klt", profile=profile, host_bytes=1 << 28,
        host_folder=folder / host,
    )  # fmt: skip

    async def work() -> None:
        async with Session(settings, TINY.spec, torch.float32, device=device) as session:
            await test(session)

    run(work())


def values(chunks: Sequence[Chunk]) -> KVCache:
    parts = [TINY.reseed(str(chunk.start)).cache(chunk, torch.float32) for chunk in chunks]
    return KVCache(
        torch.cat([one.keys for one in parts], 1), torch.cat([one.values for one in parts], 1)
    )


async def publish_all(session: Session) -> None:
    chunks = cut(TOKENS, session.namespace)
    for chunk in chunks:
        session.publish(chunk, Values(values(chunks)), exact_until=None)
    assert await session.publisher.flush(20.0)


async def held(session: Session, levels: Sequence[int]) -> None:
    """Soon."""
    chunks, streams = cut(TOKENS, session.namespace), session.streams
    assert streams is not None
    async with asyncio.timeout(10.0):
        while [streams.levels(chunk) for chunk in chunks] != list(levels):
            await asyncio.sleep(0.01)


async def delivered(session: Session, enough_kld: float) -> tuple[Delivered, KVCache]:
    known = await session.know(TOKENS, enough_kld=enough_kld)
    assert known.end == 688
    sink = HostSink.of(session.codec, known.chunks, torch.float32)
    got = await session.deliver(known.chunks, sink, known=known, enough_kld=enough_kld)
    return got, sink.cache


def test_what_was_published_is_held_with_all_levels(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        assert session.host is None  # so engines need not keep values
        await publish_all(session)
        await held(session, [4, 4, 4])
        exact, cache = await delivered(session, 0.0)
        assert exact.held == (Grade(KLDS[3], True, 4),) * 3
        assert (exact.result, exact.exact_until, exact.num_ready) == (None, None, 3)
        chunks = exact.chunks
        assert (cache.keys - values(chunks).keys).abs().max() < 0.1
        coarse, _ = await delivered(session, 0.01)
        assert coarse.held == (Grade(KLDS[2], False, 3),) * 3  # no more than is enough
        assert coarse.exact_until == 0

    with_session(tmp_path, test)


def test_what_is_held_needs_no_time_but_does_not_take_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose places are away gives a load no time, and gets what this host holds."""

    async def test(session: Session) -> None:
        await publish_all(session)
        await held(session, [4, 4, 4])
        chunks = cut(TOKENS, session.namespace)
        sink = HostSink.of(session.codec, chunks, torch.float32)
        got = await session.deliver(chunks, sink, deadline_s=0.0)
        assert (len(got.held), got.result, got.num_ready) == (3, None, 3)
        monkeypatch.setattr(session_module, "HELD_S", 0.0)
        late = await session.deliver(chunks, sink, deadline_s=0.0)
        assert (late.held, late.result, late.num_ready) == ((), None, 0)

    with_session(tmp_path, test)


def test_what_was_delivered_is_held_and_needs_no_place(tmp_path: Path) -> None:
    caches = {}

    async def load(session: Session) -> None:
        got, caches["fetched"] = await delivered(session, 0.01)
        assert (got.held, got.num_ready) == ((), 3)
        assert got.result is not None
        await held(session, got.result.levels)

    async def load_again(session: Session) -> None:
        got, caches["held"] = await delivered(session, 0.01)
        assert (len(got.held), got.result) == (3, None)

    with_session(tmp_path, publish_all, host="other")
    with_session(tmp_path, load)
    shutil.rmtree(tmp_path / "data")
    with_session(tmp_path, load_again)
    assert torch.equal(caches["held"].keys, caches["fetched"].keys)
    assert torch.equal(caches["held"].values, caches["fetched"].values)


def test_what_has_faded_is_fetched(tmp_path: Path) -> None:
    """And is held again, finer. So is what was damaged."""

    async def test(session: Session) -> None:
        await publish_all(session)
        await held(session, [4, 4, 4])
        assert session.streams is not None
        chunks = cut(TOKENS, session.namespace)
        first, second = [
            next((tmp_path / "host").rglob(f"{chunk.key.hex()}.stream")) for chunk in chunks[:2]
        ]
        with session.streams.opened(chunks[1:2], [4]) as [stream]:
            front = second.stat().st_size - stream.header.stream_bytes
            end = front + stream.level_end(0)
        with second.open("r+b") as file:
            file.truncate(end)
        got, _ = await delivered(session, 0.01)
        assert (len(got.held), got.num_ready) == (1, 3)
        assert got.levels[1] > 1
        await held(session, [4, got.levels[1], 4])
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
        got, _ = await delivered(session, 0.0)
        assert (len(got.held), got.num_ready) == (0, 3)
        await held(session, [4, 4, 4])

    with_session(tmp_path, test)


def test_a_named_folder_must_be_good(tmp_path: Path) -> None:
    (tmp_path / "host").write_bytes(b"")
    with pytest.raises((OSError, ExceptionGroup)):
        with_session(tmp_path, publish_all)


def test_in_main_memory_values_are_held(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        assert session.streams is None
        await publish_all(session)
        chunks = cut(TOKENS, session.namespace)
        assert session.host is not None
        assert not session.host.has(chunks[0], 1.0)  # the engine keeps them
        session.keep(chunks[0], values(chunks[:1]), COMPUTED)
        async with asyncio.timeout(10.0):
            while not session.host.has(chunks[0], 0.0):
                await asyncio.sleep(0.01)
        got, _ = await delivered(session, 0.01)
        assert got.held == (Grade(0.0, True, 4),)

    with_session(tmp_path, test, device=torch.device("cpu"))
