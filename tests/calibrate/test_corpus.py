"""Loading texts, drawing windows, counting what two texts share."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kdn.calibrate.corpus import (
    Sample,
    Text,
    begun,
    default_calibration,
    default_texts,
    load_text,
    overlap,
    prompt_head,
    sample_windows,
    window_starts,
    windows_of,
)
from kdn.errors import FormatError
from tests.client.letters import Letters


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def test_plain_and_gzip_text(tmp_path: Path) -> None:
    plain, packed = tmp_path / "story.txt", tmp_path / "story.txt.gz"
    plain.write_text("Größe\nzwei", encoding="utf-8")
    packed.write_bytes(gzip.compress("Größe\nzwei".encode()))
    assert load_text(plain) == load_text(packed) == Text("story", "Größe\nzwei")


def test_any_other_suffix_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Title")
    assert load_text(path) == Text("README.md", "# Title")


def test_contexts_of_json_lines_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl.gz"
    lines = [json.dumps({"id": i, "context": f"part\u2028{i}"}) for i in range(2)]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n\n").encode()))
    assert load_text(path) == Text("set", "part\u20280\n\npart\u20281")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bad.txt", b"\xff\xfe\xfa", "UTF-8"),
        ("bad.txt.gz", b"no gzip at all", "gzip"),
        ("cut.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-12], "gzip"),
        ("bad.jsonl", b'{"context": "a"}\n{"text": "b"}', "line 2.*'context'"),
        ("bad.jsonl", b"not json", "line 1"),
        ("absent.txt", None, "absent.txt"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError, match=message):
        load_text(tmp_path / name)


def test_windows_do_not_overlap_and_follow_the_seed() -> None:
    starts = window_starts(10_000, 1_000, 4, seed=1)
    assert starts == window_starts(10_000, 1_000, 4, seed=1) != window_starts(10_000, 1_000, 4, 2)
    assert starts[0] >= 0
    assert starts[-1] + 1_000 <= 10_000
    assert all(b - a >= 1_000 for a, b in pairwise(starts))
    assert window_starts(4_000, 1_000, 4, seed=1) == [0, 1_000, 2_000, 3_000]


def test_windows_of_short_texts_overlap_up_to_a_point() -> None:
    assert window_starts(2_500, 1_000, 4, seed=0) == [0, 500, 1_000, 1_500]
    assert window_starts(1_250, 1_000, 4, seed=0) == [0, 250]
    assert window_starts(1_000, 1_000, 4, seed=0) == [0]
    assert window_starts(999, 1_000, 4, seed=0) == []


def test_a_sample_is_refused_or_says_that_it_overlaps() -> None:
    tokens = np.arange(2_600, dtype=np.uint32)
    sample = Sample.of(Text("t", ""), tokens, 1_000, 2, 128, seed=0)
    assert (sample.window, len(sample.starts), sample.overlaps) == (1_129, 2, False)
    assert Sample.of(Text("t", ""), tokens, 1_000, 4, 128, seed=0).overlaps
    with pytest.raises(FormatError, match="t: expected at least 3129 tokens, found 2600"):
        Sample.of(Text("t", ""), tokens, 3_000, 1, 128, seed=0)


def test_calibration_windows_come_from_every_text() -> None:
    texts = [np.full(n, i, dtype=np.uint32) for i, n in enumerate((5_000, 900, 5_000))]
    windows = sample_windows(texts, 1_000, 6_000, seed=0)
    assert [int(w[0]) for w in windows] == [0, 0, 1, 2, 2]
    assert [len(w) for w in windows] == [1_000, 1_000, 900, 1_000, 1_000]


def test_overlap_counts_shared_eight_grams() -> None:
    text = np.arange(108, dtype=np.uint32)  # 101 different 8-grams
    assert overlap(text, text) == 1
    assert overlap(text, text[:58]) == pytest.approx(51 / 101)
    assert overlap(text, text[::-1]) == 0
    assert overlap(text, text[:7]) == 0
    assert overlap(ids(1, 2), text) == 0


def test_what_every_machine_has() -> None:
    (text,), (calibration,) = default_texts(), default_calibration()
    assert len(text.content) > 200_000
    assert len(calibration.content) > 200_000
    assert "compound statements" in text.content

    def words(content: str) -> np.ndarray:
        names: dict[str, int] = {}
        return np.array([names.setdefault(w, len(names)) for w in content.split()], np.uint32)

    both = words(text.content + " " + calibration.content)
    count = len(text.content.split())
    assert overlap(both[:count], both[count:]) < 0.02


def test_windows_begin_as_prompts_do() -> None:
    head, text = prompt_head(Letters(chat=False)), np.arange(10, 2_000, dtype=np.uint32)
    assert head.tolist() == [1]
    sample = Sample.of(Text("t", ""), text, 500, 2, 20, seed=0, head=head)
    sampled = [sample.ids(start) for start in sample.starts]
    every = [*windows_of([text], 521, 3, head=head), *sample_windows([text], 521, 1_042, 0, head)]
    for ids in [*sampled, *every]:
        assert len(ids) == 521
        assert ids[0] == 1
        assert (np.diff(ids[1:].astype(int)) == 1).all()
    assert begun(head, text[:2]).tolist() == [1, 10, 11]
