"""Each outcome of the verdict, from figures that differ from a good profile's in one point."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdn.calibrate.verdict import Figures, judge

GOOD = Figures(
    ratio_at_quality=54.0,
    prefill_over_decode=30.0,
    stated_kld=0.0030,
    kld=0.0032,
    kld_low=0.0024,
    kld_high=0.0043,
    num_windows=6,
    overlap=0.01,
    num_tokens=2_000_000,
    profile_share=0.017,
    is_own_text=False,
)


def test_a_good_profile_is_fit() -> None:
    verdict = judge(GOOD)
    assert verdict.is_fit
    assert verdict.against == verdict.notes == ()


@pytest.mark.parametrize(
    ("change", "reason", "helps"),
    [
        ({"ratio_at_quality": 0.0}, "no level reaches", "other text"),
        ({"ratio_at_quality": 19.9}, "ratio at quality is 19.9", "other text"),
        ({"ratio_at_quality": 15.0, "num_tokens": 9_000}, "is 15.0", "more text: 9,000 tokens"),
        ({"prefill_over_decode": 15.9}, "takes 1/15.9 of the prefill", "nothing else runs"),
        ({"overlap": 0.06}, "6% of the 8-grams kept out", "different documents"),
        ({"kld_low": 0.001, "kld_high": 0.0041}, "between 0.0010 and 0.0041", "kinds of text"),
        ({"stated_kld": 0.002}, "states a KLD of 0.0020", "other text"),
        ({"stated_kld": 0.0049, "num_tokens": 100}, "states a KLD of 0.0049", "more text"),
    ],
)
def test_each_reason_against(change: dict[str, float], reason: str, helps: str) -> None:
    verdict = judge(replace(GOOD, **change))
    assert not verdict.is_fit
    (finding,) = verdict.against
    assert reason in finding.reason
    assert helps in finding.help


@pytest.mark.parametrize(
    "change",
    [
        {"ratio_at_quality": 20.0},
        {"prefill_over_decode": 16.0},
        {"overlap": 0.05},
        {"kld_low": 0.002, "kld_high": 0.008},
        {"stated_kld": 0.0045, "kld": 0.003},
        {"num_tokens": 9_000},
    ],
)
def test_limits_themselves_pass(change: dict[str, float]) -> None:
    assert judge(replace(GOOD, **change)).is_fit


def test_a_large_profile_is_noted_but_fit() -> None:
    verdict = judge(replace(GOOD, profile_share=0.22))
    assert verdict.is_fit
    assert "22.0% of the weights" in verdict.notes[0].reason


def test_figures_of_its_own_text_are_noted() -> None:
    verdict = judge(replace(GOOD, is_own_text=True))
    assert verdict.is_fit
    assert "the model wrote itself" in verdict.notes[0].reason
    assert "kdn bench codec" in verdict.notes[0].help


def test_all_reasons_are_told_together() -> None:
    verdict = judge(replace(GOOD, ratio_at_quality=3.0, prefill_over_decode=2.0, overlap=0.5))
    assert len(verdict.against) == 3


def test_an_uncertain_kld_is_not_called_misjudged_as_well() -> None:
    (finding,) = judge(replace(GOOD, stated_kld=0.1, kld_low=0.0001)).against
    assert "differs much" in finding.reason
