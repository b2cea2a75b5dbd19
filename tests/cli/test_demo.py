"""The demo's parts on made-up events, and the whole of it on a short document."""

from __future__ import annotations

import json
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdn.cli import demo
from kdn.cli.demo_show import Screen, Side, report
from kdn.cli.demo_text import TOPICS, document, manual
from kdn.errors import MismatchError

LEARNED = {
    "event": "learned", "num_tokens": 4000, "new_chunks": 16, "seconds": 12.0,
    "stored_bytes": 15_000_000, "fp16_bytes": 90_000_000,
}  # fmt: skip


def told(number: int, way: str, event: str, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"question": number, "way": way, "event": event, "at_s": at_s, **fields}


def one_question(screen: Screen, number: int, answers: dict[str, str]) -> None:
    for way, ttft_s in (("with", 0.5), ("without", 10.0)):
        screen.answered(told(number, way, "progress", 0.1, share=0.5, fetched_bytes=1000))
        if way == "with":
            screen.answered(told(number, way, "delivered", 0.4))
        screen.answered(told(number, way, "text", ttft_s, text=answers[way]))
        stats = {"ttft_s": ttft_s, "known_tokens": 3990, "computed_tokens": 10}
        moved = 3_000_000 if way == "with" else 0
        screen.answered(told(number, way, "done", ttft_s + 1, fetched_bytes=moved, **stats))
    screen.answered(told(number, "both", "kld", 0, mean=0.0021, tokens=60))


def shown(screen: Screen) -> str:
    console = Console(width=150, record=True, file=StringIO())
    console.print(report(screen))
    return console.export_text()


def test_the_report_says_what_was_measured() -> None:
    screen = Screen(Console(quiet=True), ["one?", "two?"], 100.0)
    screen.learned({"event": "loaded"})
    screen.learned(LEARNED)
    one_question(screen, 0, {"with": "It is so. Yes.", "without": "It is so. No."})
    one_question(screen, 1, {"with": "Perhaps", "without": "Never."})
    text = shown(screen)
    for part in ("10.00 s", "0.50 s", "20.0x", "3.00 MB", "1/30", "0.0021", "120 tokens"):
        assert part in text
    assert "one? (the same first sentence)" in text
    assert "two? (the first sentences differ)" in text
    assert "100 Mbit/s" in text


def test_a_long_reading_shows_how_far_it_is() -> None:
    """So that neither people nor the deadline of a silence take it for dead."""
    console = Console(file=StringIO(), width=100)
    screen = Screen(console, ["one?"], 100.0)
    screen.learned({"event": "read", "num_read": 1024, "num_tokens": 6144})
    console.print(screen._live.renderable)
    assert "1,024 of 6,144 tokens read" in console.file.getvalue()


def test_first_sentences() -> None:
    assert Side(text=" A dog. A cat.").first_sentence == "A dog."
    assert Side(text="3.5 is a number! Is it?").first_sentence == "3.5 is a number!"
    assert Side(text="no end").first_sentence == "no end"


def test_the_timeline(tmp_path: Path) -> None:
    plot = pytest.importorskip("kdn.cli.demo_plot").plot
    screen = Screen(Console(quiet=True), ["one?"], 100.0)
    one_question(screen, 0, {"with": "a", "without": "b"})
    plot(screen.sides, LEARNED, 100.0, tmp_path / "out" / "demo.png")
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_manual_is_in_every_python() -> None:
    text = manual()
    assert len(text) > 100_000
    assert text.index("assert") < 200
    assert len(TOPICS) == len(set(TOPICS))


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(demo.DemoError, match="KeyError"):
        list(demo.worker({"do": "nothing"}))


@pytest.mark.model
def test_lines_that_cannot_be_read_are_an_end() -> None:
    """Not a silence that is waited for."""
    lines = demo._lines(TextIOWrapper(BytesIO(b"one\n\xff\n"), encoding="utf-8"))
    assert lines.get(timeout=5) is None


def test_a_document_has_as_many_tokens_as_asked(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    text = document("one two three four " * 50, 100)
    assert abs(len(tokenizer(text).input_ids) - 100) <= 2
    with pytest.raises(MismatchError, match="expected at least 1000"):
        document("one two", 1000)


@pytest.mark.model
def test_the_whole_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    extent = demo.Extent(512, demo.QUESTIONS, 4)
    out, told = tmp_path / "demo.png", tmp_path / "demo.json"
    demo.run(None, extent, 100.0, "default", "auto", out, told)
    text = capsys.readouterr().out
    assert "faster" in text
    assert "known" in text
    assert out.is_file()
    results = json.loads(told.read_text())
    ways = [(one["question"], one["way"]) for one in results["answers"]]
    assert ways == [(question, way) for question in demo.QUESTIONS for way in ("with", "without")]
    assert all(one["text"] and one["ttft_s"] > 0 for one in results["answers"])
    assert results["learn"]["num_tokens"] >= 512


def test_quick_is_less_of_everything() -> None:
    quick, whole = demo.Extent.of(True, None), demo.Extent.of(False, None)
    assert quick.num_tokens < whole.num_tokens
    assert quick.max_tokens < whole.max_tokens
    assert len(quick.questions) < len(whole.questions)
    assert demo.Extent.of(True, 600).num_tokens == 600
    assert demo.Extent.of(True, 600).max_tokens == quick.max_tokens
