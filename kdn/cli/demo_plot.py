"""The timeline of `kdn demo`: what happened when, on both ways, on one axis of seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kdn.cli.demo_show import WAYS, Side

COLOURS = {"with": "#2a7f62", "without": "#b4552d"}
TEXT_COLOUR = "#8899aa"


def plot(
    sides: Mapping[tuple[int, str], Side], learn: Mapping[str, Any], mbit: float, out: Path
) -> None:
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(10, 6), height_ratios=(3, 2))
    lanes = sorted(sides, key=lambda lane: (lane[0], WAYS.index(lane[1])))
    for place, lane in enumerate(lanes):
        _lane(upper, place, lane, sides[lane])
    upper.set_yticks(range(len(lanes)), [f"question {n + 1}, {way} kdn" for n, way in lanes])
    upper.invert_yaxis()
    upper.set_xlabel("seconds since the question")
    upper.set_title(f"{learn['num_tokens']:,} tokens over {mbit:g} Mbit/s: from question to answer")
    _bytes(lower, sides)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _lane(axes: Any, place: int, lane: tuple[int, str], side: Side) -> None:
    """Getting the context, reading the question, then the answer's tokens."""
    colour = COLOURS[lane[1]]
    ready_s = side.delivered_s or (side.trace[-1][0] if side.trace else side.ttft_s)
    axes.barh(place, ready_s, color=colour, height=0.5)
    axes.barh(place, side.ttft_s - ready_s, left=ready_s, color=colour, alpha=0.45, height=0.5)
    axes.plot(side.text_s, [place] * len(side.text_s), "|", color=TEXT_COLOUR, markersize=9)
    axes.annotate(
        f"first token {side.ttft_s:.2f} s",
        (side.ttft_s, place - 0.32),
        fontsize=8,
        ha="left",
        va="bottom",
    )


def _bytes(axes: Any, sides: Mapping[tuple[int, str], Side]) -> None:
    for (number, way), side in sides.items():
        if way == "with" and side.trace:
            times = [at_s for at_s, _, _ in side.trace]
            moved = [fetched / 1e6 for _, _, fetched in side.trace]
            style = {"color": COLOURS[way], "alpha": 1 - 0.4 * number, "drawstyle": "steps-post"}
            axes.plot(times, moved, label=f"question {number + 1}", **style)
    axes.set_xlabel("seconds since the question")
    axes.set_ylabel("MB moved")
    axes.legend(fontsize=8)
