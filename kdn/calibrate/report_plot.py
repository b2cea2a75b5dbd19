"""The report of `kdn calibrate` as a picture: both divergences over compression, level by level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdn.calibrate.ratios import KLD_LIMIT, RECALL_LIMIT
from kdn.calibrate.report import Interval, Report

_COLOUR, _GREY = "#d1495b", "#444444"
_SMALLEST = 1e-6


def plot_report(path: Path, report: Report) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    levels = report.levels
    ratios = [level.ratio for level in levels]
    klds = [(level.kld, level.kld_interval) for level in levels]
    recalls = [(level.recall_kld, level.recall_interval) for level in levels]
    _draw(left, "continuation", ratios, klds, KLD_LIMIT)
    _draw(right, "recall", ratios, recalls, RECALL_LIMIT)
    for panel in (left, right):
        if report.figures.ratio_at_quality:
            panel.axvline(
                report.figures.ratio_at_quality, color=_GREY, linewidth=0.9, linestyle=":"
            )
    figure.suptitle(_title(report), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=140, format="png")


def _title(report: Report) -> str:
    verdict = "fit for use" if report.verdict.is_fit else "not fit for use"
    return (
        f"Ratio at quality {report.figures.ratio_at_quality:.1f}, decoded in "
        f"1/{report.figures.prefill_over_decode:.0f} of the prefill: {verdict}"
    )


def _draw(
    panel: Any, task: str, ratios: list[float], points: list[tuple[float, Interval]], limit: float
) -> None:
    means = [max(mean, _SMALLEST) for mean, _ in points]
    low, high = ([max(ends[i], _SMALLEST) for _, ends in points] for i in (0, 1))
    panel.fill_between(ratios, low, high, color=_COLOUR, alpha=0.15, linewidth=0)
    panel.plot(ratios, means, marker="o", color=_COLOUR, linewidth=2.2)
    panel.axhline(limit, color=_GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(f"{task}, 95 % interval of the mean; limit {limit:g}", fontsize=10, loc="left")
    panel.set_xlabel("times smaller than fp16")
    panel.set_ylabel("KLD (nats per token)")
    panel.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    panel.grid(color="#e3e3e3", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)
