"""Turns at the way out, on an event loop whose clock jumps to the next timer: exact times."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kdn.errors import FormatError
from kdn.node.egress import BusyError, Egress
from kdn.node.scheduler import FairQueue
from kdn.node.traces import ConstantRate, TraceRate

BYTE_PER_S = 8.0
"""Bits per second of a link that sends one byte a second."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will wake anybody"
            self.now_s += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """Its timers are late by `late_s`, all of them."""

    def __init__(self, late_s: float) -> None:
        self._jump = _Jump()
        self._late_s = late_s
        super().__init__(self._jump)
        self._clock_resolution = 1e-9

    def call_at(self, when: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        return super().call_at(when + self._late_s, *arguments, **options)

    def time(self) -> float:
        return self._jump.now_s


def run(main: Callable[[], Coroutine[Any, Any, None]], late_s: float = 0.0) -> None:
    with asyncio.Runner(loop_factory=lambda: _Loop(late_s)) as runner:
        runner.run(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def send(egress: Egress, client: str, sizes: list[int], told: list[Any], tenant: str) -> None:
    for num_bytes in sizes:
        async with egress.turn(tenant, client, num_bytes) as turn:
            told.append((client, round(now_s(), 6), round(turn.waited_s, 6)))


def test_a_free_way_costs_no_time() -> None:
    async def main() -> None:
        told: list[Any] = []
        await send(Egress(FairQueue()), "a", [10, 10], told, "t")
        assert told == [("a", 0, 0), ("a", 0, 0)]

    run(main)


def test_a_limited_link_sends_one_frame_after_the_other() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue(), BYTE_PER_S), list[Any]()
        await asyncio.gather(
            send(egress, "a", [10, 10], told, "t"), send(egress, "b", [5, 5, 5, 5], told, "t")
        )
        # Whoever was sent fewer bytes goes first; of equals the one who waits longer.
        assert told == [
            ("a", 10, 10), ("b", 15, 15), ("b", 20, 5), ("a", 30, 20), ("b", 35, 15), ("b", 40, 5),
        ]  # fmt: skip

    run(main)


def test_weights_hold_though_everybody_asks_for_one_frame_at_a_time() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue({"gold": 3.0}), BYTE_PER_S), list[Any]()
        await asyncio.gather(
            send(egress, "g", [10] * 9, told, "gold"), send(egress, "s", [10] * 3, told, "silver")
        )
        assert "".join(client for client, _, _ in told) == "gsgg" + "sggg" + "sggg"

    run(main)


def test_an_idle_link_saves_nothing_up() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue(), BYTE_PER_S), list[Any]()
        await send(egress, "a", [10], told, "t")
        await asyncio.sleep(100)
        await send(egress, "a", [10], told, "t")
        assert told == [("a", 10, 10), ("a", 120, 10)]

    run(main)


def test_late_timers_do_not_slow_the_link() -> None:
    async def main() -> None:
        told: list[Any] = []
        await send(Egress(FairQueue(), 8e6), "a", [10_000] * 50, told, "t")
        assert told[-1][1] == pytest.approx(0.5, abs=0.003)  # not 50 times 12 ms

    run(main, late_s=0.002)


def test_a_busy_event_loop_does_not_slow_the_link() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue(), 8e6), list[Any]()
        # Two senders take turns, so there is always one that has waited meanwhile.
        one = send(egress, "a", [10_000] * 25, told, "t")
        await asyncio.gather(one, send(egress, "b", [10_000] * 25, told, "t"))
        assert told[-1][1] == pytest.approx(0.5, abs=0.02)  # not 50 times 18 ms

    run(main, late_s=0.008)


def test_a_trace_shapes_the_link(tmp_path: Path) -> None:
    (tmp_path / "net.csv").write_text("t_s,mbps\n5.0,0.000008\n15.0,0\n20.0,0.000016\n")

    async def main() -> None:
        egress = Egress(FairQueue(), TraceRate.read(tmp_path / "net.csv"))
        told: list[Any] = []
        await send(egress, "a", [10, 4, 6, 10, 1], told, "t")
        # A byte a second for 10 s, a gap of 5 s, two bytes a second for 5 s, and again.
        assert [at_s for _, at_s, _ in told] == [10, 17, 20, 30, 35.5]

    run(main)


def test_slots_bound_the_turns_at_a_time() -> None:
    async def main() -> None:
        egress, running, most = Egress(FairQueue(), slots=3), 0, 0

        async def hold() -> None:
            nonlocal running, most
            async with egress.turn("t", "a", 10):
                running += 1
                most = max(most, running)
                await asyncio.sleep(1)
                running -= 1

        await asyncio.gather(*(hold() for _ in range(10)))
        assert most == 3
        assert now_s() == pytest.approx(4)
        assert len(egress) == 0

    run(main)


def test_what_went_out_at_once_counts_as_sent() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue(), slots=1), list[Any]()
        async with egress.turn("t", "a", 10):
            waiting = [asyncio.create_task(send(egress, who, [10], told, "t")) for who in "ab"]
            await asyncio.sleep(1)
        await asyncio.gather(*waiting)
        assert [client for client, _, _ in told] == ["b", "a"]

    run(main)


