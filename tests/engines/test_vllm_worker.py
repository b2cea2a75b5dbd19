"""The worker's side over a real runtime and a folder: loads, failures, deadlines, publishing."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.vllm import worker as worker_module
from kdn.engines.vllm.known import longest_known
from kdn.engines.vllm.layout import Heads, PagedCache
from kdn.engines.vllm.messages import Load, Save, Step
from kdn.engines.vllm.runtime import Runtime
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.worker import WorkerSide

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 8, 32, 64
SPEC = ModelSpec(LAYERS, HEADS, DIM, 1000, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)
SPACE = Namespace(SPEC.fingerprint, bytes(16))
TOKENS = list(range(3, 603))  # two full chunks and a tail of 80


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    settings = Settings.parse({"url": str(tmp_path / "folder"), "codec": "exact", "host_bytes": 0})
    runtime = Runtime.acquire(settings, SPEC, torch.float32)
    yield runtime
    runtime.release()


def make_worker(
    runtime: Runtime, weights_changed: Callable[[], bool] = lambda: False
) -> tuple[WorkerSide, PagedCache]:
    layers = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    paged = PagedCache(layers, SPEC, Heads(0, HEADS), BLOCK)
    return WorkerSide(runtime, paged, weights_changed), paged


def values(num_tokens: int) -> KVCache:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, LAYERS, num_tokens, HEADS, DIM, generator=generator)
    return KVCache(keys, values)


def publish(runtime: Runtime) -> KVCache:
    """A worker computes all tokens and publishes them."""
    worker, paged = make_worker(runtime)
    blocks = list(range(40, 60))
    cache = values(608)
    paged.write(cache, 0, 608, blocks)
    worker.begin(Step(saves=(Save("r", tuple(cut(TOKENS, SPACE)), tuple(blocks)),), num_tokens=600))
    worker.save()
    until_s = time.monotonic() + 30
    while runtime.counts.published < 3:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert worker.counts["published_chunks"] == 3
    return cache


def load(
    worker: WorkerSide, start: int, end: int, deadline_s: float = 30.0, enough_kld: float = 0.0
) -> Any:
    """What comes of it: failed blocks, and up to where it is exact."""
    chunks = tuple(c for c in cut(TOKENS, SPACE) if c.start < end and c.end > start)
    blocks = tuple(range(30))
    worker.begin(Step(loads=(Load("r", chunks, start, end, blocks, deadline_s, enough_kld),)))
    worker.start_loads()
    until_s = time.monotonic() + 60
    while not (done := worker.take_finished()):
        assert time.monotonic() < until_s
    assert done == {"r"}
    assert worker.take_finished() == set()
    return worker.take_failed_blocks(), worker.take_report().exact_until["r"]


def test_what_one_publishes_another_loads(runtime: Runtime) -> None:
    cache = publish(runtime)
    worker, paged = make_worker(runtime)
    assert load(worker, 0, 576) == (set(), 576)
    found = paged.read(0, 576, range(30))
    assert torch.equal(found.keys, cache.keys[:, :576])
    assert torch.equal(found.values, cache.values[:, :576])
    assert not paged.read(576, 640, range(30)).keys.any()
    assert worker.counts["loaded_tokens"] == 576


def test_a_part_is_loaded_behind_what_is_there(runtime: Runtime) -> None:
    cache = publish(runtime)
    worker, paged = make_worker(runtime)
    assert load(worker, 288, 512) == (set(), 512)
    found = paged.read(0, 512, range(30))
    assert torch.equal(found.keys[:, 288:], cache.keys[:, 288:512])
    assert not found.keys[:, :288].any()


def test_what_is_gone_is_reported_block_by_block(runtime: Runtime) -> None:
    cache = publish(runtime)
    gone = cut(TOKENS, SPACE)[1]

    async def delete() -> None:
        assert await (await runtime.places.publish_to.store()).delete(gone.key)

    runtime.submit(delete()).result(10)
    worker, paged = make_worker(runtime)
    assert load(worker, 0, 576) == (set(range(8, 18)), 256)
    assert torch.equal(paged.read(0, 256, range(30)).keys, cache.keys[:, :256])
    assert worker.counts["failed_tokens"] == 320


def test_a_deadline_that_has_passed(runtime: Runtime) -> None:
    publish(runtime)
    worker, paged = make_worker(runtime)
    assert load(worker, 0, 512, deadline_s=0.0) == (set(range(16)), 0)
    assert not paged.read(0, 512, range(30)).keys.any()


def test_an_error_is_a_failed_load(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(worker_module, "deliver", broken)
    worker, _ = make_worker(runtime)
    assert load(worker, 0, 512) == (set(range(16)), 0)


@pytest.mark.parametrize(("strict", "good"), [(True, 256), (False, 512)])
def test_what_is_coarser_than_wanted(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, strict: bool, good: int
) -> None:
    """By the deadline the first chunk is good enough and the second, at the end, is not."""
    cache = publish(runtime)
    real = worker_module.deliver

    async def coarse(*given: Any, **named: Any) -> Any:
        result = await real(*given, **named)
        monkeypatch.setattr(runtime, "expected_kld", (0.02, 0.0001, 0.0))
        return replace(result, levels=(2, 1), num_levels=3)

    monkeypatch.setattr(worker_module, "deliver", coarse)
    worker, paged = make_worker(runtime)
    chunks = tuple(cut(TOKENS, SPACE)[:2])
    load = Load("r", chunks, 0, 512, tuple(range(30)), 30.0, 0.001, strict)
    worker.begin(Step(loads=(load,)))
    worker.start_loads()
    assert ended_within(worker, 30.0) == {"r"}
    assert worker.take_failed_blocks() == set(range(good // BLOCK, 16))
    assert torch.equal(paged.read(0, good, range(30)).keys, cache.keys[:, :good])


def test_after_a_load_that_nobody_answered_others_fail_at_once(tmp_path: Path) -> None:
    settings = Settings.parse({"url": "http://127.0.0.1:9", "codec": "exact", "host_bytes": 0})
    runtime = Runtime.acquire(settings, SPEC, torch.float32)
    try:
        worker, _ = make_worker(runtime)
        assert load(worker, 0, 512, deadline_s=0.2) == (set(range(16)), 0)
        assert worker._away_until_s == 0.0  # in so little time nobody can be expected to answer
        assert load(worker, 0, 512, deadline_s=0.6) == (set(range(16)), 0)
        began_s = time.monotonic()
        assert load(worker, 0, 512, deadline_s=30.0) == (set(range(16)), 0)
        assert time.monotonic() - began_s < 2.0
    finally:
        runtime.release()


def test_a_load_that_never_ends_is_given_up(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(worker_module, "deliver", endless)
    monkeypatch.setattr(worker_module, "GRACE_S", 0.1)
    worker, _ = make_worker(runtime)
    for _ in range(worker_module.LOADS_AT_ONCE + 1):  # each makes room for the next
        assert load(worker, 0, 512, deadline_s=0.1) == (set(range(16)), 0)


def begin(worker: WorkerSide, *names: str, deadline_s: float) -> None:
    chunks = tuple(cut(TOKENS, SPACE)[:2])
    loads = [Load(name, chunks, 0, 512, tuple(range(30)), deadline_s, 0.0) for name in names]
    worker.begin(Step(loads=tuple(loads)))
    worker.start_loads()


def ended_within(worker: WorkerSide, limit_s: float) -> set[str]:
    """Which loads have, after so long, or as soon as there are some."""
    until_s = time.monotonic() + limit_s
    while not (done := worker.take_finished()) and time.monotonic() < until_s:
        pass
    return done


def test_a_turn_is_waited_for_until_the_deadline(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slow loads take all there are: the third is a miss by its own deadline, not by theirs."""
    slow = asyncio.Event()

    async def wait(*_: Any, **__: Any) -> Any:
        await slow.wait()
        raise ValueError("of no use any more")

    monkeypatch.setattr(worker_module, "deliver", wait)
    worker, _ = make_worker(runtime)
    names = [f"slow {number}" for number in range(worker_module.LOADS_AT_ONCE)]
    begin(worker, *names, deadline_s=60.0)
    begin(worker, "r", deadline_s=0.2)
    assert ended_within(worker, 5.0) == {"r"}
    assert worker.take_failed_blocks() == set(range(16))
    assert worker.counts["crowded"] == 1
    runtime._loop.call_soon_threadsafe(slow.set)
    assert ended_within(worker, 5.0) | ended_within(worker, 0.5) == set(names)
    # Those that did wait and those that did not have left all turns free.
    monkeypatch.undo()
    worker.take_failed_blocks()
    publish(runtime)
    assert load(worker, 0, 512) == (set(), 512)


