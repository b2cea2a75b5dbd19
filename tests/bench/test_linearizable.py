"""The checker of names finds what is wrong, and finds nothing wrong with real regions."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop

from kdn.bench.cluster.history import DEFAULT, LATEST, WRITE, Operation, check, check_kept
from kdn.bench.cluster.linearizable import Plan, Report, run


def op(
    kind: str, began_s: float, ended_s: float, version: int, *, client: int = 0, done: bool = True
) -> Operation:
    """Of the name "n", whose version 3 has the value "v3"."""
    value = f"v{version}" if version else None
    etag = f"e{version}" if version and done else None
    told = version if done else 0
    return Operation(client, 0, kind, "n", began_s, ended_s, done, told, value, etag)


def rules(*operations: Operation) -> list[str]:
    return [one.rule for one in check(operations, max_stale_s=1.0)]


def test_what_regions_may_answer() -> None:
    assert not rules(
        op(LATEST, 0, 1, 0),
        op(WRITE, 1, 2, 1),
        op(LATEST, 1.5, 3, 0, client=1),  # it began before the write was acknowledged
        op(DEFAULT, 2.5, 2.6, 0, client=2),  # half a second old
        op(WRITE, 3, 4, 2, client=1, done=False),  # never answered, but it happened
        op(LATEST, 5, 6, 2, client=1),
        op(WRITE, 6, 7, 3),
        op(DEFAULT, 7.5, 8, 2, client=2),
    )


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (op(LATEST, 3, 4, 0, client=1), "latest"),  # after version 1 was acknowledged
        (op(LATEST, 1.5, 1.6, 1, client=1), None),
        (op(LATEST, 0.2, 0.5, 1, client=1), "latest"),  # before anybody wrote it
        (op(WRITE, 3, 4, 1, client=1), "latest"),  # a version is made once
        (op(DEFAULT, 3.5, 4, 0, client=1), "stale"),
        (op(DEFAULT, 2.5, 3, 0, client=1), None),
        (op(DEFAULT, 2.5, 3, 0, client=0), "monotonic"),  # it wrote version 1 itself
    ],
)
def test_each_rule_can_be_broken(wrong: Operation, rule: str | None) -> None:
    found = rules(op(LATEST, 0, 0.1, 0), op(WRITE, 1, 2, 1), wrong)
    assert set(found) == ({rule} if rule else set())


def test_other_values_and_lost_versions() -> None:
    write = op(WRITE, 1, 2, 1)
    other = Operation(1, 0, LATEST, "n", 3, 4, True, 1, "v9", "e1")
    assert set(rules(write, other)) == {"latest"}
    assert not check_kept([write], {"n": {1: "e1"}}, 100)
    for kept in ({}, {"n": {1: "other"}}, {"n": {2: "e2"}}):
        [lost] = check_kept([write], kept, 100)
        assert lost.rule == "lost"
    assert not check_kept([write], {"n": {101: "e101"}}, 100)  # long forgotten


def carried_out(folder: Path, **plan: object) -> Report:
    return uvloop.run(run(folder, Plan(operations=300, **plan)))  # type: ignore[arg-type]


def test_regions_keep_their_promises(tmp_path: Path) -> None:
    report = carried_out(tmp_path, faults=4, fault_s=0.8, rate_per_s=150.0, names=3)
    assert not report.violations
    assert sum(report.faults.values()) == 4
    assert report.counts[WRITE] >= 20
    assert min(report.counts[LATEST], report.counts[DEFAULT]) >= 50


def test_a_planted_bug_is_found(tmp_path: Path) -> None:
    """A region that answers a read of the latest from its copy, while its feed is late."""
    report = carried_out(
        tmp_path, faults=2, fault_s=1.0, kinds=("hold",), rate_per_s=200.0, names=2,
        bugs=("answer-latest-from-copy",),
    )  # fmt: skip
    assert report.stale_force_latest
    assert not report.acknowledged_lost
