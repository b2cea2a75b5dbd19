"""The picture of docs/codec.md: how few components carry a KV cache, by the shipped profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kdn.calibrate.tables import SCALE_ORIGIN
from kdn.codec.klt.profile import Profile
from tools.svg import Drawing, Theme

PROFILES = Path(__file__).parent.parent / "kdn" / "profiles"
LEFT, RIGHT, TOP, BOTTOM = 72, 736, 64, 272
MOST, LEAST = 64.0, 0.125  # of the vertical axis, in steps of the finest level of components


def load() -> Profile:
    [path] = PROFILES.glob("*.safetensors")
    return Profile.load(path)


def deviations(profile: Profile, group: int) -> npt.NDArray[np.float64]:
    """Standard deviation of each component, in steps of the finest level of components. Scale
    classes are quarters of an octave, from a step `3 ** (levels - 1)` times as large."""
    classes = profile.groups[group].scale.astype(np.float64)
    return np.exp2((classes - SCALE_ORIGIN) / 4) * 3 ** (profile.num_levels - 1)


def spectrum(profile: Profile, theme: Theme) -> Drawing:
    """The components of the first group of layers, largest first, and where levels end."""
    sizes = np.sort(deviations(profile, 0))[::-1]
    num_columns = profile.groups[0].weight.size
    title = f"{num_columns:,} values of a token, {len(sizes):,} components"
    drawing = Drawing(760, 330, f"{title}: standard deviations by rank", theme)
    first, last = profile.groups[0].layers
    drawing.text(LEFT, 28, title, 17, bold=True)
    told = f"SmolLM2, layers {first} to {last - 1}: standard deviation (log scale), largest first"
    drawing.text(LEFT, 48, told, 12, theme.quiet)
    for number in range(profile.num_levels - 1):
        y = _y(3.0 ** (profile.num_levels - 2 - number))
        drawing.line(LEFT, y, RIGHT, y)
        drawing.text(LEFT - 8, y + 4, f"step {number}", 12, theme.quiet, anchor="end")
    _levels(drawing, profile, len(sizes))
    drawing.curve(
        [(_x(rank, len(sizes)), _y(size)) for rank, size in enumerate(sizes)][::8], theme.with_kdn
    )
    for rank in range(0, len(sizes), 500):
        drawing.text(
            _x(rank, len(sizes)), BOTTOM + 20, f"{rank:,}", 12, theme.quiet, anchor="middle"
        )
    drawing.text(RIGHT, BOTTOM + 42, "component", 12, theme.quiet, anchor="end")
    return drawing


def _levels(drawing: Drawing, profile: Profile, count: int) -> None:
    """The last level codes values, not components."""
    for number, level in enumerate(profile.levels[:-1]):
        x = _x(level.num_components[0], count)
        drawing.line(x, TOP, x, BOTTOM)
        told = f"coded at level {number}"
        drawing.text(x - 6, TOP + 12, told, 12, drawing.theme.quiet, anchor="end")


def _x(rank: float, count: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * rank / count, 1)


def _y(size: float) -> float:
    share = np.log2(np.clip(size, LEAST, MOST) / LEAST) / np.log2(MOST / LEAST)
    return round(float(BOTTOM - (BOTTOM - TOP) * share), 1)