def test_slow_loads_do_not_keep_their_turns(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond their deadline and a little grace: one that waits longer has its turn then."""
    publish(runtime)
    real, calls = worker_module.deliver, itertools.count()

    async def slow_at_first(*given: Any, **named: Any) -> Any:
        if next(calls) < worker_module.LOADS_AT_ONCE:
            await asyncio.sleep(3600)
        return await real(*given, **named)

    monkeypatch.setattr(worker_module, "deliver", slow_at_first)
    monkeypatch.setattr(worker_module, "GRACE_S", 0.2)
    worker, _ = make_worker(runtime)
    begin(worker, "slow", "too", deadline_s=0.2)
    begin(worker, "r", deadline_s=30.0)
    done: set[str] = set()
    while "r" not in done:
        done |= (now := ended_within(worker, 30.0))
        assert now
        failed = worker.take_failed_blocks()
    assert done == {"slow", "too", "r"}
    assert failed == set()


def test_what_was_given_up_is_not_written(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery that ends too late, and cannot be stopped: its blocks are others' by then."""
    cache = publish(runtime)
    real, late = worker_module.deliver, threading.Event()

    async def stubborn(*given: Any, **named: Any) -> Any:
        result = await real(*given, **named)
        while not late.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return result

    monkeypatch.setattr(worker_module, "deliver", stubborn)
    monkeypatch.setattr(worker_module, "GRACE_S", 0.1)
    worker, paged = make_worker(runtime)
    assert load(worker, 0, 512, deadline_s=0.5) == (set(range(16)), 0)
    late.set()
    until_s = time.monotonic() + 10
    while len(worker._ended) < 1:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert worker.take_finished() == set()
    assert not paged.read(0, 512, range(30)).keys.any()
    monkeypatch.setattr(worker_module, "GRACE_S", 30.0)
    assert load(worker, 0, 512) == (set(), 512)
    assert torch.equal(paged.read(0, 512, range(30)).keys, cache.keys[:, :512])


def test_blocks_that_are_being_written_are_not_given_up() -> None:
    job = worker_module.Job(Load("r", (), 0, 512, (), 1.0, 0.0), 0.0)
    with job.writing():
        assert not job.give_up()
    assert job.give_up()
    with pytest.raises(worker_module.GivenUp), job.writing():
        raise AssertionError("not to be reached")


def test_a_full_queue_publishes_nothing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(runtime), "has_room", lambda self: False)
    worker, _ = make_worker(runtime)
    worker.begin(Step(saves=(Save("r", tuple(cut(TOKENS, SPACE)), tuple(range(20))),)))
    worker.save()
    assert worker.counts["unpublished_chunks"] == 3
    assert worker.counts["published_chunks"] == 0


