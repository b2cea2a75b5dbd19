"""The report of a real, tiny calibration, held against what the codec itself does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.calibrate.ratios import ratio_at
from kdn.calibrate.report import (
    KEPT_WINDOWS,
    LEAST_WINDOWS,
    Report,
    interval,
    keep_out,
    kept_windows,
    make_report,
)
from kdn.calibrate.report_text import show_report
from kdn.calibrate.run import PROBE_WINDOWS, calibrate
from kdn.calibrate.steps import decoded_quality
from kdn.codec.klt import KltCodec, Profile
from kdn.engines.quality import QualityProbe
from kdn.engines.transformers import spec_of
from tests.calibrate.test_run import OPTIONS, windows


@pytest.fixture(scope="module", autouse=True)
def _hasty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.importance.STEPS", 150)
        yield


@pytest.fixture(scope="module")
def made(tiny_model: Callable[..., Any]) -> tuple[Any, Profile, Report]:
    model = tiny_model("llama")
    learnt, kept = keep_out(windows(LEAST_WINDOWS + KEPT_WINDOWS))
    profile = calibrate(model, learnt, OPTIONS)
    report = make_report(model, profile, learnt=learnt, kept_out=kept[:2], context=OPTIONS.context)
    return model, profile, report


def test_what_is_kept_out() -> None:
    enough = windows(LEAST_WINDOWS + KEPT_WINDOWS)
    learnt, kept = keep_out(enough)
    assert (len(learnt), len(kept)) == (LEAST_WINDOWS, KEPT_WINDOWS)
    assert not {id(w) for w in learnt} & {id(w) for w in kept}
    learnt, kept = keep_out(enough[:-1])
    assert len(learnt) == len(enough) - 1
    assert [id(w) for w in kept] == [id(w) for w in learnt[-PROBE_WINDOWS:]]


@pytest.mark.parametrize(("found", "expected"), [(50, 10), (49, KEPT_WINDOWS)])
def test_more_is_kept_out_where_there_is_plenty(found: int, expected: int) -> None:
    learnt, kept = keep_out(windows(1) * found, 10)
    assert (len(learnt), len(kept)) == (found - expected, expected)


@pytest.mark.parametrize(
    ("device", "values", "expected"),
    [("cpu", 11_520, 6), ("cuda", 11_520, 24), ("cuda", 32_768, 12), ("cuda", 163_840, 6)],
)
def test_how_many_windows_are_kept_out(device: str, values: int, expected: int) -> None:
    assert kept_windows(torch.device(device), values) == expected


def test_figures_are_those_of_the_codec(made: tuple[Any, Profile, Report]) -> None:
    model, profile, report = made
    kept = windows(LEAST_WINDOWS + KEPT_WINDOWS)[LEAST_WINDOWS:][:2]
    probes = [QualityProbe(model, window, OPTIONS.context) for window in kept]
    spec = spec_of(model)
    numbers = range(1, profile.num_levels + 1)
    expected = decoded_quality(KltCodec(spec, profile), probes, levels=numbers)
    values = 2 * OPTIONS.context * spec.values_per_token
    for level, one in zip(report.levels, expected, strict=True):
        assert level.ratio == pytest.approx(2 * values / one.size_bytes)
        assert level.kld == pytest.approx(one.quality.kld, rel=1e-3)
        assert level.recall_kld == pytest.approx(one.quality.recall_kld, rel=1e-3)
        assert level.kld_interval[0] <= level.kld <= level.kld_interval[1]
        assert level.decode_s > 0
    limited = [(level.ratio, level.kld) for level in report.levels]
    assert 0 < report.figures.ratio_at_quality <= ratio_at(limited, 0.01)


def test_sizes_and_tokens(made: tuple[Any, Profile, Report]) -> None:
    model, profile, report = made
    assert report.profile_bytes == len(profile.to_bytes())
    assert report.weight_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert report.figures.num_tokens == (LEAST_WINDOWS - PROBE_WINDOWS) * OPTIONS.context
    default = report.levels[report.default_level]
    assert profile.meta["expected"][default.level]["kld"] <= 0.0035
    assert report.figures.prefill_over_decode == pytest.approx(report.prefill_s / default.decode_s)


def test_is_told_as_text_json_and_plot(
    made: tuple[Any, Profile, Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = made[2]
    show_report(report, json=tmp_path / "report.json", plot=tmp_path / "report.png")
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"ratio at quality (KLD 0.01, recall KLD 0.05): {report.figures.ratio_at_quality:.1f}"
        in text
    )
    assert ("Fit for use." in text) == report.verdict.is_fit
    for finding in report.verdict.against:
        assert finding.reason in text
        assert finding.help in text
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["levels"][1]["kld"] == report.levels[1].kld
    assert told["verdict"]["is_fit"] == report.verdict.is_fit
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_calibration_text_measured_again_is_found_out(made: tuple[Any, Profile, Report]) -> None:
    model, profile, honest = made
    learnt = windows(LEAST_WINDOWS)
    copies = [window.copy() for window in learnt[:2]]
    report = make_report(model, profile, learnt=learnt, kept_out=copies, context=OPTIONS.context)
    assert report.figures.overlap == 1.0
    assert honest.figures.overlap < 0.05
    assert any("8-grams" in finding.reason for finding in report.verdict.against)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    draws = np.exp(rng.normal(-6, 0.4, (2000, 6)))
    true = math.exp(-6 + 0.4**2 / 2)
    ends = [interval(list(row)) for row in draws]
    covered = np.mean([low <= true <= high for low, high in ends])
    assert 0.92 < covered < 0.98


def test_interval_of_equal_values_is_a_point_and_of_one_value_is_open() -> None:
    assert interval([0.01] * 4) == pytest.approx((0.01, 0.01))
    assert interval([0.01]) == (0.0, math.inf)
