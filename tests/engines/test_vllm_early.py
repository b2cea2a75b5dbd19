"""Loads whose streams are ordered before vLLM has made room for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kdn.delivery import client, quick
from kdn.delivery.fetcher import Fetching
from kdn.engines.vllm import early as early_module
from kdn.engines.vllm.early import Prospect
from kdn.engines.vllm.messages import LoadOrder, Step
from kdn.engines.vllm.shared import SharedSession
from tests.engines.test_vllm_fetcher import num_orders, session_with_fetcher
from tests.engines.vllm_ranks import ranks_of
from tests.engines.vllm_working import (
    BLOCK,
    SPACE,
    TOKENS,
    ended_within,
    load,
    make_worker,
    order,
    publish,
)

END = 576


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are small here, and the machine may be busy."""
    monkeypatch.setattr(quick, "MIN_BYTES", 1)
    monkeypatch.setattr(client, "QUICK_LEAST_S", 8.0)
    monkeypatch.setattr(early_module, "TAKEN_UP_S", 30.0)
    monkeypatch.setattr(early_module, "ORDER_S", 5.0)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedSession]:
    with session_with_fetcher(tmp_path) as shared:
        yield shared


def prospect(start: int | None = 0, name: str = "r") -> Prospect:
    return Prospect(name, (len(TOKENS) - 1) // BLOCK * BLOCK, BLOCK, 0.0, 30.0, start)


def looked_up(shared: SharedSession, wanted: Prospect) -> LoadOrder:
    """The order that comes of it when vLLM has made room."""
    future = shared.submit(lambda: shared.early.look_up(TOKENS, SPACE, 5.0, wanted))
    known = future.result(10.0)
    start = wanted.start or 0
    asked = order(start, END, name=wanted.request_id)
    return replace(asked, heads=known.heads(asked.chunks))


def num_early(shared: SharedSession) -> int:
    return len(shared.early._loads)


def begin(shared: SharedSession, wanted: LoadOrder, *, is_early: bool = True) -> torch.Tensor:
    """It is loaded, all of it: the keys."""
    worker, paged = make_worker(shared)
    heads = wanted.heads
    found = load(worker, wanted.start, END, name=wanted.request_id, heads=heads)
    assert found == (set(), END)
    assert worker.counts["early_loads"] == is_early
    return paged.read(wanted.start, END, range(30)).keys


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("start", [0, 256, 288])
def test_a_load_that_is_on_its_way_when_it_begins(shared: SharedSession, start: int) -> None:
    cache = publish(shared)
    make_worker(shared)
    wanted = looked_up(shared, prospect(start))
    assert (num_orders(shared), num_early(shared)) == (1, 1)
    time.sleep(0.2)  # all of it is here, and waits for its blocks
    assert torch.equal(begin(shared, wanted), cache.keys[:, start:END])
    assert (num_orders(shared), num_early(shared)) == (1, 0)


def test_blocks_that_are_there_at_once(shared: SharedSession) -> None:
    cache = publish(shared)
    make_worker(shared)
    for _ in range(3):  # the second time over connections and into memory that are there
        assert torch.equal(begin(shared, looked_up(shared, prospect())), cache.keys[:, :END])
    assert num_orders(shared) == 3


def test_what_nobody_takes_up_is_dropped(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was aborted, say. A load that begins later begins anew."""
    monkeypatch.setattr(early_module, "TAKEN_UP_S", 0.1)
    cache = publish(shared)
    make_worker(shared)
    wanted = looked_up(shared, prospect())
    until(lambda: not num_early(shared) and not shared.early._tasks)
    assert shared.early.num_dropped == 1
    fetcher = shared.session.fetcher
    assert fetcher is not None
    until(lambda: not fetcher._fetches)

    async def is_free() -> bool:
        fetcher._arena.tidy()
        return not fetcher._arena._taken

    until(lambda: shared.submit(is_free).result(5.0))
    assert torch.equal(begin(shared, wanted, is_early=False), cache.keys[:, :END])
    assert num_orders(shared) == 2


def test_whoever_takes_one_up_has_most_of_its_time(shared: SharedSession) -> None:
    cache = publish(shared)
    make_worker(shared)
    wanted = looked_up(shared, replace(prospect(), deadline_s=0.4))
    began_s = time.monotonic()
    until(lambda: not num_early(shared))
    assert time.monotonic() - began_s < 0.3
    assert torch.equal(begin(shared, wanted, is_early=False), cache.keys[:, :END])


def test_none_goes_before_loads_that_wait_for_others(shared: SharedSession) -> None:
    publish(shared)
    worker, _ = make_worker(shared)
    turn = worker.loader._turn
    held = turn._value

    async def take() -> None:
        for _ in range(held):
            await turn.acquire()

    shared.submit(take).result(5.0)
    looked_up(shared, prospect())
    assert (num_orders(shared), num_early(shared)) == (0, 0)


def test_a_load_of_other_chunks_begins_anew(shared: SharedSession) -> None:
    """Another request has computed the first chunk meanwhile."""
    cache = publish(shared)
    make_worker(shared)
    wanted = looked_up(shared, prospect())
    later = replace(order(256, END), heads=wanted.heads[1:])
    assert torch.equal(begin(shared, later, is_early=False), cache.keys[:, 256:END])
    assert (num_orders(shared), num_early(shared)) == (2, 0)
    coarser = replace(wanted, enough_kld=1.0)
    looked_up(shared, prospect())
    worker, paged = make_worker(shared)
    worker.begin(Step(loads=(coarser,)))
    worker.start_loads()
    assert ended_within(worker, 30.0) == {"r"}
    assert torch.equal(paged.read(0, END, range(30)).keys, cache.keys[:, :END])
    assert (num_orders(shared), num_early(shared)) == (4, 0)


def test_nothing_is_ordered_before_vllm_has_said_what_it_holds(shared: SharedSession) -> None:
    publish(shared)
    make_worker(shared)
    looked_up(shared, prospect(None))
    for start in (END, END + BLOCK):  # all of it
        looked_up(shared, prospect(start))
    assert (num_orders(shared), num_early(shared)) == (0, 0)


def test_nothing_is_ordered_where_nobody_would_take_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_with_fetcher(tmp_path) as shared:
        shared.early.batch_chunks = None  # the scheduler's process has no worker
        looked_up(shared, prospect())
        assert num_orders(shared) == 0
        with ranks_of(shared, tmp_path / "host"):
            looked_up(shared, prospect())
        assert num_orders(shared) == 0
        make_worker(shared)
        monkeypatch.setattr(early_module, "AT_ONCE", 1)
        looked_up(shared, prospect())
        looked_up(shared, prospect(name="other"))
        assert (num_orders(shared), num_early(shared)) == (1, 1)
        looked_up(shared, prospect())  # in place of the former one
        until(lambda: len(shared.early._tasks) <= 1)


def test_what_the_host_holds_is_not_ordered(shared: SharedSession) -> None:
    publish(shared)
    make_worker(shared)

    async def begin_with_a_hole() -> None:
        known = await shared.session.know(TOKENS, namespace=SPACE, block_tokens=BLOCK, whole=True)
        streams = dict(known.streams)
        del streams[known.chunks[0].key]
        await shared.early.begin(prospect(), replace(known, streams=streams))

    shared.submit(begin_with_a_hole).result(10.0)
    assert num_orders(shared) == 0


def test_the_session_ends_with_an_early_load(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with session_with_fetcher(tmp_path) as shared:
        publish(shared)
        make_worker(shared)
        looked_up(shared, prospect())
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10.0
    assert not shared.early._tasks


def test_a_fetcher_that_dies_meanwhile(shared: SharedSession) -> None:
    """The delivery fetches the rest itself, also before there are blocks."""
    cache = publish(shared)
    make_worker(shared)
    wanted = looked_up(shared, prospect())

    async def kill() -> None:
        fetcher = shared.session.fetcher
        assert fetcher is not None
        assert fetcher._process is not None
        fetcher._process.kill()
        await asyncio.sleep(0.2)

    shared.submit(kill).result(5.0)
    assert torch.equal(begin(shared, wanted), cache.keys[:, :END])


def test_a_load_that_waits_for_blocks_takes_no_time(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, note = 0, quick.Quick._note

    def noted(self: quick.Quick, fetching: Fetching) -> None:
        nonlocal looks
        looks += 1
        note(self, fetching)

    monkeypatch.setattr(quick.Quick, "_note", noted)
    publish(shared)
    make_worker(shared)
    wanted = looked_up(shared, prospect())
    time.sleep(0.5)
    assert looks < 20
    begin(shared, wanted)


def test_what_no_fetcher_is_worth_is_ordered_early_as_well(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "MIN_BYTES", 1 << 30)
    cache = publish(shared)
    make_worker(shared)
    began_s = time.monotonic()
    wanted = looked_up(shared, prospect())
    assert time.monotonic() - began_s < 2.0  # not until it is taken for lost
    assert (num_orders(shared), num_early(shared)) == (0, 1)
    assert torch.equal(begin(shared, wanted), cache.keys[:, :END])
    assert num_early(shared) == 0
