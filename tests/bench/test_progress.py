"""What a benchmark says of its progress where there is no terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from kdn.bench import progress
from kdn.bench.progress import ProgressLines
from tests.bench.clocks import Clock


def made(clock: Clock) -> tuple[ProgressLines, io.StringIO]:
    out = io.StringIO()
    return ProgressLines(Console(file=out, width=200), clock), out


def test_a_line_every_20_s_with_the_time_left() -> None:
    clock = Clock()
    told, out = made(clock)
    for _ in told.track(range(10), description="simulating"):
        clock.sleep(9)
    assert out.getvalue().splitlines() == [
        "simulating: 0 of 10",
        "simulating: 3 of 10, about 63 s left",
        "simulating: 6 of 10, about 36 s left",
        "simulating: 9 of 10, about 9 s left",
        "simulating: 10 of 10, 90 s",
    ]


def test_a_step_that_takes_minutes_is_not_silent() -> None:
    clock = Clock()
    told, out = made(clock)
    told.add_task("wiki", total=4)
    for _ in range(5):
        clock.sleep(12)
        told.look()
    assert out.getvalue().splitlines() == ["wiki: 0 of 4"] * 3


def test_two_stages_of_one_name_do_not_mix() -> None:
    clock = Clock()
    told, out = made(clock)
    for _ in range(2):
        for _ in told.track(range(2), description="calibrating"):
            clock.sleep(5)
    said = ["calibrating: 0 of 2", "calibrating: 2 of 2, 10 s"]
    assert out.getvalue().splitlines() == said * 2


def test_a_thread_looks_while_a_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.01)
    monkeypatch.setattr("kdn.calibrate.progress.EVERY_S", 0.02)
    out = io.StringIO()
    until = time.monotonic() + 10
    with ProgressLines(Console(file=out, width=200)) as told:
        told.add_task("wiki", total=1)
        while out.getvalue().count("wiki: 0 of 1") < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert out.getvalue().count("wiki: 0 of 1") >= 3


def test_benchmarks_say_lines_in_a_pipe_and_draw_bars_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(progress.progress_bar(), ProgressLines)
    monkeypatch.setattr(Console, "is_terminal", True)
    assert not isinstance(progress.progress_bar(), ProgressLines)