def test_nothing_is_published_with_other_weights(runtime: Runtime) -> None:
    worker, _ = make_worker(runtime, lambda: True)
    step = Step(saves=(Save("r", tuple(cut(TOKENS, SPACE)), tuple(range(20))),), num_tokens=600)
    worker.begin(step)
    worker.save()
    assert worker.take_report().weights_changed
    worker.save()
    assert not worker.take_report().weights_changed  # told once
    assert worker.counts["published_chunks"] == 0
    time.sleep(0.1)
    assert runtime.counts.published == 0


def test_what_was_loaded_is_not_used_with_other_weights(runtime: Runtime) -> None:
    """They were replaced while it was on its way; later ones do not even begin, and old weights
    that come back do not help."""
    publish(runtime)
    answers = iter([False, True])
    worker, _ = make_worker(runtime, lambda: next(answers))
    assert load(worker, 0, 512) == (set(), 512)
    begin(worker, "r", deadline_s=30.0)
    assert ended_within(worker, 30.0) == {"r"}
    assert worker.take_failed_blocks() == set(range(16))
    report = worker.take_report()
    assert (report.weights_changed, report.exact_until) == (True, {"r": 0})
    assert load(worker, 0, 512) == (set(range(16)), 0)
    assert worker._jobs == {}


def test_weights_are_looked_at_only_when_it_matters(runtime: Runtime) -> None:
    def never() -> bool:
        raise AssertionError("a step that publishes and loads nothing")

    worker, _ = make_worker(runtime, never)
    worker.begin(Step(num_tokens=1))
    worker.start_loads()
    worker.save()
    assert worker.take_finished() == set()


