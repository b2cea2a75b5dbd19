"""`kdn demo --blend`: its report on made-up events, and the whole of it on three short chapters."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kdn.cli import demo_blend
from kdn.cli.demo_blend_show import Screen, report


def shown(screen: Screen) -> str:
    console = Console(width=150, record=True, file=StringIO())
    console.print(report(screen))
    return console.export_text()


def answered(screen: Screen, way: str, ttft_s: float, moved: int, computed: int) -> None:
    def tell(event: str, **fields: Any) -> None:
        screen.answered({"event": event, "question": 0, "way": way, "at_s": ttft_s, **fields})

    tell("progress", share=0.5, fetched_bytes=10)
    tell("text", text=f"said when {way}")
    tell("done", ttft_s=ttft_s, fetched_bytes=moved, computed_tokens=computed, prompt_tokens=2000)
    if way != "read":
        tell("kld", first=0.125, mean=0.0625)


@pytest.fixture
def screen() -> Screen:
    log = Console(file=StringIO())
    screen = Screen(log, "What?", 100)
    for name in ("raise", "with"):
        screen.learned({"event": "learned", "name": name, "num_tokens": 1000})
    return screen


def test_the_report_shows_every_way_side_by_side(screen: Screen) -> None:
    for way, ttft_s in (("joined", 0.25), ("repaired", 0.25), ("both", 0.5), ("read", 2.0)):
        answered(screen, way, ttft_s, 3_000_000 if way != "read" else 0, 20)
    text = shown(screen)
    for part in ("raise (1,000 tokens)", "8.0x", "4.0x", "0.1250", "0.0625", "3.00 MB"):
        assert part in text
    assert "with seams: said when repaired" in text
    assert "No seams" not in text


def test_without_seams_it_says_so(screen: Screen) -> None:
    for way in ("joined", "looked", "read"):
        answered(screen, way, 1.0, 5, 20)
    assert "No seams are known" in shown(screen)


def test_the_chapters_are_in_every_python() -> None:
    assert all(len(text) > 500 for text in demo_blend.chapters().values())


@pytest.mark.model
def test_the_whole_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_blend, "CHAPTERS", ("pass", "break", "continue"))
    monkeypatch.setattr(demo_blend, "MAX_TOKENS", 4)
    monkeypatch.setenv("COLUMNS", "150")
    demo_blend.run(200.0, "default", "cpu")
    text = capsys.readouterr().out
    assert "Process A learned each by itself: pass (" in text
    assert "read in full" in text
    assert "joined" in text
