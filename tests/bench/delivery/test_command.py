"""The command: all policies over small traces, its figures and files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kdn.bench.delivery import command
from kdn.bench.delivery.machines import MACHINES, offers_of, profile_levels
from kdn.bench.delivery.report import PolicyRun, summary
from kdn.cli.main import app


def test_prefill_follows_what_was_measured() -> None:
    small, large = MACHINES
    assert small.prefill_s(0, 3072) == pytest.approx(7.45, rel=0.01)
    assert small.prefill_s(0, 1000) + small.prefill_s(1000, 3072) == pytest.approx(7.45, rel=0.01)
    for tokens, measured_s in ((2048, 0.059), (8192, 0.260), (32768, 1.378)):
        assert large.prefill_s(0, tokens) == pytest.approx(measured_s, rel=0.01)


def test_sizes_are_the_profiles() -> None:
    bits, kld = profile_levels()
    assert list(bits) == sorted(bits)
    assert list(kld) == sorted(kld, reverse=True)
    offers = offers_of(MACHINES[0], 256 * 400, np.random.default_rng(0))
    mean = np.mean([offer.level_ends for offer in offers], axis=0)
    assert mean == pytest.approx(np.array(bits) / 8 * 11_520 * 256, rel=0.03)


def row(met: bool, kld: float, ttft_s: float, oracle: float = 0.01) -> PolicyRun:
    return PolicyRun("t", "8b", 2048, 1.0, 2.0, "default", 1.0, met, ttft_s, kld, oracle, 100, 1)


def test_figures_by_hand() -> None:
    told = summary(
        [
            row(True, 0.02, 0.5),
            row(True, 0.04, 0.7, 0.02),
            row(False, 9.0, 3.0),
            row(False, 9.0, 3.0, np.inf),
        ]
    )
    assert told["deadline_met_of_oracle"] == pytest.approx(2 / 3)
    assert told["kld_mean"] == pytest.approx(0.03)
    assert told["kld_mean_oracle"] == pytest.approx(0.015)
    assert told["ttft_p50_s"] == pytest.approx(1.85)
    assert told["bytes"] == 100


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "RATES_GBIT", (0.05, 5.0))
    rng = np.random.default_rng(1)
    for name in ("a", "b"):
        lines = [f"{t},{rate:.3f}" for t, rate in enumerate(rng.uniform(1, 40, 90))]
        (tmp_path / f"{name}.csv").write_text("\n".join(["t_s,mbps", *lines]) + "\n")
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = f"bench delivery --traces {tmp_path} --jobs 1 --contexts 2048".split()
    told = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(png)])
    assert told.exit_code == 0, told.output
    assert "cachegen" in told.stdout
    assert png.stat().st_size > 10_000
    results = json.loads(out.read_text())
    assert set(results["policies"]) == {"fixed", "cachegen", "mpc", "default"}
    own = results["policies"]["default"]
    assert own["runs"] == 2 * 2 * 2 * 4
    assert own["deadline_met_of_oracle"] >= 0.97
    assert own["kld_mean"] <= 1.4 * own["kld_mean_oracle"]  # steps are large with 8 chunks
    assert len(results["buckets"]) == 2 * 2 * 4
    for one in results["rows"]:
        assert not one["met"] or one["kld"] >= one["kld_oracle"] - 1e-9


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["bench", "delivery", "--traces", str(tmp_path)])
    assert told.exit_code != 0
    assert "expected traces" in str(told.exception)
    (tmp_path / "a.csv").write_text("t_s,mbps\n0,1\n1,2\n")
    for contexts in ("many", "12"):
        arguments = ["bench", "delivery", "--traces", str(tmp_path), "--contexts", contexts]
        assert contexts in str(CliRunner().invoke(app, arguments).exception)
    arguments = ["bench", "delivery", "--traces", str(tmp_path), "--policies", "clever"]
    assert "clever" in str(CliRunner().invoke(app, arguments).exception)