@pytest.mark.parametrize(
    ("num_tokens", "block_tokens", "expected"),
    [
        (600, 16, [256, 512, 592]),
        (700, 16, [256, 512]),  # another tail
        (594, 128, [256, 512]),  # a tail that adds no whole block is not asked for
        (400, 16, [256]),
        (100, 16, []),
    ],
)
def test_the_longest_known_prefix(
    num_tokens: int, block_tokens: int, expected: list[int], runtime: Runtime
) -> None:
    publish(runtime)
    tokens = TOKENS[:num_tokens] if num_tokens <= 600 else TOKENS[:590] + list(range(110))
    asked = longest_known(
        tokens, SPACE, runtime.codec, runtime.places.endpoints, block_tokens=block_tokens,
        limit_s=10.0,
    )  # fmt: skip
    known = runtime.submit(asked).result(20)
    assert [chunk.end for chunk in known.chunks] == expected
    assert not known.late


def test_exact_values_of_another_dtype_are_not_known(runtime: Runtime) -> None:
    publish(runtime)
    for dtype, expected in ((torch.float32, 592), (torch.bfloat16, 0)):
        asked = longest_known(
            TOKENS, SPACE, runtime.codec, runtime.places.endpoints, block_tokens=16, limit_s=5.0,
            dtype=dtype,
        )  # fmt: skip
        assert runtime.submit(asked).result(5).end == expected


def test_nobody_answers(tmp_path: Path) -> None:
    settings = Settings.parse({"url": "http://127.0.0.1:9", "codec": "exact", "host_bytes": 0})
    runtime = Runtime.acquire(settings, SPEC, torch.float32)
    try:
        asked = longest_known(
            TOKENS, SPACE, runtime.codec, runtime.places.endpoints, block_tokens=16, limit_s=0.2
        )
        known = runtime.submit(asked).result(5)
        assert (known.end, known.late) == (0, True)
        asked = longest_known(
            TOKENS[:200], SPACE, runtime.codec, runtime.places.endpoints, block_tokens=16,
            limit_s=0.2,
        )  # fmt: skip
        assert runtime.submit(asked).result(5).late  # with a tail only, too
    finally:
        runtime.release()


def test_a_runtime_is_shared_and_closed(tmp_path: Path) -> None:
    settings = Settings.parse({"url": str(tmp_path / "folder"), "codec": "exact", "host_bytes": 0})
    first = Runtime.acquire(settings, SPEC, torch.float32)
    assert Runtime.acquire(settings, SPEC, torch.float32) is first
    first.release()
    assert first._thread.is_alive()
    first.release()
    assert not first._thread.is_alive()
    # The folder is free again.
    Runtime.acquire(settings, SPEC, torch.float32).release()


@pytest.fixture
def host_runtime(tmp_path: Path) -> Iterator[Runtime]:
    """Beside a node that is away, with decoded chunks in a folder."""
    given = {"url": "http://127.0.0.1:9", "codec": "exact", "host_folder": str(tmp_path / "host")}
    runtime = Runtime.acquire(Settings.parse(given), SPEC, torch.float32)
    yield runtime
    runtime.release()


def hold(runtime: Runtime, kld: float, exact: bool, last: int = 3) -> KVCache:
    assert runtime.host is not None
    cache = values(600)
    for chunk in cut(TOKENS, SPACE)[:last]:
        assert runtime.host.put(chunk, cache.slice(chunk.start, chunk.end), kld, exact=exact)
    return cache


