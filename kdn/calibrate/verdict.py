"""Is a new profile fit for use? Rules over measured figures: no model, no files.

Every rule that a profile breaks gives a finding: what is wrong, and what would help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kdn.calibrate.corpus import OVERLAP_WARNING
from kdn.calibrate.ratios import KLD_LIMIT, RECALL_LIMIT

LEAST_RATIO = 20.0
LEAST_SPEED = 16.0
"""Decoding must be this many times faster than computing, or a cache is hardly worth loading."""
MOST_UNSURE = 2.0
"""Factor, up or down, within which the mean KLD of other text must lie."""
MOST_MISJUDGED = 1.5
"""Factor between the KLD that the profile states and the one measured on text kept out: levels are
chosen by what it states."""
ENOUGH_TOKENS = 500_000
"""More text than this seldom helps; other text may."""
SENSIBLE_SHARE = 0.02
"""The largest sensible size of a profile, as a share of the weights' bytes."""


@dataclass(frozen=True)
class Figures:
    """What the verdict rests on. KLDs are those of the level that the default quality fetches."""

    ratio_at_quality: float
    prefill_over_decode: float
    stated_kld: float
    kld: float
    kld_low: float
    kld_high: float
    num_windows: int
    overlap: float
    num_tokens: int
    profile_share: float
    """The profile's size as a share of the weights' bytes."""
    is_own_text: bool
    """Whether the model wrote the text kept out itself."""


@dataclass(frozen=True)
class Finding:
    reason: str
    help: str


@dataclass(frozen=True)
class Verdict:
    """Fit for use if nothing speaks against it; `notes` do not."""

    is_fit: bool
    against: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def judge(figures: Figures) -> Verdict:
    against = tuple(_against(figures))
    return Verdict(not against, against, tuple(_notes(figures)))


def _against(figures: Figures) -> Iterator[Finding]:
    ratio = figures.ratio_at_quality
    if ratio == 0:
        yield Finding(
            f"no level reaches a KLD of {KLD_LIMIT:g} and a recall KLD of {RECALL_LIMIT:g}",
            _better_text(figures),
        )
    elif ratio < LEAST_RATIO:
        yield Finding(
            f"the ratio at quality is {ratio:.1f}, expected at least {LEAST_RATIO:g}",
            _better_text(figures),
        )
    if figures.prefill_over_decode < LEAST_SPEED:
        yield Finding(
            f"decoding takes 1/{figures.prefill_over_decode:.1f} of the prefill, expected at most "
            f"1/{LEAST_SPEED:g}",
            "measure again while nothing else runs; else take fewer components or smaller groups "
            "of layers, which costs ratio",
        )
    yield from _doubts(figures)


def _doubts(figures: Figures) -> Iterator[Finding]:
    """Reasons not to believe the figures themselves."""
    if figures.overlap > OVERLAP_WARNING:
        yield Finding(
            f"{figures.overlap:.0%} of the 8-grams kept out also occur in the calibration text, so "
            "these figures say too much",
            "give text that repeats itself less, or several different documents",
        )
    if figures.kld_high > MOST_UNSURE**2 * figures.kld_low:
        yield Finding(
            f"the KLD differs much between the {figures.num_windows} windows kept out: their mean "
            f"lies between {figures.kld_low:.4f} and {figures.kld_high:.4f} (95 %)",
            "calibrate on several kinds of text, as many of each as you serve",
        )
    elif _factor(figures.kld, figures.stated_kld) > MOST_MISJUDGED:
        yield Finding(
            f"the profile states a KLD of {figures.stated_kld:.4f}, on text kept out it is "
            f"{figures.kld:.4f}: levels would be chosen wrongly",
            _better_text(figures),
        )


def _notes(figures: Figures) -> Iterator[Finding]:
    if figures.profile_share > SENSIBLE_SHARE:
        yield Finding(
            f"the profile is {figures.profile_share:.1%} of the weights, more than "
            f"{SENSIBLE_SHARE:.0%}",
            "that is usual for small models: their vocabulary is a large part of them",
        )
    if figures.is_own_text:
        yield Finding(
            "all this was measured on text that the model wrote itself",
            "`kdn bench codec --codecs klt --text FILES` measures on yours",
        )


def _better_text(figures: Figures) -> str:
    if figures.num_tokens < ENOUGH_TOKENS:
        return (
            f"more text: {figures.num_tokens:,} tokens were read, {ENOUGH_TOKENS:,} are usually "
            "enough"
        )
    return "other text: more kinds of it, and most of the kind that you serve"


def _factor(one: float, other: float) -> float:
    """How many times the larger is the smaller."""
    small, large = sorted((one, other))
    return large / small if small > 0 else float("inf") if large > 0 else 1.0
