"""Copies that are queued on a device: bounded, checked by another thread, and never lost silently.

On a CPU in the GPU's place: the copies are there at once, all else is the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdn.cache.keys import cut
from kdn.engines.vllm import staging as staging_module
from kdn.engines.vllm.layout import Heads, Layout, PagedCache
from kdn.engines.vllm.messages import SaveOrder, Step
from kdn.engines.vllm.saver import Saver
from kdn.engines.vllm.shared import SharedSession
from kdn.engines.vllm.staging import Staging
from kdn.engines.vllm.worker import WorkerSide
from tests.engines.vllm_working import (
    ANSWER_S,
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    SPACE,
    SPEC,
    TOKENS,
    load,
    values,
)

CHUNKS = tuple(cut(TOKENS, SPACE))  # two full ones, and a tail of 80 tokens
BLOCK_IDS = tuple(range(40, 60))


def paged_memory() -> PagedCache:
    layers = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    return PagedCache(layers, SPEC, Heads(0, HEADS), BLOCK, Layout.HEADS_FIRST)


class World:
    def __init__(
        self,
        shared: SharedSession,
        places: int = 8,
        changed: Callable[[], bool] = lambda: False,
        hand_over: Any = None,
    ) -> None:
        self.shared, self.paged = shared, paged_memory()
        place_bytes = 2 * LAYERS * 256 * HEADS * DIM * 4
        self.staging = Staging(self.paged, LAYERS, places * place_bytes + 1)
        assert self.staging.place_bytes == place_bytes
        self.worker = WorkerSide(
            shared, self.paged, lambda _: False, ANSWER_S, saver=self._saver(changed, hand_over)
        )
        self.cache = values(608)
        self.paged.write(self.cache, 0, 608, BLOCK_IDS)

    def _saver(
        self, changed: Callable[[], bool], hand_over: Any
    ) -> Callable[[Counter[str]], Saver]:
        return lambda counts: Saver(
            self.shared, self.paged, self.staging, lambda: changed, counts, hand_over
        )

    def save(self, chunks: tuple[Any, ...] = CHUNKS) -> None:
        order = SaveOrder("r", chunks, BLOCK_IDS)
        self.worker.begin(Step(saves=(order,), num_tokens=600))
        self.worker.save()

    def until(self, true: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 30
        while not true():
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def all_published(self, count: int) -> None:
        published = self.shared.session.publisher.counts
        self.until(lambda: published.published >= count)
        self.until(lambda: self.staging.num_free == len(self.staging))


def test_what_was_copied_is_published_and_loaded(shared: SharedSession) -> None:
    """From the copy: blocks may have other values a moment later."""
    held = threading.Event()
    world = World(shared, changed=lambda: not held.wait(30))
    world.save()
    other = values(640)
    world.paged.write(type(other)(other.keys[:, 32:], other.values[:, 32:]), 0, 608, BLOCK_IDS)
    assert world.staging.num_free == 5
    assert shared.session.publisher.counts.published == 0  # nothing before the weights are seen
    held.set()
    world.all_published(3)
    assert world.worker.counts["published_chunks"] == 3
    assert not world.worker.take_report()
    assert load(world.worker, 0, 576) == (set(), 576)
    found = world.paged.read(0, 576, range(30))
    assert torch.equal(found.keys, world.cache.keys[:, :576])
    assert torch.equal(found.values, world.cache.values[:, :576])


def test_nothing_is_published_with_other_weights(shared: SharedSession) -> None:
    """Of all that the step saved; the scheduler hears of it with the next one."""
    world = World(shared, changed=lambda: True)
    world.save()
    world.until(lambda: world.staging.num_free == len(world.staging))
    world.worker.begin(Step())
    world.worker.take_finished()
    assert world.worker.take_report().weights_changed
    world.save()
    assert world.staging.num_free == len(world.staging)
    assert world.worker.counts["published_chunks"] == 0
    assert shared.session.publisher.counts.published == 0


def test_what_finds_no_place_is_reported(shared: SharedSession) -> None:
    held = threading.Event()
    world = World(shared, places=2, changed=lambda: not held.wait(30))
    world.save()
    report = world.worker.take_report()
    assert report.unsaved == {"r": {CHUNKS[2].key: 512}}
    world.save(CHUNKS[2:])
    assert world.worker.take_report().unsaved == {"r": {CHUNKS[2].key: 512}}
    held.set()
    world.all_published(2)
    world.save(CHUNKS[2:])
    assert not world.worker.take_report()
    world.all_published(3)
    assert load(world.worker, 0, 576) == (set(), 576)


def test_without_memory_nothing_is_published_and_that_is_counted(shared: SharedSession) -> None:
    world = World(shared, places=0)
    world.save()
    assert not world.worker.take_report()
    assert world.worker.counts["unpublished_chunks"] == 3


def test_what_fails_is_counted_and_its_places_are_free(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(shared)

    def broken(*_: object) -> None:
        raise RuntimeError("no memory for a table")

    monkeypatch.setattr(world.worker._saver, "_gather", broken)
    world.save()
    assert world.worker.counts["unpublished_chunks"] == 3
    assert world.staging.num_free == len(world.staging)


def test_a_chunk_that_is_refused_gives_its_place_back(shared: SharedSession) -> None:
    world = World(shared)
    world.save()
    world.save()  # ALREADY, or published again
    world.until(lambda: world.staging.num_free == len(world.staging))
    world.all_published(3)


def test_ranks_hand_over_copies(shared: SharedSession) -> None:
    """In main memory, as their places are used again."""
    taken: list[tuple[int, Any]] = []

    def take(chunk: Any, cache: Any, exact_until: int | None, saved_s: float) -> bool:
        taken.append((chunk.start, cache))
        return chunk.start != 256

    world = World(shared, hand_over=take)
    world.save()
    world.until(lambda: len(taken) == 3 and world.staging.num_free == len(world.staging))
    world.until(lambda: world.worker.counts["unpublished_chunks"] == 1)
    for _ in range(len(world.staging)):
        loan = world.staging.borrow(0, 256)
        assert loan is not None
        loan.place.fill_(9.0)
    for start, cache in taken:
        assert torch.equal(cache.keys, world.cache.keys[:, start : start + cache.num_tokens])
        assert torch.equal(cache.values, world.cache.values[:, start : start + cache.num_tokens])
    assert shared.session.publisher.counts.published == 0


def test_what_waits_at_the_end_is_still_published(tmp_path: Any) -> None:
    from tests.engines.vllm_working import shared_session

    with shared_session(tmp_path / "folder") as shared:
        world = World(shared, changed=lambda: bool(time.sleep(0.3)))
        world.save()
    assert shared.session.publisher.counts.published == 3


def test_as_much_memory_as_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more places than are of use."""
    paged, empty = paged_memory(), torch.empty

    def scarce(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        if shape[0] > 5:
            raise torch.OutOfMemoryError("no")
        return empty(shape, **options)

    assert len(Staging(paged, LAYERS, 1 << 40)) == staging_module.MAX_PLACES
    monkeypatch.setattr(torch, "empty", scarce)
    assert len(Staging(paged, LAYERS, 1 << 40)) == 4


@pytest.mark.parametrize(
    ("beyond", "places", "level"),
    [(16, 8, None), (15, 7, "INFO"), (2, 1, "INFO"), (1, 0, "WARNING"), (-99, 0, "WARNING")],
)
def test_memory_is_left_to_vllm(
    beyond: int, places: int, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of what is free beyond a reserve, in whole places; otherwise the log says what to do."""
    paged, place = paged_memory(), Staging(paged_memory(), LAYERS, 0).place_bytes
    caplog.set_level(logging.INFO)
    free = staging_module.RESERVE_BYTES + beyond * place
    assert len(Staging(paged, LAYERS, 8 * place, lambda _: free)) == places
    assert [one.levelname for one in caplog.records] == ([level] if level else [])
    if level:
        assert f"{places} of 8 chunks" in caplog.text
        assert f"{free / 2**30:.2f} GiB are free" in caplog.text
        assert "lower --gpu-memory-utilization or staging_bytes" in caplog.text


def test_places_are_given_back_once() -> None:
    staging = Staging(paged_memory(), LAYERS, 1 << 20)
    loan = staging.borrow(512, 80)
    assert loan is not None
    assert loan.place.shape == (2, LAYERS, 80, HEADS, DIM)
    assert loan.place.is_contiguous()
    before = staging.num_free
    for _ in range(2):
        loan.give_back()
    assert staging.num_free == before + 1