def test_a_queue_is_bounded_per_tenant() -> None:
    async def main() -> None:
        egress = Egress(FairQueue(), BYTE_PER_S, max_queued=2)
        told: list[Any] = []
        waiting = []
        for _ in range(3):  # one goes onto the link, two wait
            waiting.append(asyncio.create_task(send(egress, "a", [10], told, "t")))
            await asyncio.sleep(1)
        with pytest.raises(BusyError, match="2 frames"):
            await send(egress, "a", [10], told, "t")
        await asyncio.gather(*waiting, send(egress, "z", [10], told, "other"))
        assert [client for client, _, _ in told] == ["a", "z", "a", "a"]

    run(main)


def test_no_turn_is_waited_for_for_ever() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue(), slots=1, max_wait_s=5), list[Any]()
        async with egress.turn("t", "blocked", 1):
            with pytest.raises(BusyError, match="5 s"):
                await send(egress, "a", [10], told, "t")
            assert now_s() == 5
            assert len(egress) == 0
        await send(egress, "b", [10], told, "t")
        assert told == [("b", 5, 0)]

    run(main)


@pytest.mark.parametrize("cancel_at_s", [0.0, 5.0, 15.0, 20.0, 25.0])
def test_cancelling_at_any_moment_loses_no_slot(cancel_at_s: float) -> None:
    """While it is in the queue, on the link, just granted, or in its turn."""

    async def main() -> None:
        egress, told = Egress(FairQueue(), BYTE_PER_S, slots=1), list[Any]()

        async def hold() -> None:
            async with egress.turn("t", "victim", 10):
                await asyncio.sleep(7)

        first = asyncio.create_task(send(egress, "a", [10], told, "t"))
        victim = asyncio.create_task(hold())
        last = asyncio.create_task(send(egress, "b", [10], told, "t"))
        await asyncio.sleep(cancel_at_s)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        await asyncio.gather(first, last)
        # At 25 the slot has kept the link waiting for 5 s: a quarter of one is made up for.
        expected = {0.0: 20, 5.0: 20, 15.0: 30, 20.0: 30, 25.0: 34.75}[cancel_at_s]
        assert told[-1][:2] == ("b", expected)
        assert len(egress) == 0
        assert egress._free_slots == 1

    run(main)


def test_cancelled_between_the_grant_and_its_turn() -> None:
    async def main() -> None:
        egress, told = Egress(FairQueue(), slots=1), list[Any]()
        turn = egress.turn("t", "first", 1)
        await turn.__aenter__()
        victim = asyncio.create_task(send(egress, "victim", [10], told, "t"))
        await asyncio.sleep(1)
        await turn.__aexit__(None, None, None)
        asyncio.get_running_loop().call_soon(victim.cancel)  # directly after the dispatch
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert told == []
        await send(egress, "b", [10], told, "t")
        assert told == [("b", 1, 0)]

    run(main)


def test_an_error_in_a_turn_gives_the_slot_back() -> None:
    async def main() -> None:
        egress = Egress(FairQueue(), slots=1)
        for _ in range(3):
            with pytest.raises(ConnectionResetError):
                async with egress.turn("t", "a", 10):
                    raise ConnectionResetError
        assert egress._free_slots == 1

    run(main)


@pytest.mark.parametrize("arguments", [{"slots": 0}, {"max_queued": 0}, {"rate": 0.0}])
def test_impossible_settings(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Egress(FairQueue(), **arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at the top"),
        ("time,mbps\n0,1\n", "at the top"),
        ("t_s,mbps\n", "samples"),
        ("t_s,mbps\n0,1,2\n", "two numbers"),
        ("t_s,mbps\n0,fast\n", "two numbers"),
        ("t_s,mbps\n0,1\n0,1\n", "rise"),
        ("t_s,mbps\n0,0\n1,0\n", "rates"),
        ("t_s,mbps\n0,-1\n1,2\n", "rates"),
        ("t_s,mbps\n0,nan\n1,2\n", "finite"),
    ],
)
def test_a_broken_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "net.csv").write_text(text)
    with pytest.raises(FormatError, match=message):
        TraceRate.read(tmp_path / "net.csv")


def test_a_trace_agrees_with_small_steps() -> None:
    times_s, rates = [0.0, 1.0, 1.5, 4.0], [80.0, 0.0, 24.0, 8.0]
    trace = TraceRate(times_s, rates)
    ends_s = [*times_s[1:], 6.5]
    now, step = 0.0, 1e-3
    for num_bytes in (3, 17, 1, 250, 40):
        expected, bits = now, 8.0 * num_bytes
        while bits > 1e-9:
            at = next(i for i, end_s in enumerate(ends_s) if (expected + step / 2) % 6.5 < end_s)
            bits -= rates[at] * step
            expected += step
        now = trace.finish_s(now, num_bytes)
        assert now == pytest.approx(expected, abs=2 * step * len(times_s))


def test_a_constant_rate_is_a_trace_of_one_sample() -> None:
    assert ConstantRate(1e6).finish_s(3.0, 125_000) == pytest.approx(4.0)
    assert TraceRate([0.0], [1e6]).finish_s(3.0, 125_000) == pytest.approx(4.0)
