"""The order of service: exact expectations on a link of one byte a second, and what must hold of
every history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdn.bench.node_orders import RIVALS
from kdn.node import scheduler
from kdn.node.scheduler import FairQueue, Queue, Ticket

QUEUES = [FairQueue, *RIVALS.values()]
"""What must hold of all of them, the benchmark's as well."""


@dataclass(frozen=True)
class Ask:
    """`frames` frames of one client that all begin to wait at `at_s`."""

    at_s: float
    client: str
    num_bytes: int
    frames: int = 1
    tenant: str = "t"


def play(queue: Queue, *asks: Ask) -> list[tuple[str, float]]:
    """Who finished when, on a link that sends a byte a second, one frame at a time."""
    arrivals = sorted(
        ((ask.at_s, ask) for ask in asks for _ in range(ask.frames)), key=lambda arrival: arrival[0]
    )
    now_s, done = 0.0, []
    while arrivals or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_s:
            at_s, ask = arrivals.pop(0)
            queue.push(Ticket(ask.tenant, ask.client, ask.num_bytes, at_s))
        ticket = queue.pop()
        now_s += ticket.num_bytes
        done.append((ticket.client, now_s))
    return done


def order(queue: Queue, *asks: Ask) -> str:
    return "".join(client for client, _ in play(queue, *asks))


def test_fair_takes_turns_among_clients() -> None:
    done = play(FairQueue(), Ask(0, "a", 10, frames=3), Ask(0, "b", 10, frames=3))
    assert done == [("a", 10), ("b", 20), ("a", 30), ("b", 40), ("a", 50), ("b", 60)]


def test_fair_shares_bytes_not_frames() -> None:
    # a sends 30 bytes a frame, b 10: three frames of b for each of a.
    told = order(FairQueue(), Ask(0, "a", 30, frames=3), Ask(0, "b", 10, frames=9))
    assert told == "abbbabbbabbb"


def test_a_light_client_waits_for_one_frame_only() -> None:
    heavy = [Ask(0, client, 10, frames=64) for client in "abcd"]
    done = play(FairQueue(), *heavy, Ask(1005, "l", 10))
    # The frame on the link ends at 1010; then the light one, first of all.
    assert ("l", 1020) in done


def test_sleeping_saves_nothing_up() -> None:
    # b slept while a was sent 100 bytes: it does not get 100 bytes ahead when it wakes.
    told = order(FairQueue(), Ask(0, "a", 10, frames=14), Ask(100, "b", 10, frames=4))
    assert told == "a" * 10 + "babababa"


def test_coming_back_does_not_wash_away_what_was_sent() -> None:
    # a asks for one frame at a time, and each time as soon as its last one is through.
    queue = FairQueue()
    queue.push(Ticket("t", "b", 10))
    queue.push(Ticket("t", "b", 10))
    queue.push(Ticket("t", "a", 30))
    assert [queue.pop().client, queue.pop().client] == ["b", "a"]
    queue.push(Ticket("t", "a", 30))
    queue.push(Ticket("t", "b", 10))
    assert "".join(queue.pop().client for _ in range(3)) == "bba"


def test_tenants_share_by_weight() -> None:
    queue = FairQueue({"gold": 3.0})
    asks = [
        Ask(0, "g", 12, frames=9, tenant="gold"),
        Ask(0, "s", 12, frames=3, tenant="silver"),
    ]
    assert order(queue, *asks) == "gsgg" + "sggg" + "sggg"


def test_many_clients_do_not_give_a_tenant_more() -> None:
    asks = [Ask(0, client, 10, frames=2, tenant="many") for client in "abcd"]
    told = order(FairQueue(), *asks, Ask(0, "z", 10, frames=8, tenant="one"))
    assert told == "azbzczdzazbzczdz"


def test_removed_tickets_are_neither_served_nor_charged() -> None:
    queue = FairQueue()
    gone = [Ticket("t", "a", 1000) for _ in range(3)]
    for ticket in gone:
        queue.push(ticket)
    queue.push(Ticket("t", "b", 10))
    for ticket in gone:
        queue.remove(ticket)
    assert len(queue) == 1
    assert queue.pop().client == "b"
    queue.push(Ticket("t", "b", 10))
    queue.push(Ticket("t", "a", 10))
    assert [queue.pop().client, queue.pop().client] == ["a", "b"]


def test_passing_by_counts_as_sent() -> None:
    queue = FairQueue()
    queue.pass_by(Ticket("t", "a", 10))
    queue.push(Ticket("t", "a", 10))
    queue.push(Ticket("t", "b", 10))
    assert [queue.pop().client, queue.pop().client] == ["b", "a"]


def test_frames_without_bytes_do_not_hold_the_others_up() -> None:
    queue = FairQueue()
    queue.push(Ticket("t", "b", 3))
    queue.push(Ticket("t", "b", 3))
    told = ""
    for _ in range(8):
        queue.push(Ticket("t", "a", 0))
        told += queue.pop().client
    assert told.count("b") == 2


def test_a_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="gold"):
        FairQueue({"gold": 0.0})


@pytest.mark.parametrize("make", QUEUES)
def test_an_empty_queue_and_a_stranger(make: Callable[[], Queue]) -> None:
    queue = make()
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(ValueError):
        queue.remove(Ticket("t", "a", 1))
    queue.push(ticket := Ticket("t", "a", 1))
    assert queue.pop() is ticket
    with pytest.raises(ValueError):
        queue.remove(ticket)


