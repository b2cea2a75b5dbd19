"""What the measurements of vLLM come to: figures, bars, a report and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdn.bench.report import write_json
from kdn.bench.vllm_report import VllmRow, document, plot, print_report, read_rows
from kdn.bench.vllm_systems import (
    LOOPBACK,
)
from kdn.errors import FormatError

FACTS = {"cpu": "one", "commit": "abc"}

TASK = {"model": "m", "text": "t", "context": 3500, "documents": 2, "answer_tokens": 3, "seed": 0}


def answers(*ttft_s: float, hit: int = 3456, tokens: tuple[int, ...] = (1, 2, 3)) -> list[Any]:
    return [
        {"ttft_s": one, "total_s": one, "hit_tokens": hit, "tokens": list(tokens)} for one in ttft_s
    ]


def rows() -> list[VllmRow]:
    return [
        VllmRow("no cache", LOOPBACK, answers(10.0, 12.0, hit=0), [], 0, "0.32.0"),
        VllmRow("ExampleConnector", LOOPBACK, answers(0.5, 0.7), [], 160_000_000, "0.32.0"),
        VllmRow("LMCache", LOOPBACK, answers(1.0, 1.2), [], 160_000_000, "0.32.0"),
        VllmRow("LMCache", "1 Gbit/s", answers(2.5, 2.5), [160_000_000] * 2, 160_000_000, "0.32.0"),
        VllmRow("kdn", LOOPBACK, answers(1.4, 1.4), [5_000_000] * 2, 6_000_000, "0.32.0"),
        VllmRow(
            "kdn", "1 Gbit/s", answers(1.5, 1.7, tokens=(1, 9, 3)), [5_000_000] * 2, 6_000_000, ""
        ),
    ]


def figure(results: dict[str, Any], system: str, link: str) -> dict[str, Any]:
    found = [f for f in results["figures"] if (f["system"], f["link"]) == (system, link)]
    assert len(found) == 1
    return dict(found[0])


def test_figures_are_means_with_their_spread_and_16_bit_equivalents() -> None:
    results = document(rows(), TASK, [], FACTS)
    plain = figure(results, "no cache", LOOPBACK)
    assert (plain["ttft_s"], plain["ttft_min_s"], plain["ttft_max_s"]) == (11.0, 10.0, 12.0)
    assert plain["same_first"] is None
    slow = figure(results, "LMCache", "1 Gbit/s")
    assert slow["moved_counted"]
    assert slow["moved_16bit_bytes"] == 80_000_000
    assert slow["ttft_16bit_s"] == pytest.approx(2.5 - 0.64)
    assert not figure(results, "LMCache", LOOPBACK)["moved_counted"]
    own = figure(results, "kdn", "1 Gbit/s")
    assert own["moved_16bit_bytes"] == own["moved_bytes"] == 5_000_000
    assert own["ttft_16bit_s"] == own["ttft_s"] == 1.6
    assert (own["same_first"], own["same_tokens"]) == (1.0, pytest.approx(1 / 3))


def test_example_over_links_is_computed() -> None:
    results = document(rows(), TASK, [], FACTS)
    slow = figure(results, "ExampleConnector", "100 Mbit/s")
    assert slow["computed"]
    assert slow["ttft_s"] == pytest.approx(0.6 + 12.8)
    assert slow["ttft_16bit_s"] == pytest.approx(0.6 + 6.4)
    assert not figure(results, "ExampleConnector", LOOPBACK)["computed"]


def test_good_runs_pass_the_bars() -> None:
    passes = document(rows(), TASK, [], FACTS)["passes"]
    assert passes["loopback: within 1.3 times of LMCache"]
    assert passes["1 Gbit/s: faster than LMCache"]
    assert passes["1 Gbit/s: faster than LMCache, were its cache of 16 bit"]
    assert passes["1 Gbit/s: 10 times fewer bytes moved, LMCache at 16 bit"]
    assert passes["kdn, loopback: known"]


def test_bad_runs_do_not_pass_the_bars() -> None:
    bad = [
        *rows(),
        VllmRow("kdn", LOOPBACK, answers(1.5, 1.5, hit=0), [9_000_000] * 2, 9_000_000, ""),
        VllmRow("kdn", "1 Gbit/s", answers(2.0, 2.0), [9_000_000] * 2, 9_000_000, ""),
    ]
    passes = document(bad, TASK, [], FACTS)["passes"]
    assert not passes["loopback: within 1.3 times of LMCache"]
    assert passes["1 Gbit/s: faster than LMCache"]
    assert not passes["1 Gbit/s: faster than LMCache, were its cache of 16 bit"]
    assert not passes["1 Gbit/s: 10 times fewer bytes moved, LMCache at 16 bit"]
    assert not passes["1 Gbit/s: 10 times fewer bytes stored, LMCache at 16 bit"]
    assert not passes["kdn, loopback: known"]


def test_the_report_shows_what_the_json_holds_and_runs_are_read_back(tmp_path: Path) -> None:
    results = document(rows(), TASK, ["something is left out"], FACTS)
    console = Console(width=132, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    print_report(console, results)
    console.file.close()
    text = (tmp_path / "out").read_text()
    assert "11.00 (10.00-12.00)" in text
    assert "160.0 (80.0)" in text
    assert "= 13.40 (13.30-13.50)" in text
    assert "something is left out" in text
    assert "…" not in text
    write_json(tmp_path / "all.json", results)
    plot(tmp_path / "all.png", results)
    assert (tmp_path / "all.png").stat().st_size > 10_000
    assert read_rows([tmp_path / "all.json"], TASK) == rows()


def test_runs_of_another_task_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", document(rows(), TASK, [], FACTS))
    with pytest.raises(FormatError, match="expected the task"):
        read_rows([tmp_path / "a.json"], TASK | {"context": 512})
    (tmp_path / "b.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(FormatError, match=r"expected JSON of kdn bench vllm"):
        read_rows([tmp_path / "b.json"], TASK)
