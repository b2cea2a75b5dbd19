"""What is printed and written, from rows whose figures are known."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kdn.bench import codec_report, report
from kdn.bench.figures import CodecRow

ROW = CodecRow("klt", 0, "wt", 1234567.0, 0.5, 32.0, 0.01, 0.1, 0.05, 0.9, 8.5, 1.0, 0.1, 9.0)
ROWS = [
    ROW,
    replace(ROW, level=1, ratio=8.0, kld=0.0001, recall_kld=0.001),
    replace(ROW, codec="kvtc", ratio=8.0),
    replace(ROW, codec="drop", ratio=99.0, kld=0.6, recall_kld=1.7),
]
EXTRA = {
    "levels": {"klt": ("0", "1"), "kvtc": ("8x",), "drop": ("sinks",)},
    "calibration": {"texts": ["novel"], "tokens": 25_000},
    "hardware": {"cpu": "abacus", "commit": "c0ffee"},
}


def test_the_printed_report() -> None:
    console = Console(width=report.MIN_WIDTH, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    codec_report.print_report(console, ROWS, EXTRA)
    console.file.close()
    shown = console.export_text()
    assert "wt (prefill 9.00 s)" in shown
    assert "1,234,567" in shown
    assert "…" not in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["klt", "32.00"] in lines  # the headline
    assert ["drop", "0.00"] in lines
    assert ["wt", "0", "<", "4.0", "-"] in lines  # at equal quality
    assert ["wt", "1", "-", "-"] in lines
    assert "25,000 tokens of novel" in shown
    assert "cpu abacus; commit c0ffee" in shown


def test_the_written_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    report.write_json(path, codec_report.document(ROWS, EXTRA))
    found = json.loads(path.read_text())
    assert found["rows"][2]["codec"] == "kvtc"
    assert found["ratio_at_quality"]["klt"] == {"wt": 32.0}
    assert found["at_klt_quality"][0] == {
        "text": "wt", "level": 0, "rival": "kvtc", "factor": 4.0, "at_coarsest": True,
    }  # fmt: skip
    assert found["hardware"] == {"cpu": "abacus", "commit": "c0ffee"}


def test_the_plot_has_a_row_of_panels_per_text(tmp_path: Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    codec_report.plot(one, ROWS)
    codec_report.plot(two, [*ROWS, *(replace(row, text="py", codec="new") for row in ROWS)])

    def height(path: Path) -> int:
        return int.from_bytes(path.read_bytes()[20:24], "big")

    assert height(two) > 1.5 * height(one)


def test_hardware_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = report.hardware("cpu")
    assert "cores" in facts["cpu"]
    assert facts["commit"] == report.commit()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    expected = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    assert expected.startswith(report.commit())
    assert len(report.commit()) == 12
    monkeypatch.setattr(report, "__file__", "/report.py")
    assert report.commit() == "unknown"
