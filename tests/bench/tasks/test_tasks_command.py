"""The whole command on a tiny model: rows that add up, a file that is gone on from, a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdn.bench.tasks import command, documents, following, lines
from kdn.bench.tasks.measure import Bench, _batches
from kdn.cli.main import spread
from kdn.codec.klt import KltCodec
from kdn.errors import FormatError, UnsupportedError
from tests.bench.tasks.test_sources import PAGE, record_of_lines, write
from tests.client.letters import Letters
from tests.codec.klt_profile import make_profile

Run = Callable[..., dict[str, Any]]
KLD = (0.1, 0.02, 0.004, 0.0005)
CHOICE = {
    "context": "a story about a cat. " * 20,
    "questions": [{"question": "Who?\n (A) a cat\n (B) a dog", "answers": ["(A) a cat"]}],
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over it and so on. " * 30)
    asked = {"question": "when was the tower built", "answers": ["1887"]}
    return [
        write(tmp_path / "lines.jsonl", record_of_lines(24)),
        write(tmp_path / "choices.jsonl", CHOICE),
        write(tmp_path / "pages.jsonl", {"context": PAGE, "questions": [asked]}),
        text,
    ]


@pytest.fixture
def bench(tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command, with klt alone unless told otherwise, and returns its JSON."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    model = tiny_model("llama")
    monkeypatch.setattr(command, "load_model", lambda name, device: (model, Letters()))
    monkeypatch.setattr(command, "FITTED_WINDOW", 256)
    monkeypatch.setattr(KltCodec, "expected_kld", KLD)

    monkeypatch.setattr(
        command, "open_codec", lambda name, spec: KltCodec(spec, make_profile(spec))
    )
    for module, name, value in (
        (lines, "NUM_LINES", 12), (lines, "QUESTIONS", 4), (documents, "PART_CHARS", 300),
        (following, "CONTEXT_TOKENS", 320), (following, "FOLLOWING_TOKENS", 40),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)

    def run(data: list[Path], **options: Any) -> dict[str, Any]:
        out = options.pop("json_file", tmp_path / "out.json")
        given = {"calibration": [data[-1]], "without_cachegen": True, **options}
        command.run(data=data, json_file=out, **given)
        loaded: dict[str, Any] = json.loads(out.read_text())
        return loaded

    return run


def test_every_task_in_every_way(
    bench: Run, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(files, plot_file=tmp_path / "plot.png")
    levels = len(found["settings"]["ways"]) - 3
    assert {row["task"] for row in found["rows"]} == {"lines", "choices", "pages", "text"}
    assert len(found["rows"]) == 4 * (levels + 3)
    for row in found["rows"]:
        if row["way"] == "exact":
            assert (row["agreement"], row["ratio"]) == (1, 1)
            assert row["kept"] in (1, None)
    by = {(row["task"], row["way"]): row for row in found["rows"]}
    assert by["lines", "exact"]["items"] == 8
    assert by["text", "klt 1"]["ratio"] > by["text", f"klt {levels}"]["ratio"]
    agreed = [by["text", f"klt {level + 1}"]["agreement"] for level in range(levels)]
    assert agreed[0] < agreed[-1]
    assert any(name.startswith("text: default quality keeps") for name in found["passes"])
    assert (tmp_path / "plot.png").stat().st_size > 1000
    told = capsys.readouterr()
    assert "12 consecutive lines" in told.out
    assert "text: default quality keeps" in told.out
    assert "tokens asked about" in told.err


def test_what_was_measured_is_not_measured_again(
    bench: Run, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    measure = Bench.measure

    def counted(self: Bench, task: Any, problem: Any, *rest: Any) -> Any:
        measured.append(problem.name)
        return measure(self, task, problem, *rest)

    monkeypatch.setattr(Bench, "measure", counted)
    first = bench(files, items=1)
    assert len(measured) == 4
    again = bench(files, items=2)
    assert measured[4:] == ["l24+12"]  # the second part of the lines
    assert [one["name"] for one in again["contexts"]][-1] == "l24+12"
    assert again["contexts"][: len(first["contexts"])] == first["contexts"]
    monkeypatch.setattr(KltCodec, "expected_kld", (0.1, 0.02, 0.004, 0.002))
    with pytest.raises(UnsupportedError, match="another enough_kld"):
        bench(files)


def test_each_context_is_saved_when_it_is_done(
    bench: Run, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Bench.measure

    def fails(self: Bench, task: Any, problem: Any, *rest: Any) -> Any:
        if task.kind == "documents":
            raise KeyboardInterrupt
        return measure(self, task, problem, *rest)

    monkeypatch.setattr(Bench, "measure", fails)
    with pytest.raises(KeyboardInterrupt):
        bench(files)
    kept = json.loads((tmp_path / "out.json").read_text())
    # All tasks begin before any goes on: what is there so far says something of each.
    assert [one["task"] for one in kept["contexts"]] == ["lines", "choices"]


@pytest.mark.parametrize("text", ["[]", "{", '{"settings": {}, "contexts": [{"task": 5}]}'])
def test_a_file_of_something_else_is_refused(
    bench: Run, files: list[Path], tmp_path: Path, text: str
) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(FormatError, match="no results of this benchmark"):
        bench(files, json_file=tmp_path / "other.json")


def test_quick_and_chosen_tasks(bench: Run, files: list[Path]) -> None:
    found = bench(files, quick=True, tasks="choices", without_cachegen=False)
    assert {row["task"] for row in found["rows"]} == {"choices"}
    assert [row["way"] for row in found["rows"]][-2:] == ["cachegen 3", "cachegen 4"]


def test_without_data_it_says_what_it_needs(bench: Run, files: list[Path]) -> None:
    with pytest.raises(UnsupportedError, match="--data"):
        command.run()


def test_data_takes_several_files() -> None:
    given = ["bench", "tasks", "--data", "a", "b", "--quick"]
    assert spread(given) == ["bench", "tasks", "--data", "a", "--data", "b", "--quick"]


def test_a_pass_has_a_bounded_number_of_tokens() -> None:
    assert list(_batches([600, 300, 300, 5000, 10])) == [
        slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5),
    ]  # fmt: skip
    assert list(_batches([1])) == [slice(0, 1)]
