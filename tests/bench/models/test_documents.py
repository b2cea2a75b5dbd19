"""Documents are shared out, each to one part, the same way every time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kdn.bench.models.documents import read_documents, split, write_lines
from kdn.calibrate.corpus import Text, load_text
from kdn.errors import FormatError


def documents(count: int, name: str, size: int = 20_000) -> list[Text]:
    return [
        Text(f"{name}{i}", f"{name} {i} " * (size // len(f"{name} {i} "))) for i in range(count)
    ]


def test_every_kind_is_in_every_part_and_no_document_is_in_two() -> None:
    kinds = {"a": documents(40, "apple"), "b": documents(30, "bean")}
    parts = split(kinds)
    contents = [
        [text.content for text in p] for p in (parts.training, parts.calibration, parts.other)
    ]
    assert sorted(content for part in contents for content in part) == sorted(
        t.content for kind in kinds.values() for t in kind
    )
    for part, share in zip(contents, (0.6, 0.3, 0.1), strict=True):
        for word, count in (("apple", 40), ("bean", 30)):
            found = sum(text.startswith(word) for text in part)
            assert abs(found - share * count) <= 1


def test_the_split_depends_on_contents_alone() -> None:
    kinds = {"a": documents(40, "apple")}
    again = split({"renamed": [Text("x", text.content) for text in reversed(kinds["a"])]})
    assert again.digest() == split(kinds).digest()
    assert split({"a": documents(41, "apple")}).digest() != again.digest()


def test_a_document_that_is_there_twice_counts_once() -> None:
    kinds = {"a": documents(40, "apple") * 2}
    parts = split(kinds)
    assert len(parts.training) + len(parts.calibration) + len(parts.other) == 40


def test_a_document_of_two_kinds_is_in_one_part() -> None:
    shared = documents(40, "apple")
    parts = split({"a": shared, "b": [*documents(3, "bean", 40_000), *shared]})
    every = [*parts.training, *parts.calibration, *parts.other]
    assert len({text.content for text in every}) == len(every) == 43


def test_too_little_text_is_refused() -> None:
    with pytest.raises(FormatError, match="at least 50,000 characters"):
        split({"a": documents(3, "apple", 1000)})


def test_files_and_lines_of_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("first")
    (tmp_path / "two.txt.gz").write_bytes(gzip.compress(b"second"))
    lines = write_lines(tmp_path / "many.jsonl", [Text("", "third\nline"), Text("", "fo\u00fcrth")])
    kinds = read_documents([tmp_path / "one.txt", tmp_path / "two.txt.gz", lines])
    assert [[text.content for text in kind] for kind in kinds.values()] == [
        ["first", "second"], ["third\nline", "fo\u00fcrth"],
    ]  # fmt: skip
    assert load_text(lines).content == "third\nline\n\nfo\u00fcrth"


def test_a_line_without_a_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "?"}))
    with pytest.raises(FormatError, match="line 1: expected a JSON object"):
        read_documents([tmp_path / "bad.jsonl"])
