"""Cores that a process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdn.session.cores import usable_cores


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def write(place: Path, **files: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("_", ".", 1)).write_text(text + "\n")


def cores(folder: Path) -> int:
    return usable_cores(folder / "groups", folder / "own")


def test_without_a_quota_all_that_it_may_run_on(tmp_path: Path) -> None:
    assert cores(tmp_path) == 16
    write(tmp_path / "groups", cpu_max="max 100000")
    assert cores(tmp_path) == 16
    for odd in ("", "one two", "100000", "400000 0", "-1 100000"):
        write(tmp_path / "groups", cpu_max=odd)
        assert cores(tmp_path) == 16


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("400000 100000", 4), ("450000 100000", 4), ("50000 100000", 1), ("3200000 100000", 16)],
)
def test_a_containers_quota(tmp_path: Path, quota: str, expected: int) -> None:
    write(tmp_path / "groups", cpu_max=quota)
    assert cores(tmp_path) == expected


def test_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pods/one\n")
    write(tmp_path / "groups" / "pods" / "one", cpu_max="max 100000")
    write(tmp_path / "groups" / "pods", cpu_max="600000 100000")
    write(tmp_path / "groups" / "others", cpu_max="100000 100000")
    assert cores(tmp_path) == 6


def test_version_1(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:cpu,cpuacct:/pod\n3:memory:/pod\n")
    group = tmp_path / "groups" / "cpu,cpuacct" / "pod"
    write(group, cpu_cfs_quota_us="300000", cpu_cfs_period_us="100000")
    assert cores(tmp_path) == 3
    write(group, cpu_cfs_quota_us="-1")
    assert cores(tmp_path) == 16


def test_groups_of_other_controllers_say_nothing_of_cores(tmp_path: Path) -> None:
    """In version 1 each controller has a tree of its own."""
    (tmp_path / "own").write_text("4:memory:/pod\n1:cpu:/\n")
    group = tmp_path / "groups" / "cpu" / "pod"
    write(group, cpu_cfs_quota_us="100000", cpu_cfs_period_us="100000")
    assert cores(tmp_path) == 16
    (tmp_path / "own").write_bytes(b"1:cpu:/\xff\n")  # a name in no known coding
    assert cores(tmp_path) == 16
