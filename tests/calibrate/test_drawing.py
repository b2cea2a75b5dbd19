"""Large texts: parts of them, evenly spaced, whole lines and characters."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from kdn.calibrate import drawing
from kdn.calibrate.corpus import Text, load_text
from kdn.calibrate.drawing import drawn, open_texts, read_part
from kdn.errors import FormatError
from tests.client.letters import Letters


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "LEAST_BYTES", 400)
    monkeypatch.setattr(drawing, "PIECE_BYTES", 100)
    monkeypatch.setattr(drawing, "BLOCK_CHARS", 50)


def write_lines(path: Path, count: int, line: str = "line {:04} ö") -> list[str]:
    lines = [line.format(number) for number in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def test_small_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_lines(path, 10)
    assert open_texts([path], 1) == [load_text(path)]


def test_of_a_long_file_whole_lines_from_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = write_lines(path, 1_000)
    (found,) = open_texts([path], 1)
    assert len(found.content.encode()) <= 400 + 4
    taken = [line for line in found.content.split("\n") if line]
    assert set(taken) <= set(lines)
    numbers = [int(line.split()[1]) for line in taken]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert numbers[-1] == 999
    assert 200 < numbers[len(numbers) // 2] < 800


def test_of_one_endless_line_whole_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("öä€" * 500, encoding="utf-8")
    assert set(open_texts([path], 1)[0].content) == set("öä€\n")


def test_json_lines_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, 500, '{{"context": "number {}"}}')
    (found,) = open_texts([path], 1)
    assert all(part.startswith("number ") for part in found.content.split("\n\n"))


def test_of_a_packed_file_its_beginning_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"line\n" * 10_000_000))  # 50 MB of 50 KB
    read = []
    whole = gzip.GzipFile.read
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or whole(self, size)
    )
    assert read_part(path, 1_000) == b"line\n" * 200
    assert read == [1_001]


@pytest.mark.parametrize("name", ["absent.txt", "bad.txt.gz", "bad.txt"])
def test_files_that_are_no_text(tmp_path: Path, name: str) -> None:
    if name.startswith("bad"):
        (tmp_path / name).write_bytes(b"\xff\xfe" * 10)
    with pytest.raises(FormatError, match=name):
        open_texts([tmp_path / name], 10)


def test_no_more_is_tokenised_than_is_needed() -> None:
    long, short = Text("long", "abcdefghij" * 1_000), Text("short", "xyz")
    found = drawn([long, short], Letters(), 60)
    assert [len(part) for part in found] == [50] * 9 + [3]
    assert sum(map(len, drawn([long], Letters(), 100_000))) == 10_000
    # Short texts leave their share to long ones.
    others = [Text(str(n), "s" * 10) for n in range(8)]
    assert sum(len(p) for p in drawn([*others, long], Letters(), 100)) == 80 + 14 * 50


def test_blocks_come_from_all_of_a_text() -> None:
    text = Text("t", "".join(chr(48 + n // 100) for n in range(5_000)))
    found = np.concatenate(drawn([text], Letters(), 40))
    assert found.min() == 48
    assert found.max() == 97
