"""Recorded links: bytes by time and back, scaling, files that are no traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdn.bench.delivery.trace import LinkTrace, load_trace
from kdn.errors import FormatError

THREE = LinkTrace(np.array([0.0, 1.0, 3.0]), np.array([10.0, 0.0, 20.0]), 4.0)


def test_bytes_by_time_over_several_rounds() -> None:
    told = [THREE.bytes_by(t) for t in (0, 0.5, 1, 2, 3, 3.5, 4, 4.5, 9)]
    assert told == [0, 5, 10, 10, 10, 20, 30, 35, 70]


def test_time_of_bytes_is_the_first_moment() -> None:
    assert [THREE.time_of(b) for b in (0, 5, 10, 20, 30, 35, 60)] == [0, 0.5, 1, 3.5, 4, 4.5, 8]


def test_a_start_within_the_recording() -> None:
    later = THREE.scaled(THREE.mean_rate, 1.0, start_s=2.0)
    assert [later.bytes_by(t) for t in (0, 1, 1.5, 2, 3)] == [0, 0, 10, 20, 30]
    assert [later.time_of(b) for b in (10, 20, 30)] == [1.5, 2.0, 3.0]
    assert later.rate_at(0.5) == 0
    assert later.rate_at(2.5) == 10


@given(
    st.lists(st.sampled_from([0.0, 1.0, 7.5, 1000.0]), min_size=1, max_size=6),
    st.floats(0, 30),
    st.floats(0, 1e4),
)
def test_inverse(rates: list[float], start_s: float, num_bytes: float) -> None:
    trace = LinkTrace(np.arange(len(rates)) * 1.5, np.array([*rates[:-1], 3.0]), len(rates) * 1.5)
    trace = trace.scaled(11.0, 0.5, start_s)
    at_s = trace.time_of(num_bytes)
    assert trace.bytes_by(at_s) == pytest.approx(num_bytes, abs=1e-6, rel=1e-9)
    if at_s > 1e-3:
        assert trace.bytes_by(at_s - 1e-3) < num_bytes + 1e-6


def test_scaling_keeps_the_shape() -> None:
    fast = THREE.scaled(1e9, 0.01)
    assert fast.mean_rate == pytest.approx(1e9)
    assert fast.period_s == pytest.approx(0.04)
    assert fast.rates[1] == 0
    assert fast.rates[2] == pytest.approx(2 * fast.rates[0])


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text("t_s,mbps\n0.000,8\n2.000,16\n4,0\n")
    trace = load_trace(path)
    assert trace.period_s == 6
    assert trace.bytes_by(3) == pytest.approx(4e6)


@pytest.mark.parametrize(
    "text",
    ["", "t_s,mbps\n", "t_s,mbps\n0,1\n",
     "a,b\n0,1\n1,2\n", "t_s,mbps\n0,1\n1\n", "t_s,mbps\n0,1\n0,2\n",
     "t_s,mbps\n0,-1\n1,2\n", "t_s,mbps\n0,0\n1,0\n", "t_s,mbps\n0,nan\n1,2\n",
     "t_s,mbps\n0,x\n1,2\n"],
)  # fmt: skip
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"wrong\.csv"):
        load_trace(path)
    with pytest.raises(FormatError):
        load_trace(tmp_path / "absent.csv")
