"""Recorded launches, without a GPU: what is replayed, when it is forgotten, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdn.codec.klt import replays
from kdn.codec.klt.gpu_input import Slab
from kdn.codec.klt.gpu_launch import Batching, Launcher
from kdn.codec.klt.gpu_memory import InputRing
from kdn.codec.klt.gpu_target import Target
from kdn.codec.klt.replays import MAX_KNOWN, RECORDED_TIME, Replays
from kdn.codec.klt.streams import CudaStreams
from tests.codec.test_klt_input import CPU, Context, slots_of


class Recorded:
    """Stands for CUDA: what a graph does, each time, is what was done when it was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[object] = []
        self.replayed: list[object] = []
        self.num_waits = 0
        monkeypatch.setattr(replays, "_new_pool", object)
        monkeypatch.setattr(replays, "_wait", self._wait)
        monkeypatch.setattr(replays, "recorded", self._recorded)

    def _wait(self) -> None:
        self.num_waits += 1

    def _recorded(self, work: Callable[[], object], pool: object) -> Any:
        done, recorded = work(), self
        self.pools.append(pool)

        class Graph:
            def replay(self) -> None:
                recorded.replayed.append(done)

        return Graph()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def real(device: str = "cuda") -> Replays:
    return Replays(torch.device(device))


def test_the_third_time_is_recorded_and_replayed(recorded: Recorded) -> None:
    found, memory, times = real(), (object(),), []
    for _ in range(RECORDED_TIME + 2):
        found.run("kind", memory, lambda: times.append(len(times)))
    assert len(times) == RECORDED_TIME
    assert len(recorded.replayed) == 3
    found.run("kind", (object(),), lambda: times.append(-1))  # in other memory
    assert times[-1] == -1


def test_what_is_forgotten_is_done_and_its_pool_is_not_used_again(recorded: Recorded) -> None:
    found, every = real(), [object() for _ in range(MAX_KNOWN + 1)]
    for _ in range(RECORDED_TIME):
        found.run("kind", (every[0],), lambda: None)
    for one in every[1:]:
        found.run("kind", (one,), lambda: None)
    assert recorded.num_waits == 1
    for _ in range(RECORDED_TIME):
        found.run("kind", (every[0],), lambda: None)
    first, second = recorded.pools
    assert first is not second


def test_after_a_spoilt_recording_nothing_is_recorded(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, tried, done = real(), [], []
    monkeypatch.setattr(replays, "recorded", lambda work, pool: tried.append(pool))
    for memory in (object(), object()):
        for _ in range(10 * RECORDED_TIME):
            found.run("kind", (memory,), lambda: done.append(1))
    assert len(tried) == 1
    assert len(done) == 20 * RECORDED_TIME


def test_nothing_is_waited_for_if_nothing_was_recorded(recorded: Recorded) -> None:
    found = real()
    for _ in range(3 * MAX_KNOWN):
        found.run("kind", (object(),), lambda: None)
    assert recorded.num_waits == 0
    assert not recorded.pools


class Decoding(Launcher):
    """Notes what its launches read and write."""

    recorded_levels = 2

    def __init__(self, context: Context) -> None:
        super().__init__(CPU, context.maker, CudaStreams(CPU, 2))
        self._replays = real()
        self.scratch_bytes = 1000
        self.tables = (torch.zeros(4),)

    def plan(self, num_chunks: int, target: Target) -> Batching:
        return Batching(num_chunks, 1)

    def lent_tables(self, target: Target) -> tuple[torch.Tensor, ...]:
        return self.tables

    def run(self, slab: Slab, *_: Any) -> Any:
        scratch = self._scratch.carve(self.scratch_bytes).take((8,), torch.uint8)
        return scratch.data_ptr(), self.tables[0].data_ptr()


@pytest.fixture(scope="module")
def context() -> Context:
    return Context()


def decode(decoder: Decoding, context: Context, target: Any, times: int) -> None:
    for _ in range(2 * times):  # in each of two buffers
        decoder.launch(context.jobs([1], 2), 2, target)


def test_recorded_launches_do_not_outlive_their_memory(
    recorded: Recorded, context: Context
) -> None:
    decoder, target = Decoding(context), object()
    decode(decoder, context, target, RECORDED_TIME + 3)
    assert len(set(recorded.replayed)) == 1
    decoder.scratch_bytes = 5000
    decoder.launch(context.jobs([1, 2], 1), 1, target)  # type: ignore[arg-type]
    recorded.replayed.clear()
    decode(decoder, context, target, RECORDED_TIME + 3)
    [(scratch, _)] = set(recorded.replayed)
    assert scratch == decoder._scratch.carve(8).take((8,), torch.uint8).data_ptr()
    decoder.tables = (torch.zeros(4),)  # as when a table was dropped, and made again
    recorded.replayed.clear()
    decode(decoder, context, target, RECORDED_TIME + 3)
    assert {tables for _, tables in recorded.replayed} == {decoder.tables[0].data_ptr()}


def test_filling_up_a_slab_never_makes_a_buffer_grow(recorded: Recorded, context: Context) -> None:
    chunk, stream = context.chunks[1], context.streams[1]
    size = context.jobs([1], 2)[0].size_bytes
    room = -(-size // 16) * 16 + context.maker.overhead_bytes(1)
    decoder = Decoding(context)
    decoder._ring = InputRing(CPU, 2, room)
    jobs = [decoder.job(stream, chunk, 2, slots_of(chunk))] * 2
    target: Any = object()
    decoder.launch(jobs, 2, target)
    assert decoder._ring.memory_bytes()[1] == 2 * room
