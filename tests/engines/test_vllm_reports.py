"""Reports of several ranks, which do not come all at once: what holds on all is what counts."""

from __future__ import annotations

from itertools import permutations

import pytest

from kdn.engines.vllm.messages import LoadReport
from tests.engines.vllm_scheduling import World, load_of, request

REPORTS = (
    LoadReport({"r": 512}),
    LoadReport({"r": 256}),
    LoadReport({"r": 768}, {"r": 640}),
    LoadReport({"r": 768, "other": 128}),
)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_least_of_all_ranks(order: tuple[int, ...]) -> None:
    report = LoadReport()
    for number in order:
        report = report.joined(REPORTS[number])
    assert report.exact_until == {"r": 256}
    assert report.failed_from == {"r": 640}
    assert report.num_ranks("r") == 3


def test_a_load_is_taken_when_it_has_ended_on_all() -> None:
    report = REPORTS[0].joined(REPORTS[3])
    taken = report.take(2)
    assert taken.exact_until == {"r": 512}
    assert (report.exact_until, report.failed_from) == ({"other": 128}, {})
    assert not report.take(2)
    assert report.joined(LoadReport({"other": 0})).take(2).exact_until == {"other": 0}


def world_of(ranks: int) -> World:
    world = World()
    world.side._ranks = ranks
    return world


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_scheduler_waits_for_all_ranks(order: tuple[int, int]) -> None:
    """Whichever comes first: losses of one are losses, and what failed on one is computed."""
    world = world_of(2)
    asked = request("r", 1000)
    load_of(world, asked)
    reports = [LoadReport({"r": 768}), LoadReport({"r": 256}, {"r": 512})]
    world.side.loaded(reports[order[0]])
    assert "r" in world.side.loading
    world.side.loaded(reports[order[1]])
    assert "r" not in world.side.loading
    assert world.side.states["r"].failed_from == 512
    assert len(world.side.lossy) == 4  # blocks of 128 from 256 to 768


def test_each_load_has_a_number_of_its_own() -> None:
    world = world_of(2)
    numbers = [load_of(world, request(name, 1000)).number for name in "abc"]
    assert len(set(numbers)) == 3


def test_one_rank_with_other_weights_stops_all() -> None:
    world = world_of(2)
    world.side.loaded(LoadReport(weights_changed=True))
    assert world.side.counts["stopped"] == 1
    world.side.loaded(LoadReport({"r": 1}))
    assert world.side.counts["stopped"] == 1
