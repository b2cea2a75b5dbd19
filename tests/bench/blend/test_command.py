"""The whole command on a tiny model: the promised JSON, saved as it grows, a plot, a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.bench.blend import command, fitting
from kdn.bench.blend.methods import METHODS
from kdn.cli.main import spread
from kdn.engines.seam_fitting import SeamOptions
from kdn.errors import FormatError, UnsupportedError
from tests.client.letters import Letters

FIELDS = {
    "method", "share", "codec", "data", "kld_first", "kld", "top1", "f1_full", "f1_gold", "ttft_s",
    "computed_tokens", "bytes",
}  # fmt: skip
NAMES = {"full", "prefix", "join", "cacheblend", "epic", "question", "seams", "seams+question"}
SMALL = SeamOptions(joins=4, answers=2, pieces=4, join_tokens=256, rank=8)

Run = Callable[..., dict[str, Any]]


def words(seed: int, count: int) -> str:
    return "".join(map(chr, np.random.default_rng(seed).integers(97, 123, count)))


def write_set(path: Path, seed: int, items: int = 5) -> Path:
    lines = [
        {
            "question": words(seed + 50 * i, 12),
            "answers": [words(i, 4)],
            "chunks": [{"title": "", "text": words(seed + 9 * i + j, 150 + j)} for j in range(4)],
        }
        for i in range(items)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def bench(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command and returns its JSON."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(
        command, "load_model", lambda name, device: (tiny_model("llama"), Letters())
    )
    monkeypatch.setattr(command, "ORDERS", 2)
    monkeypatch.setattr("kdn.bench.blend.consistency.PIECE_TOKENS", 100)
    fit = fitting.fit_seams
    monkeypatch.setattr(
        fitting, "fit_seams", lambda *given, **named: fit(*given, **named, options=SMALL)
    )

    def run(**options: Any) -> dict[str, Any]:
        out = tmp_path / "out.json"
        defaults: dict[str, Any] = {"codecs": "exact", "ttft_tokens": 0, "json_file": out}
        command.run(**{**defaults, **options})
        loaded: dict[str, Any] = json.loads(out.read_text())
        return loaded

    return run


def test_two_sets_measured_both_ways(
    bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write_set(tmp_path / "one.jsonl", 1), write_set(tmp_path / "two.jsonl", 1000)
    story = {
        "context": words(5, 600),
        "questions": [{"question": f"{words(i, 9)}?\n (A) x\n (B) y\n (C) z"} for i in range(2)],
    }
    stories = tmp_path / "stories.jsonl"
    stories.write_text(json.dumps(story))
    found = bench(
        data=[one, two], seams_from=[two, one], choices=stories, items=1,
        plot_file=tmp_path / "out.png",
    )  # fmt: skip
    rows = found["rows"]
    assert all(set(row) >= FIELDS for row in rows)
    assert {row["method"] for row in rows} == NAMES | {"join-no-head"}
    assert len(rows) == 2 * len(METHODS)
    assert len({(row["method"], row["share"], row["codec"], row["data"]) for row in rows}) == len(
        rows
    )
    assert {row["data"] for row in rows} == {"one", "two"}
    assert all(row["items"] == 1 for row in rows)
    assert found["seams"]["one"]["from"] == "two"
    assert set(found["seams"]["one"]["expected"]) == {"0", "0.05", "0.15", "0.3"}
    assert len(found["expected"]) == 2 * 4 * 2  # sets, shares, figures
    consistent = {(one["method"], one["share"]): one for one in found["consistency"]}
    assert consistent["full", 1.0]["same_choice"] == 1
    assert consistent["seams", 0.0]["choices"] == 2 * 2
    assert (tmp_path / "out.png").stat().st_size > 1000
    shown = capsys.readouterr()
    assert "one, 1 questions, seams fitted on two" in shown.out
    assert "Expected by the seams' report" in shown.out
    assert "Time went to" in shown.out
    assert "two 1/1" in shown.err  # no terminal: a line for each question


def test_each_half_of_a_set_is_measured_with_seams_of_the_other(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FIT_ITEMS", 4)
    one = write_set(tmp_path / "one.jsonl", 1, items=9)
    lines = [json.loads(line) for line in one.read_text().split("\n")][:8]
    lines[6]["chunks"][1] = lines[0]["chunks"][2]  # what both halves have is left out of both
    one.write_text("\n".join(map(json.dumps, lines)))
    fitted, fit = [], command.fitted_on
    monkeypatch.setattr(
        command, "fitted_on", lambda items, *given: fitted.append(items) or fit(items, *given)
    )
    asked, measure = [], command.Bench.measure

    async def measures(self: Any, prompt: Any, *given: Any) -> Any:
        asked.append(prompt)
        return await measure(self, prompt, *given)

    monkeypatch.setattr(command.Bench, "measure", measures)
    methods = "seams,seams+question"
    found = bench(data=[one], seams_from=[one], items=3, orders=2, methods=methods)
    questions = [line["question"] for line in lines]
    assert [[item.question for item in items] for items in fitted] == [questions[:4], questions[4:]]
    assert [[len(item.pieces) for item in items] for items in fitted] == [
        [3, 4, 4, 4],
        [4, 4, 3, 4],
    ]
    assert [len(prompt.pieces) for prompt in asked] == [4, 4, 3, 3, 4, 4]
    for prompt, question in zip(asked, questions[4:7] + questions[:3], strict=True):
        assert question in "".join(map(chr, prompt.question))
    assert {row["method"] for row in found["rows"]} == {"full", "seams", "seams+question"}
    assert {(row["items"], row["answers"]) for row in found["rows"]} == {(3, 6)}
    assert len(found["expected"]) == 2 * 4 * 2  # halves, shares, figures
    for row in found["expected"]:
        assert row["off"] == pytest.approx(row["expected"] / row["measured"] - 1)
        (measured,) = (
            one[row["figure"]]
            for one in found["rows"]
            if one["method"] != "full" and one["share"] == row["share"]
            if one["data"] == row["data"]
        )
        assert row["measured"] == measured
    assert {(row["share"], row["figure"], row["items"]) for row in found["paired"]} == {
        # a report of two answers asks two of each half's four questions; three are measured
        (share, figure, len(both_sides(found["answers"])))
        for share in (0, 0.05, 0.15, 0.3)
        for figure in ("kld_first", "kld")
    }
    shown = capsys.readouterr().out
    assert "one, second half, 3 questions, 6 answers, seams fitted on one, first half" in shown
    assert "Reports beside measurements of the same questions" in shown


def both_sides(answers: list[dict[str, Any]]) -> set[str]:
    """Questions."""
    reported = {one["question"] for one in answers if one["codec"] == "report"}
    return reported & {one["question"] for one in answers if one["codec"] == "exact"}


def test_what_takes_long_is_measured_on_every_third_question(
    bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(data=[write_set(tmp_path / "one.jsonl", 1)], items=4)
    count = {row["method"]: row["items"] for row in found["rows"]}
    assert {name for name, items in count.items() if items < 4} == {"prefix", "join-no-head"}
    assert count["prefix"] == count["join-no-head"] == 2
    assert "* prefix and join-no-head: measured on every third question" in capsys.readouterr().out


def test_without_seams_their_rows_are_left_out(bench: Run, tmp_path: Path) -> None:
    found = bench(data=[write_set(tmp_path / "one.jsonl", 1)], items=1)
    assert {row["method"] for row in found["rows"]} == {
        "full", "prefix", "join", "join-no-head", "cacheblend", "epic", "question"
    }  # fmt: skip
    assert any("no seams" in note for note in found["notes"])


def test_rows_are_saved_as_they_come(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, count = command.Bench.measure, []

    async def stops(*given: Any) -> Any:
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return await measure(*given)

    monkeypatch.setattr(command.Bench, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        bench(data=[write_set(tmp_path / "one.jsonl", 1)])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["items"] for row in rows} == {1}


def test_what_cannot_be_measured_is_refused_first(bench: Run, tmp_path: Path) -> None:
    one, two = write_set(tmp_path / "one.jsonl", 1), write_set(tmp_path / "two.jsonl", 2)
    single = write_set(tmp_path / "single.jsonl", 3, items=1)
    with pytest.raises(UnsupportedError, match="--data"):
        bench()
    with pytest.raises(UnsupportedError, match=r"has 1 questions.* of their own"):
        bench(data=[single], seams_from=[single])
    with pytest.raises(UnsupportedError, match="methods: expected full, "):
        bench(data=[one], methods="guessing")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(one.read_bytes())
    with pytest.raises(UnsupportedError, match="nothing that"):
        bench(data=[one], seams_from=[copy])
    with pytest.raises(UnsupportedError, match="one set for all"):
        bench(data=[one], seams_from=[two, two])
    with pytest.raises(UnsupportedError, match="different names"):
        bench(data=[one, one], seams_from=[two])
    with pytest.raises(UnsupportedError, match="codecs"):
        bench(data=[one], codecs="gzip")


def test_files_may_follow_each_other() -> None:
    given = ["bench", "blend", "--data", "a", "b", "--seams-from", "b", "a", "--quick"]
    assert spread(given)[2:] == [
        "--data", "a", "--data", "b", "--seams-from", "b", "--seams-from", "a", "--quick"
    ]  # fmt: skip


def test_too_long_a_question_or_one_without_options_is_refused_first(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_set(tmp_path / "one.jsonl", 1)
    long = tmp_path / "long.jsonl"
    chunks = [{"text": words(i, 1500)} for i in range(2)]
    long.write_text(json.dumps({"question": "?", "answers": ["x"], "chunks": chunks}))
    with pytest.raises(UnsupportedError, match="this model reads 2,048"):
        bench(data=[one, long])
    monkeypatch.setattr(command.Bench, "measure", None)
    with pytest.raises(UnsupportedError, match="ttft-tokens: expected at least"):
        bench(data=[one], ttft_tokens=100_000)
    stories = tmp_path / "stories.jsonl"
    stories.write_text(json.dumps({"context": "x", "questions": [{"question": "Why?"}]}))
    with pytest.raises(FormatError, match="options"):
        bench(data=[one], choices=stories)
