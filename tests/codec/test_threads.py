"""The shared pool: order, errors, calls within calls."""

from __future__ import annotations

import time

import pytest

from kdn.codec import threads
from kdn.codec.threads import num_cores, parallel_map


@pytest.fixture(autouse=True)
def _several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 3)


def test_results_come_in_order() -> None:
    assert num_cores() >= 1
    assert parallel_map(lambda i: i * i, range(100)) == [i * i for i in range(100)]
    assert parallel_map(str, []) == []


def test_the_first_error_is_raised() -> None:
    def fail(i: int) -> int:
        if i >= 5:
            raise KeyError(i)
        return i

    with pytest.raises(KeyError, match="5"):
        parallel_map(fail, range(10))


def test_nothing_runs_on_after_an_error() -> None:
    done = []

    def work(i: int) -> None:
        if i == 0:
            raise KeyError(i)
        time.sleep(0.02)
        done.append(i)

    with pytest.raises(KeyError):
        parallel_map(work, range(8))
    assert sorted(done) == list(range(1, 8))


def test_a_call_within_a_call_does_not_wait_for_itself() -> None:
    nested = parallel_map(lambda i: sum(parallel_map(lambda j: i * j, range(10))), range(50))
    assert nested == [45 * i for i in range(50)]
