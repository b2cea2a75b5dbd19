"""Chunks on a GPU are encoded a few at a time; who lent memory gets it back; streams are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.delivery import publish
from kdn.delivery.publish import Admission, Job, Publisher
from kdn.errors import KdnError, UnsupportedError
from kdn.store.base import Store
from tests.delivery.publishing import publishing
from tests.delivery.world import World, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


@dataclass
class Loan:
    cache: KVCache
    times_back: int = 0

    def read(self, chunk: Chunk) -> KVCache:
        return self.cache

    def give_back(self) -> None:
        self.times_back += 1


def batches_of(world: World, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Where the chunks start that were encoded together, from now on."""
    encode, seen = world.codec.encode_batch, list[list[int]]()

    def watched(items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        seen.append([chunk.start for chunk, _ in items])
        return encode(items)

    monkeypatch.setattr(world.codec, "encode_batch", watched)
    return seen


@pytest.mark.parametrize(
    ("on_gpu", "expected"), [(True, [[0, 256, 512], [768]]), (False, [[0], [256], [512], [768]])]
)
def test_what_is_on_a_gpu_is_encoded_together(
    world: World, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(publish, "GPU_BATCH", 3)
    monkeypatch.setattr(Job, "is_on_gpu", on_gpu)
    seen, loans = batches_of(world, monkeypatch), [Loan(cache) for cache in world.caches]

    async def test(publisher: Publisher, store: Store) -> None:
        for chunk, loan in zip(world.chunks, loans, strict=True):
            assert publisher.publish(chunk, loan) is Admission.QUEUED
        assert [loan.times_back for loan in loans] == [0] * 4
        assert await publisher.flush(10.0)

    assert publishing(world, lambda: world.store([]), test).counts.published == 4
    assert seen == expected
    assert [loan.times_back for loan in loans] == [1] * 4


def test_one_of_a_batch_that_fails_costs_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it refused, or be it that all fail together because of it."""
    monkeypatch.setattr(Job, "is_on_gpu", True)
    encode, loans = world.codec.encode, [Loan(cache) for cache in world.caches]

    def broken(chunk: Chunk, cache: KVCache) -> bytes:
        if chunk is world.chunks[1]:
            raise UnsupportedError("values that no profile knows")
        if chunk is world.chunks[2]:
            raise RuntimeError("out of memory")
        return encode(chunk, cache)

    monkeypatch.setattr(world.codec, "encode", broken)

    async def test(publisher: Publisher, store: Store) -> None:
        for chunk, loan in zip(world.chunks, loans, strict=True):
            publisher.publish(chunk, loan)
        assert await publisher.flush(10.0)
        found = await store.lookup([chunk.key for chunk in world.chunks])
        assert [entry is not None for entry in found] == [True, False, False, True]
        assert publisher.queued_bytes == 0

    counts = publishing(world, lambda: world.store([]), test).counts
    assert (counts.published, counts.refused, counts.faults) == (2, 2, 1)
    assert [loan.times_back for loan in loans] == [1] * 4


def test_what_is_encoded_is_shown(world: World, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[tuple[int, bytes]] = []

    def show(chunk: Chunk, data: bytes) -> None:
        shown.append((chunk.start, data))
        if chunk.start == 256:
            raise OSError("no room")  # its own affair

    async def test(publisher: Publisher, store: Store) -> None:
        for chunk, cache in zip(world.chunks, world.caches, strict=True):
            publisher.publish(chunk, Loan(cache))
        assert await publisher.flush(10.0)

    counts = publishing(world, lambda: world.store([]), test, on_encoded=show).counts
    assert counts.published == 4
    assert shown == [(c.start, s) for c, s in zip(world.chunks, world.streams, strict=True)]
    assert "no room" in caplog.text


def test_encoding_on_a_gpu_rests_unless_somebody_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an engine beside it hardly notices."""
    monkeypatch.setattr(publish, "GPU_BATCH", 1)
    monkeypatch.setattr(publish, "GPU_SHARE", 1e-9)
    monkeypatch.setattr(publish, "MAX_REST_S", 3600.0)
    monkeypatch.setattr(Job, "is_on_gpu", True)
    seen = batches_of(world, monkeypatch)

    async def test(publisher: Publisher, store: Store) -> None:
        for chunk, cache in zip(world.chunks, world.caches, strict=True):
            publisher.publish(chunk, Loan(cache))
        while publisher.counts.published < 1:
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(seen) == 1
        assert await publisher.flush(10.0)
        assert len(seen) == 4

    publishing(world, lambda: world.store([]), test)
