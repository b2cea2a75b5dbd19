"""Making the profile of a model: `kdn calibrate`. `command.py` chooses the settings, and `run.py`
runs the steps in order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kdn.defaults import DEVICE

if TYPE_CHECKING:
    from kdn.calibrate.run import CalibrationOptions

__all__ = ["make_profile"]


def make_profile(
    model: str,
    *,
    text: list[Path] | None = None,
    out: Path | None = None,
    tokens: int | None = None,
    minutes: float | None = None,
    operations: int | None = None,
    device: str = DEVICE,
    options: CalibrationOptions | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> Path:
    """Calibrate `model` on text files (or on what every Python carries; `self`: on what the model
    writes itself), showing progress, and write the profile where `open_codec` finds it, or to
    `out`. About `tokens` of the text are read; `minutes` limit that and what follows.
    `operations`: multiplications that decoding a value may take. An interrupted run is resumed. It
    ends with a report: also as JSON, and as a plot."""
    from kdn.calibrate.command import Request, run

    asked = Request(
        model, text or (), out=out, tokens=tokens, minutes=minutes, operations=operations,
        device=device, options=options, json=json, plot=plot,
    )  # fmt: skip
    return run(asked)
