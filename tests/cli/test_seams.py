"""`kdn seams` on names, texts and sets of questions."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdn.cli.seams import Material, report, show
from kdn.errors import FormatError, UnsupportedError
from tests.blend.test_seams import random_seams
from tests.cli.test_client import kdn, model
from tests.client.test_seams import TEXTS, small

__all__ = ["model", "small"]


def test_a_report_for_people_and_for_programs(model: Any, tmp_path: Path) -> None:
    rows = [
        {
            "question": "what?",
            "answers": ["so"],
            "chunks": [{"title": "t", "text": text} for text in TEXTS[:8]],
        },
        {"question": "why?", "answers": ["so"], "chunks": [{"text": text} for text in TEXTS[8:]]},
    ]
    data = tmp_path / "set.jsonl.gz"
    data.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    out = tmp_path / "report.json"
    shown = kdn("seams", str(data), "--codec", "exact", "--tag", "faq", "--json", str(out)).stdout
    assert "seams+question, 15% recomputed" in shown
    assert "'faq'" in shown
    told = json.loads(out.read_text())
    assert [(row["method"], row["share"]) for row in told["rows"]] == [
        ("join", 0.0), ("seams", 0.0), ("seams+question", 0.05), ("seams+question", 0.15),
        ("seams+question", 0.3),
    ]  # fmt: skip
    assert all(row["kld_first"] >= 0 and row["kld"] >= 0 for row in told["rows"])
    assert all(row["kld_interval"] is None for row in told["rows"])  # of two questions
    assert "with more questions" in shown


def test_a_report_says_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    intervals = ((0.2, 0.5), (0.1, 0.3))
    seams = replace(random_seams(), intervals={0.0: intervals}, joined_intervals=intervals)
    rows = report(seams, "")["rows"]
    assert [row["kld_first_interval"] for row in rows] == [(0.2, 0.5), (0.2, 0.5), None]
    assert [row["kld_interval"] for row in rows] == [(0.1, 0.3), (0.1, 0.3), None]
    show(seams, "")
    assert "0.2000 (0.1 to 0.3)" in capsys.readouterr().out


def test_what_is_given_is_a_file_or_a_name(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    found = Material.of([str(text), "faq"])
    assert found == Material(["faq"], ["some text"])
    with pytest.raises(UnsupportedError, match="name"):
        Material.of([str(tmp_path / "nothing there")])
    with pytest.raises(UnsupportedError, match="name"):
        Material.of(["x" * 5000])
    bad = tmp_path / "bad.jsonl"
    for line in ("no json", "[]", '{"question": 1, "chunks": []}', '{"question": "?"}', "1"):
        bad.write_text(line)
        with pytest.raises(FormatError):
            Material.of([str(bad)])
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(FormatError, match="JSON lines"):
        Material.of([str(tmp_path / "bad.jsonl.gz")])
