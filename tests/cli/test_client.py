"""`kdn learn`, `kdn ask`, `kdn explain`, on a folder and a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kdn.cli import client as commands
from kdn.cli.main import app
from kdn.client.answers import Stats
from kdn.errors import FormatError, MismatchError, StoreError, UnsupportedError
from tests.client.clients import QUESTION, TEXT, own_answer, prompt_of
from tests.client.joins import SlowToRead
from tests.client.letters import Letters


@pytest.fixture
def model(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    made = tiny_model("llama")
    monkeypatch.setattr("kdn.engines.models.load_model", lambda *_: (made, Letters()))
    # A tiny model reads faster than a busy machine loads: what is late would be read.
    monkeypatch.setattr("kdn.client.asynchronous.measured_speeds", lambda *_: SlowToRead())
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KDN_CLIENT_URL", str(tmp_path / "knowledge"))
    return made


def kdn(*arguments: str, **env: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150", **env})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_learn_ask_explain(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    with pytest.raises(StoreError, match="no name"):
        kdn("ask", "notes", QUESTION, "--codec", "exact")
    shown = kdn("learn", "notes", str(path), "--codec", "exact").stdout
    assert "709 tokens in 4 chunks, 0 known before; the model read 709 tokens" in shown
    assert "4 known before; the model read 0" in (
        kdn("learn", "again", str(path), "--codec", "exact").stdout
    )
    answer = kdn("ask", "notes", QUESTION, "--codec", "exact", "--max-tokens", "9")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)
    assert printable(answer.stdout) == printable(expected) != ""
    assert "709 tokens known" in answer.stderr
    assert f"{len(prompt_of(TEXT, QUESTION)) - 709} read; first token after" in answer.stderr
    explained = kdn("explain", str(path), "--codec", "exact").stdout
    assert explained.count("yes") == 3
    assert "704 of 709 tokens need no reading" in explained
    raw = kdn("explain", str(path), "--raw", "--codec", "exact").stdout
    assert "0 of 701 tokens" in raw  # without the template it is another prompt


def test_several_texts_are_joined(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for name, text in (("rules", TEXT[:300]), ("report", TEXT[300:400])):
        path.write_text(text)
        kdn("learn", name, str(path), "--codec", "exact")
    pieces = ("--with", "rules", "--with", "report")
    answer = kdn("ask", *pieces, QUESTION, "--codec", "exact", "--max-tokens", "9")
    assert printable(answer.stdout) != ""
    assert "411 tokens known" in answer.stderr
    assert "2 pieces joined: 102 tokens moved, 0 repaired, 102 recomputed" in answer.stderr
    answer = kdn(
        "ask", *pieces, QUESTION, "--codec", "exact", "--max-tokens", "9",
        "--recompute-share", "0.1",
    )  # fmt: skip
    assert "102 tokens moved, 0 repaired, 41 recomputed" in answer.stderr
    explained = kdn("explain", *pieces, "--codec", "exact").stdout
    assert "moved by 302 positions" in explained
    assert "411 of 411 tokens need no reading" in explained
    with pytest.raises(UnsupportedError, match="not both"):
        kdn("ask", "rules", QUESTION, "--with", "report", "--codec", "exact")
    with pytest.raises(UnsupportedError, match="a name and a question"):
        kdn("ask", QUESTION, "--codec", "exact")
    with pytest.raises(UnsupportedError, match="expected a text, or"):
        kdn("explain", "--codec", "exact")
    path.write_text(TEXT[:50])
    kdn("learn", "brief", str(path), "--head", "be brief", "--codec", "exact")
    with pytest.raises(MismatchError, match="another head"):
        kdn("ask", *pieces, "--with", "brief", QUESTION, "--codec", "exact")


def test_a_terminal_shows_the_delivery_until_the_answer_comes(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    kdn("learn", "notes", str(path), "--codec", "exact")
    arguments = ("ask", "notes", QUESTION, "--codec", "exact", "--max-tokens", "9")
    plain, drawn = kdn(*arguments), kdn(*arguments, FORCE_COLOR="1")
    assert drawn.stdout == plain.stdout
    assert "s left" in drawn.stderr
    assert "s left" not in plain.stderr


def printable(text: str) -> str:
    return "".join(filter(str.isprintable, text))


def test_where_and_quality(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    other = str(tmp_path / "other")
    kdn("learn", "notes", str(path), "--codec", "exact", "--where", other)
    with pytest.raises(StoreError, match="no name"):
        kdn("ask", "notes", "?", "--codec", "exact")
    arguments = ("ask", "notes", "?", "--codec", "exact", "--where", other, "--max-tokens", "1")
    assert "709 tokens known" in kdn(*arguments, "--quality", "0.02", "--deadline", "9").stderr
    with pytest.raises(UnsupportedError, match="quality"):
        kdn(*arguments, "--quality", "perfect")


def test_a_file_that_is_no_text(model: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="expected a text file"):
        kdn("learn", "notes", str(tmp_path / "absent"))


def test_stats_in_words() -> None:
    stats = Stats(100, 80, 20, 5, 1_500_000, 0.5, 0.75)
    assert commands.describe(stats) == (
        "80 tokens known (1.5 MB in 0.50 s), 20 read; first token after 0.75 s"
    )
    assert commands.describe(Stats(5, 0, 5, ttft_s=1.0, troubles=("a node is away",))) == (
        "0 tokens known, 5 read; first token after 1.00 s; a node is away"
    )
