"""The pictures of the README and of docs/codec.md, each for light and for dark pages.

`kdn demo --json docs/pictures/demo.json` measures, and `python -m tools.pictures` draws the
timeline from that file, so that the picture shows one real run. The other picture is a plan of how
kdn works; its figures are those of docs/operators.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import spectrum
from tools.svg import THEMES, Drawing, Theme

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
LEFT, RIGHT, WIDTH = 24, 736, 760
TICK_HEIGHT, BAR_HEIGHT, LANE = 10, 22, 34
LEVELS = (("0", 0.10), ("1", 0.31), ("2", 0.80), ("3", 2.7))
"""Of SmolLM2's profile: bits per value when this level and those before it are sent."""


def timeline(measured: dict[str, Any], theme: Theme) -> Drawing:
    """One lane for each way to answer each question, on one axis of seconds."""
    answers, learn = measured["answers"], measured["learn"]
    questions = list(dict.fromkeys(one["question"] for one in answers))
    height = 76 + len(questions) * (2 * LANE + 34) + 44
    title = f"Questions about {learn['num_tokens']:,} tokens, over {measured['mbit']:g} Mbit/s"
    drawing = Drawing(WIDTH, height, f"{title}: when the answers begin", theme)
    drawing.text(LEFT, 30, title, 17, bold=True)
    drawing.text(LEFT, 52, _machine(measured), 12, theme.quiet)
    end_s = max(1.0, 1.12 * max(one["ttft_s"] for one in answers))
    y = 76.0
    for question in questions:
        drawing.text(LEFT, y + 14, question, 14, bold=True)
        y += 26
        for one in (one for one in answers if one["question"] == question):
            _lane(drawing, y, one, (RIGHT - LEFT) / end_s)
            y += LANE
        y += 8
    _axis(drawing, y + 4, end_s)
    return drawing


def _machine(measured: dict[str, Any]) -> str:
    learn, known = measured["learn"], [one for one in measured["answers"] if one["way"] == "with"]
    moved = sum(one["stats"]["fetched_bytes"] for one in known) / len(known)
    return (
        f"SmolLM2-135M, {measured['hardware']['cpu']}. The KV cache is "
        f"{learn['fp16_bytes'] / 1e6:.0f} MB as fp16; kdn sent {moved / 1e6:.1f} MB per question."
    )


def _lane(drawing: Drawing, y: float, answer: dict[str, Any], per_s: float) -> None:
    """Until the context is in memory, then until the first token, then the tokens."""
    theme, ttft_s, with_kdn = drawing.theme, answer["ttft_s"], answer["way"] == "with"
    colour = theme.with_kdn if with_kdn else theme.without
    ready_s = min(answer["delivered_s"] or ttft_s, ttft_s)
    drawing.box(LEFT, y, ttft_s * per_s, BAR_HEIGHT, colour, opacity=0.45)
    drawing.box(LEFT, y, ready_s * per_s, BAR_HEIGHT, colour)
    for at_s in answer["text_s"]:
        if LEFT + at_s * per_s < RIGHT:
            x = LEFT + at_s * per_s
            drawing.box(x, y + BAR_HEIGHT + 2, 1.2, TICK_HEIGHT - 4, colour, radius=0)
    told = f"with kdn: {ttft_s:.1f} s" if with_kdn else f"reading it: {ttft_s:.1f} s"
    if with_kdn:
        drawing.text(LEFT + ttft_s * per_s + 8, y + 16, told, 14, colour, bold=True)
    else:
        drawing.text(LEFT + 10, y + 16, told, 14, "#ffffff", bold=True)


def _axis(drawing: Drawing, y: float, end_s: float) -> None:
    per_s = (RIGHT - LEFT) / end_s
    step_s = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100) if end_s / step <= 9)
    drawing.line(LEFT, y, RIGHT, y)
    for number in range(int(end_s / step_s) + 1):
        at_s = number * step_s
        drawing.line(LEFT + at_s * per_s, y, LEFT + at_s * per_s, y + 5)
        label = f"{at_s:g} s" if number else "asked"
        anchor = "middle" if number else "start"
        drawing.text(LEFT + at_s * per_s, y + 20, label, 12, drawing.theme.quiet, anchor=anchor)


def plan(theme: Theme) -> Drawing:
    """Who reads, what is stored, and who loads it."""
    drawing = Drawing(WIDTH, 282, "One engine reads, a node stores levels, others load them", theme)
    for x, heading, lines in (
        (24, "Engine A reads the text", ("predict values from token ids", "weigh what matters",
                                         "transform and quantise", "code the entropy")),
        (272, "A node stores one object", ("for 256 tokens, in levels",)),
        (520, "Engine B is asked about it", ("look up chunks by hash", "plan for link and deadline",
                                         "fetch some of the levels", "decode, read the question")),
    ):  # fmt: skip
        drawing.box(x, 24, 216, 196, theme.panel, edge=theme.line, radius=8)
        drawing.text(x + 16, 52, heading, 13, bold=True)
        for number, line in enumerate(lines):
            drawing.text(x + 16, 82 + 28 * number, line, 13, theme.quiet)
    drawing.line(242, 122, 269, 122, arrow=True)
    drawing.line(490, 122, 517, 122, arrow=True)
    for number, (name, bits) in enumerate(LEVELS):
        y, chosen = 96 + 29 * number, number < 3
        width = 18 + 120 * bits / LEVELS[-1][1]
        drawing.box(288, y, width, 20, theme.with_kdn, opacity=1.0 if chosen else 0.3)
        drawing.text(288 + width + 8, y + 15, f"{bits:g}", 12, theme.quiet)
        drawing.text(294, y + 15, name, 12, "#ffffff" if chosen else theme.text, bold=True)
    note = "Bits per value up to each level (fp16: 16). The default quality mostly sends 0 to 2;"
    drawing.text(24, 246, note, 13, theme.quiet)
    more = "level 3 is nearly lossless. What Engine B has to compute, it publishes in turn."
    drawing.text(24, 266, more, 13, theme.quiet)
    return drawing


def pictures(folder: Path = FOLDER) -> Iterator[tuple[str, str]]:
    """File names and their contents."""
    measured, profile = json.loads((folder / "demo.json").read_text()), spectrum.load()
    for theme in THEMES:
        yield f"demo-{theme.name}.svg", str(timeline(measured, theme))
        yield f"plan-{theme.name}.svg", str(plan(theme))
        yield f"spectrum-{theme.name}.svg", str(spectrum.spectrum(profile, theme))


if __name__ == "__main__":
    for name, content in pictures():
        (FOLDER / name).write_text(content)
