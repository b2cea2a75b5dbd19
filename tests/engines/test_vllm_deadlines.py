"""Loads that take long: turns, deadlines, and what was given up."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.engines.vllm import loader as loader_module
from kdn.engines.vllm.shared import SharedSession
from tests.engines.vllm_working import (
    ANSWER_S,
    AWAY,
    begin,
    ended_within,
    load,
    make_worker,
    order,
    publish,
    shared_session,
)


def test_a_deadline_that_has_passed(shared: SharedSession) -> None:
    publish(shared)
    worker, paged = make_worker(shared)
    assert load(worker, 0, 512, deadline_s=0.0) == (set(range(16)), 0)
    assert not paged.read(0, 512, range(30)).keys.any()


def test_after_a_load_that_nobody_answered_others_fail_at_once() -> None:
    with shared_session(AWAY) as shared:
        worker, _ = make_worker(shared)
        assert load(worker, 0, 512, deadline_s=0.2) == (set(range(16)), 0)
        assert worker.loader._away_until_s == 0.0  # in so little time nobody can answer
        assert load(worker, 0, 512, deadline_s=ANSWER_S + 0.1) == (set(range(16)), 0)
        began_s = time.monotonic()
        assert load(worker, 0, 512, deadline_s=30.0) == (set(range(16)), 0)
        assert time.monotonic() - began_s < 15.0


def test_a_load_that_never_ends_is_given_up(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(shared.session, "deliver", endless)
    monkeypatch.setattr(loader_module, "GRACE_S", 0.1)
    worker, _ = make_worker(shared)
    for _ in range(loader_module.LOADS_AT_ONCE + 1):  # each makes room for the next
        assert load(worker, 0, 512, deadline_s=0.1) == (set(range(16)), 0)


def test_a_turn_is_waited_for_until_the_deadline(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slow loads take all there are: the third is a miss by its own deadline, not by theirs."""
    slow = asyncio.Event()

    async def wait(*_: Any, **__: Any) -> Any:
        await slow.wait()
        raise ValueError("of no use any more")

    monkeypatch.setattr(shared.session, "deliver", wait)
    worker, _ = make_worker(shared)
    names = [f"slow {number}" for number in range(loader_module.LOADS_AT_ONCE)]
    begin(worker, *(order(0, 512, name=name, deadline_s=60.0) for name in names))
    begin(worker, order(0, 512, deadline_s=0.2))
    assert ended_within(worker, 5.0) == {"r"}
    assert worker.take_failed_blocks() == set(range(16))
    assert worker.counts["crowded"] == 1
    shared._loop.call(slow.set)
    assert ended_within(worker, 5.0) | ended_within(worker, 0.5) == set(names)
    # Those that did wait and those that did not have left all turns free.
    monkeypatch.undo()
    worker.take_failed_blocks()
    publish(shared)
    assert load(worker, 0, 512) == (set(), 512)


def test_slow_loads_do_not_keep_their_turns(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond their deadline and a little grace: one that waits longer has its turn then."""
    publish(shared)
    real, calls = shared.session.deliver, itertools.count()

    async def slow_at_first(*given: Any, **named: Any) -> Any:
        if next(calls) < loader_module.LOADS_AT_ONCE:
            await asyncio.sleep(3600)
        return await real(*given, **named)

    monkeypatch.setattr(shared.session, "deliver", slow_at_first)
    monkeypatch.setattr(loader_module, "GRACE_S", 0.2)
    worker, _ = make_worker(shared)
    begin(worker, *(order(0, 512, name=name, deadline_s=0.2) for name in ("slow", "too")))
    begin(worker, order(0, 512))
    done: set[str] = set()
    while "r" not in done:
        done |= (now := ended_within(worker, 30.0))
        assert now
        failed = worker.take_failed_blocks()
    assert done == {"slow", "too", "r"}
    assert failed == set()


def test_what_was_given_up_is_not_written(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that ends too late, and cannot be stopped: the blocks are others' by then."""
    cache = publish(shared)
    codec, late = shared.session.codec, threading.Event()
    real = codec.decode

    def stubborn(*given: Any, **named: Any) -> KVCache:
        assert late.wait(60.0)
        return real(*given, **named)

    monkeypatch.setattr(codec, "decode", stubborn)
    monkeypatch.setattr(loader_module, "GRACE_S", 0.1)
    worker, paged = make_worker(shared)
    assert load(worker, 0, 512, deadline_s=0.5) == (set(range(16)), 0)
    late.set()
    until_s = time.monotonic() + 10
    while not worker.loader._ended:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert worker.take_finished() == set()
    assert not paged.read(0, 512, range(30)).keys.any()
    monkeypatch.setattr(loader_module, "GRACE_S", 30.0)
    assert load(worker, 0, 512) == (set(), 512)
    assert torch.equal(paged.read(0, 512, range(30)).keys, cache.keys[:, :512])
