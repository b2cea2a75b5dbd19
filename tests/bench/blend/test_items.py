"""Question sets come from outside: what is wrong with a line is said with its number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kdn.bench.blend import items
from kdn.bench.blend.items import Item, apart, load_items, load_stories, set_name
from kdn.errors import FormatError, LimitError

GOOD = {
    "id": "a-1",
    "question": "Who?",
    "answers": ["Ada", "Ada Lovelace"],
    "chunks": [
        {"title": "One", "text": "first", "gold": False},
        {"title": "", "text": "second"},
        {"title": "Three", "text": "third", "gold": True},
    ],
}


def write(path: Path, *lines: Any) -> Path:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz"])
def test_lines_become_questions(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, GOOD, "", {**GOOD, "id": "b"})
    found = load_items(path, 10, 16)
    assert found[0] == Item(
        "a-1", "Who?", ("Ada", "Ada Lovelace"), ("One\nfirst", "second", "Three\nthird")
    )
    assert [one.name for one in found] == ["a-1", "b"]
    assert set_name(path) == "set"
    assert len(load_items(path, 1, 16)) == 1


def test_of_too_many_pieces_the_gold_ones_stay_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", GOOD)
    assert load_items(path, 1, 2)[0].pieces == ("One\nfirst", "Three\nthird")
    assert load_items(path, 1, 1)[0].pieces == ("Three\nthird",)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "line 2"),
        ("[1]", "JSON object"),
        ("[" * 100_000, "line 2"),
        ({**GOOD, "question": 3}, "question"),
        ({**GOOD, "question": " "}, "question"),
        ({**GOOD, "question": "\ud800"}, "half of a character"),
        ({**GOOD, "answers": "Ada"}, "answers"),
        ({**GOOD, "answers": []}, "at least one"),
        ({**GOOD, "answers": [None]}, "an answer"),
        ({**GOOD, "chunks": []}, "at least one"),
        ({**GOOD, "chunks": ["text"]}, "title"),
        ({**GOOD, "chunks": [{"title": "x"}]}, "text"),
        ({**GOOD, "chunks": [{"title": 3, "text": "x"}]}, "title"),
        ({**GOOD, "chunks": GOOD["chunks"] * 100}, "at most 256"),  # type: ignore[operator]
    ],
)
def test_a_line_that_is_anything_else_is_named(tmp_path: Path, bad: Any, said: str) -> None:
    path = write(tmp_path / "set.jsonl", GOOD, bad)
    with pytest.raises(FormatError, match="line 2") as error:
        load_items(path, 10, 16)
    assert said in str(error.value)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_of_nothing_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"set\.jsonl"):
        load_items(path, 10, 16)


def test_what_is_no_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(FormatError, match="gzip"):
        load_items(path, 10, 16)


def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "MAX_FILE_BYTES", 1000)
    path = write(tmp_path / "set.jsonl.gz", " " * 2000)
    with pytest.raises(LimitError, match="1000"):
        load_items(path, 10, 16)


def test_stories_and_their_questions(tmp_path: Path) -> None:
    good = {"context": "Once.", "questions": [{"question": "What?\n (A) x\n (B) y"}]}
    [story] = load_stories(write(tmp_path / "s.jsonl", good), 5)
    assert (story.text, story.questions) == ("Once.", ("What?\n (A) x\n (B) y",))
    for bad in ({**good, "context": None}, {**good, "questions": ["What?"]}):
        with pytest.raises(FormatError, match="line 1"):
            load_stories(write(tmp_path / "bad.jsonl", bad), 5)


def test_what_is_measured_is_not_fitted_on() -> None:
    own = [Item("1", "Who?", ("Ada",), ("one", "two"))]
    others = [
        Item("2", "Who?", ("Ada",), ("three",)),  # the same question
        Item("3", "When?", ("1843",), ("two", "four")),
        Item("4", "Where?", ("London",), ("one",)),
    ]
    assert apart(others, own) == [Item("3", "When?", ("1843",), ("four",))]
