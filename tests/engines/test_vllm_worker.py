"""The worker's side beside its loads: what is published, and that weights are watched."""

from __future__ import annotations

import time

import pytest

from kdn.cache.keys import cut
from kdn.engines.vllm.messages import SaveOrder, Step
from kdn.engines.vllm.shared import SharedSession
from tests.engines.vllm_working import (
    SPACE,
    TOKENS,
    begin,
    ended_within,
    load,
    make_worker,
    order,
    publish,
)


def test_a_full_queue_publishes_nothing(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "has_room", lambda: False)
    worker, _ = make_worker(shared)
    worker.begin(Step(saves=(SaveOrder("r", tuple(cut(TOKENS, SPACE)), tuple(range(20))),)))
    worker.save()
    assert worker.counts["unpublished_chunks"] == 3
    assert worker.counts["published_chunks"] == 0


def test_nothing_is_published_with_other_weights(shared: SharedSession) -> None:
    worker, _ = make_worker(shared, lambda: True)
    step = Step(
        saves=(SaveOrder("r", tuple(cut(TOKENS, SPACE)), tuple(range(20))),), num_tokens=600
    )
    worker.begin(step)
    worker.save()
    assert worker.take_report().weights_changed
    worker.save()
    assert not worker.take_report().weights_changed  # told once
    assert worker.counts["published_chunks"] == 0
    time.sleep(0.1)
    assert shared.session.publisher.counts.published == 0


def test_what_was_loaded_is_not_used_with_other_weights(shared: SharedSession) -> None:
    """They were replaced while it was on its way; later ones do not even begin, and old weights
    that come back do not help."""
    publish(shared)
    answers = iter([False, True])
    worker, _ = make_worker(shared, lambda: next(answers))
    assert load(worker, 0, 512) == (set(), 512)
    begin(worker, order(0, 512))
    assert ended_within(worker, 30.0) == {"r"}
    assert worker.take_failed_blocks() == set(range(16))
    report = worker.take_report()
    assert (report.weights_changed, report.exact_until) == (True, {"r": 0})
    assert load(worker, 0, 512) == (set(range(16)), 0)
    assert len(worker.loader) == 0


def test_weights_are_looked_at_only_when_it_matters(shared: SharedSession) -> None:
    def never() -> bool:
        raise AssertionError("a step that publishes and loads nothing")

    worker, _ = make_worker(shared, never)
    worker.begin(Step(num_tokens=1))
    worker.start_loads()
    worker.save()
    assert worker.take_finished() == set()