def known(runtime: Runtime, limit_s: float = 0.2) -> tuple[int, bool]:
    host = runtime.host
    assert host is not None
    asked = longest_known(
        TOKENS, SPACE, runtime.codec, runtime.places.endpoints, block_tokens=32, limit_s=limit_s,
        is_held=lambda chunk: host.has(chunk, 0.0),
    )  # fmt: skip
    found = runtime.submit(asked).result(5)
    return found.end, found.late


def test_what_the_host_holds_needs_no_node(host_runtime: Runtime) -> None:
    cache = hold(host_runtime, 0.0, exact=True)
    assert known(host_runtime) == (592, False)
    worker, paged = make_worker(host_runtime)
    assert load(worker, 64, 576) == (set(), 576)
    found = paged.read(64, 576, range(30))
    assert torch.equal(found.keys, cache.keys[:, 64:576])
    assert torch.equal(found.values, cache.values[:, 64:576])
    assert (worker.counts["host_tokens"], worker.counts["fetched_bytes"]) == (512, 0)


def test_a_part_that_the_host_holds(host_runtime: Runtime) -> None:
    """Nobody has the rest: it is reported."""
    cache = hold(host_runtime, 0.0, exact=True, last=1)
    assert known(host_runtime) == (256, True)
    assert known(host_runtime, limit_s=0.0) == (256, False)
    worker, paged = make_worker(host_runtime)
    assert load(worker, 0, 512, deadline_s=0.3) == (set(range(8, 16)), 256)
    assert torch.equal(paged.read(0, 256, range(30)).keys, cache.keys[:, :256])


def test_what_the_host_holds_with_losses(host_runtime: Runtime) -> None:
    hold(host_runtime, 0.01, exact=False)
    assert known(host_runtime) == (0, True)
    worker, _ = make_worker(host_runtime)
    assert load(worker, 0, 512, deadline_s=0.3) == (set(range(16)), 0)
    worker, _ = make_worker(host_runtime)
    assert load(worker, 0, 512, enough_kld=0.04) == (set(), 0)  # there, and not exact


def test_the_end_must_be_finer_than_what_is_before(host_runtime: Runtime) -> None:
    """As a delivery leaves it: what it decoded is good enough for the next that asks the same."""
    assert host_runtime.host is not None
    cache = values(600)
    for chunk, kld in zip(cut(TOKENS, SPACE), (0.0016, 0.0002, 0.0002), strict=True):
        part = cache.slice(chunk.start, chunk.end)
        host_runtime.host.put(chunk, part, kld, exact=False)
    worker, _ = make_worker(host_runtime)
    assert load(worker, 0, 576, enough_kld=0.001) == (set(), 0)
    assert worker.counts["host_tokens"] == 576
    worker, _ = make_worker(host_runtime)  # here the first chunk is the end
    assert load(worker, 0, 256, deadline_s=0.3, enough_kld=0.001) == (set(range(8)), 0)


@pytest.mark.parametrize("publishing", [True, False])
def test_what_was_computed_or_loaded_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publishing: bool
) -> None:
    monkeypatch.setattr(worker_module, "KEEP_AFTER_S", 0.0)
    folders = [str(tmp_path / "writer"), str(tmp_path / "reader")]
    both = [
        Settings.parse({"url": str(tmp_path / "data"), "codec": "exact", "host_folder": one})
        for one in folders
    ]
    runtime = Runtime.acquire(both[0], SPEC, torch.float32)
    cache = publish(runtime)
    if not publishing:
        runtime.release()
        runtime = Runtime.acquire(both[1], SPEC, torch.float32)
        worker, _ = make_worker(runtime)
        assert load(worker, 0, 576) == (set(), 576)
        assert worker.counts["host_tokens"] == 0
    try:
        assert runtime.host is not None
        until_s = time.monotonic() + 10
        for chunk in cut(TOKENS, SPACE):
            while (held := runtime.host.get(chunk, 0.0)) is None:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            assert torch.equal(held.cache.keys, cache.keys[:, chunk.start : chunk.end])
            assert held.exact
    finally:
        runtime.release()