def test_invented_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that sends every frame under a new name: the tables stay small, and an honest
    client of the same tenant still gets through."""
    monkeypatch.setattr(scheduler, "MAX_FLOWS", 8)
    queue = FairQueue()
    for _ in range(3):
        queue.push(Ticket("t", "honest", 10))
    served_at = []
    for number in range(100):
        queue.push(Ticket("t", f"invented-{number}", 10))
        if queue.pop().client == "honest":
            served_at.append(number)
    assert len(served_at) == 3
    assert served_at[1] <= 10
    (level,) = (tenant.clients for tenant in queue._tenants._flows.values())
    assert len(level._flows) <= 9
    assert len(level._heap) <= 9


FLOWS = st.tuples(st.sampled_from(["p", "q", "r"]), st.sampled_from("abc"))
STEPS = st.lists(st.none() | st.tuples(FLOWS, st.integers(1, 100)), min_size=1, max_size=150)
WEIGHTS = {"p": 1.0, "q": 2.0, "r": 0.5}


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_two_flows_that_wait_are_never_further_apart_than_a_frame_of_each(
    steps: list[tuple[tuple[str, str], int] | None],
) -> None:
    """Start-time fair queueing's bound, for every pair of tenants and of one tenant's clients, over
    every stretch of time in which both have frames waiting. None among the steps is a service."""
    queue = FairQueue(WEIGHTS)
    waiting: Counter[tuple[str, ...]] = Counter()
    longest: Counter[tuple[str, ...]] = Counter()
    history: list[tuple[set[tuple[str, ...]], tuple[str, str], int]] = []
    for step in steps + [None] * len(steps):
        if step is not None:
            (tenant, client), num_bytes = step
            queue.push(Ticket(tenant, client, num_bytes))
            for flow in ((tenant,), (tenant, client)):
                waiting[flow] += 1
                longest[flow] = max(longest[flow], num_bytes)
        elif len(queue):
            before = {flow for flow, number in waiting.items() if number}
            ticket = queue.pop()
            for flow in ((ticket.tenant,), (ticket.tenant, ticket.client)):
                waiting[flow] -= 1
            history.append((before, (ticket.tenant, ticket.client), ticket.num_bytes))
    assert not len(queue)
    for one in longest:
        for other in longest:
            if one < other and len(one) == len(other) and one[:-1] == other[:-1]:
                bound = sum(longest[flow] / _weight(flow) for flow in (one, other))
                assert _widest(history, one, other) <= bound * (1 + 1e-9)


def _weight(flow: tuple[str, ...]) -> float:
    return WEIGHTS[flow[0]] if len(flow) == 1 else 1.0


def _widest(
    history: list[tuple[set[tuple[str, ...]], tuple[str, str], int]],
    one: tuple[str, ...],
    other: tuple[str, ...],
) -> float:
    """The largest difference of normalised service over any stretch in which both wait: the range
    of a running difference that starts anew when one has nothing to wait for."""
    difference, low, high, widest = 0.0, 0.0, 0.0, 0.0
    for waiting, served, num_bytes in history:
        if not {one, other} <= waiting:
            difference = low = high = 0.0
            continue
        if served[: len(one)] == one:
            difference += num_bytes / _weight(one)
        elif served[: len(other)] == other:
            difference -= num_bytes / _weight(other)
        low, high = min(low, difference), max(high, difference)
        widest = max(widest, high - low)
    return widest


@settings(max_examples=150, deadline=None)
@given(
    rivals=st.lists(st.tuples(FLOWS, st.integers(1, 100)), min_size=20, max_size=60),
    num_bytes=st.integers(1, 100),
)
def test_nobody_starves(rivals: list[tuple[tuple[str, str], int]], num_bytes: int) -> None:
    """Whatever the others ask for, and however often they come back, a frame waits for no more than
    two full frames of each other flow, tenants counted by their weight."""
    queue = FairQueue(WEIGHTS)
    coming = cycle(rivals)
    for (tenant, client), size in islice(coming, 20):
        queue.push(Ticket(tenant, client, size))
    queue.push(mine := Ticket("q", "mine", num_bytes))
    waited_bytes = 0
    for (tenant, client), size in islice(coming, 10_000):
        ticket = queue.pop()
        if ticket is mine:
            break
        waited_bytes += ticket.num_bytes
        queue.push(Ticket(tenant, client, size))
    else:
        pytest.fail("starved")
    own_tenant = 2 * 3 * 100
    other_tenants = (own_tenant / WEIGHTS["q"] + 2 * 100 / 0.5) * (WEIGHTS["p"] + WEIGHTS["r"])
    assert waited_bytes <= own_tenant + other_tenants


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, data=st.data())
@pytest.mark.parametrize("make", QUEUES)
def test_every_ticket_comes_out_once_unless_removed(
    make: Callable[[], Queue],
    steps: list[tuple[tuple[str, str], int] | None],
    data: st.DataObject,
) -> None:
    queue, inside = make(), []
    for step in steps:
        if step is not None:
            (tenant, client), num_bytes = step
            inside.append(Ticket(tenant, client, num_bytes))
            queue.push(inside[-1])
        elif inside and data.draw(st.booleans()):
            inside.remove(queue.pop())
        elif inside:
            queue.remove(inside.pop(data.draw(st.integers(0, len(inside) - 1))))
        assert len(queue) == len(inside)
    while inside:
        inside.remove(queue.pop())
    assert not len(queue)
