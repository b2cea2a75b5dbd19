"""What the measurements on a GPU come to: figures, bars, a report and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdn.bench.vllm_gpu.measure import GpuRow
from kdn.bench.vllm_gpu.report import document, doubts, plot, print_report
from kdn.bench.vllm_gpu.systems import HOST, LMCACHE, NODE, NONE, OFFLOADING

FACTS = {"cpu": "one", "commit": "abc"}
TASK = {"token_values": 65536}
RAW = 8192 * 131072


def row(
    system: str, ms: float, context: int = 8192, moved: int = 0, host: bool = False, **more: Any
) -> GpuRow:
    counts = {"fetched_bytes": moved, "host_tokens": context if host else 0, "load_ms": 7}
    hit = 0 if system == NONE else context
    answers = [
        {"ttft_s": (ms + extra) / 1000, "hit_tokens": hit, "counts": counts} for extra in (-1, 0, 5)
    ]
    kdn_bytes = 200_000_000 if "kdn" in system else None
    used = 10**9 + (3 * 10**8 if kdn_bytes else 0)
    engine = {"vllm": "0.26.0", "used_bytes": used, "kdn_bytes": kdn_bytes}
    return GpuRow(system, context, answers, engine=engine, **more)


def rows(host_ms: float = 35.0, link_ms: float = 60.0) -> list[GpuRow]:
    own: dict[str, Any] = {"rate": "grouped", "levels": 3}
    return [
        row(NONE, 225.0),
        row(OFFLOADING, 51.0, stored_bytes=RAW),
        row(LMCACHE, 53.0, stored_bytes=RAW),
        row(HOST, host_ms, host=True, stored_bytes=39_000_000, **own),
        row(NODE, 50.0, moved=39_000_000, **own),
        row(NODE, link_ms, moved=39_000_000, link="10 Gbit/s", **own),
        row(HOST, 90.0, host=True, stored_bytes=99_000_000, rate="pairs", levels=3),
    ]


def runs(share: float) -> list[dict[str, Any]]:
    def run(variant: str, speed: float) -> dict[str, Any]:
        return {"variant": variant, "tokens_per_s": speed, "ttft_s": [0.03]}

    return [run("alone", 400.0), run("beside loads", share * 400.0), run("alone", 400.0)]


def answering(system: str, *tokens: int) -> GpuRow:
    found = row(system, 50.0)
    answers = [one | {"token": token} for one, token in zip(found.answers, tokens, strict=True)]
    return found._replace(answers=answers)


def test_answers_that_are_not_those_of_no_cache_are_told() -> None:
    every = [
        answering(NONE, 7, 7, 7),
        answering(OFFLOADING, 7, 7, 7),
        answering(LMCACHE, 8, 8, 8),
        answering(HOST, 9, 9, 9),
        answering(NODE, 9, 7, 9),
    ]
    assert doubts(every) == [
        f"{LMCACHE}, 8,192 tokens: its first token is not that of no cache",
        f"{NODE}, 8,192 tokens: its first token was another one from time to time",
    ]
    assert set(doubts(every)) <= set(document(every, [], TASK, [], FACTS)["notes"])


def test_figures_are_medians_beside_no_cache() -> None:
    results = document(rows(), runs(0.98), TASK, [], FACTS)
    own = results["figures"][3]
    spread = own["ttft_s"], own["ttft_min_s"], own["ttft_max_s"]
    assert spread == pytest.approx((0.035, 0.034, 0.040))
    assert own["times_faster"] == pytest.approx(225 / 35)
    assert (own["gpu_bytes"], own["kdn_bytes"]) == (3 * 10**8, 200_000_000)
    assert results["figures"][1]["kdn_bytes"] is None
    assert results["held"]["LMCache"] == pytest.approx(18.6, abs=0.1)
    assert results["held"]["kdn, host memory, grouped, 3 levels"] == pytest.approx(512.8, abs=0.1)
    assert results["beside"]["beside loads"]["share"] == pytest.approx(0.98)


def test_good_runs_pass_the_bars() -> None:
    results = document(rows(), runs(0.98), TASK, [], FACTS)
    assert set(results["passes"].values()) == {True}
    assert "kdn, host memory, 8,192 tokens: at most 40 ms" in results["passes"]
    assert "10 Gbit/s, 8,192 tokens, 3 levels: 3.5 times faster" in results["passes"]
    assert "15 times as many contexts held" in results["passes"]
    assert results["aims"]["aim: kdn, host memory, 8,192 tokens: at most 30 ms"] is False


def test_bad_runs_do_not_pass() -> None:
    found = rows(host_ms=41.0, link_ms=66.0)
    found[4] = row(NODE, 50.0, rate="grouped", levels=3)._replace(context=16384)
    found[3] = found[3]._replace(
        answers=[one | {"counts": {"host_tokens": 0}} for one in found[3].answers],
        stored_bytes=80_000_000,
    )
    failed = [
        name
        for name, passed in document(found, runs(0.96), TASK, [], FACTS)["passes"].items()
        if not passed
    ]
    assert failed == [
        "kdn, host memory, 8,192 tokens: at most 40 ms",
        "10 Gbit/s, 8,192 tokens, 3 levels: 3.5 times faster",
        "15 times as many contexts held",
        "eight requests beside loads: at least 97%",
        "kdn, host memory, grouped, 3 levels, 8,192 tokens: from this host",
        "kdn, node, loopback, grouped, 3 levels, 16,384 tokens: known",
    ]


def test_the_report_shows_all(tmp_path: Path) -> None:
    results = document(rows(), runs(0.98), TASK, ["something is left out"], FACTS)
    with (tmp_path / "out").open("w") as file:
        print_report(Console(width=150, file=file), results)
    text = (tmp_path / "out").read_text()
    assert "35.0 (34.0-40.0)" in text
    assert "0.581" in text  # bits a value
    assert "300 (200)" in text
    assert "513 contexts of 8,192 tokens" in text
    assert "98.0% of their speed alone (0.980); these wait 30 ms" in text
    assert "something is left out" in text
    plot(tmp_path / "all.png", results)
    assert (tmp_path / "all.png").stat().st_size > 10_000
