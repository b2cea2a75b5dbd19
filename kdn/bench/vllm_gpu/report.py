"""How the measurements on a GPU are told: tables, JSON, a plot, and which bars hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from kdn.bench.report import drawing, print_end, print_passed, table_of
from kdn.bench.vllm_gpu.beside import LOADS, PUBLISHING, shares
from kdn.bench.vllm_gpu.measure import GpuRow
from kdn.bench.vllm_gpu.systems import HOST, LMCACHE, LOOPBACK, NODE, NONE, OFFLOADING

HELD_BYTES = 20e9
HELD_TOKENS = 8192
HELD_BAR = 15.0
BESIDE_BAR = 0.97
TENTH = "10 Gbit/s"
MS_BARS = {
    (HOST, 8192): (40, 30), (HOST, 32768): (75, 45), (NODE, 8192): (55, 45),
    (NODE, 32768): (110, 80),
}  # fmt: skip
"""Milliseconds to the first token, three levels, from this host: at most, and the aim."""
LINK_BARS = {(3, 8192): 3.5, (3, 32768): 7.0, (2, 8192): 5.5, (2, 32768): 12.0}
"""Through 10 Gbit/s: levels and length to how many times faster than reading."""
NOTES = (
    "First token: median (least to most) of repeats in one engine, in one process with kdn's "
    "threads, bf16, in eager mode unless graphs are asked for. A prompt is a context and 16 tokens "
    "more, which the engine computes. Random weights of Llama-3.1-8B's shape.",
    "vLLM's own prefix cache: off for no cache and kdn; for the others, whose keys rest on it, on, "
    "and emptied before every prompt (their memory is not). They were given each prompt once to "
    "store it and once to warm up.",
    "kdn, host memory: streams that came from the node once, on this host since; kdn, node: this "
    "host keeps nothing. Links are the node's egress limit on loopback: there is no network. What "
    "a node process cannot send any faster, no limit makes faster.",
    "kdn's streams: a few chunks drawn and encoded (`kdn bench gpu`), under the names of all "
    "chunks of the prompts. Bits a value of the rates are below; the bars are for grouped.",
    "Moved: what came over the link for one prompt. Contexts held: by the files in the host's "
    "memory; of the others by the blocks that they copy. GPU: memory in use beyond that of no "
    "cache, and what kdn says it holds (tables, scratch, staging).",
)


def document(
    rows: Sequence[GpuRow],
    runs: Sequence[Mapping[str, Any]],
    task: Mapping[str, Any],
    notes: Sequence[str],
    facts: Mapping[str, str],
) -> dict[str, Any]:
    """Everything, as it goes to JSON."""
    plain = {row.context: _middle(row) for row in rows if row.system == NONE}
    base_bytes = max(
        [(row.engine or {}).get("used_bytes", 0) for row in rows if row.system == NONE], default=0
    )
    figures = [summary(row, plain.get(row.context), base_bytes) for row in rows]
    besides = shares(runs)
    return {
        "figures": figures,
        "passes": passes(figures, besides),
        "aims": aims(figures),
        "held": held(figures),
        "beside": besides,
        "runs": list(runs),
        "rows": [row._asdict() for row in rows],
        "task": dict(task),
        "notes": [*notes, *doubts(rows), *NOTES],
        "hardware": {**facts, "vllm": next((r.engine["vllm"] for r in rows if r.engine), "")},
        "commit": facts["commit"],
    }


def doubts(rows: Sequence[GpuRow]) -> list[str]:
    """Systems whose answers are not those of no cache, or not the same each time. These keep values
    as they are: they should answer alike, and their times count only if they do. (What kdn loads
    here is drawn: it must only be the same each time.)"""
    told, right = [], {row.context: _tokens(row) for row in rows if row.system == NONE}
    for row in rows:
        found, expected = _tokens(row), right.get(row.context)
        what = f"{row.system}, {row.context:,} tokens"
        if len(found) > 1:
            told.append(f"{what}: its first token was another one from time to time")
        elif row.system in (OFFLOADING, LMCACHE) and expected is not None and found != expected:
            told.append(f"{what}: its first token is not that of no cache")
    return told


def _tokens(row: GpuRow) -> set[int]:
    return {int(one["token"]) for one in row.answers if "token" in one}


def _middle(row: GpuRow) -> float:
    return float(median(one["ttft_s"] for one in row.answers))


def summary(row: GpuRow, plain_s: float | None, base_bytes: int) -> dict[str, Any]:
    times = [one["ttft_s"] for one in row.answers]
    counts = [one.get("counts", {}) for one in row.answers]
    engine = row.engine or {}
    used = engine.get("used_bytes", 0)
    return {
        "system": row.system, "rate": row.rate, "link": row.link, "levels": row.levels,
        "context": row.context, "ttft_s": median(times), "ttft_min_s": min(times),
        "ttft_max_s": max(times), "repeats": len(times),
        "times_faster": None if plain_s is None else plain_s / median(times),
        "hit_tokens": min(one["hit_tokens"] for one in row.answers),
        "host_tokens": min(one.get("host_tokens", 0) for one in counts),
        "moved_bytes": median(one.get("fetched_bytes", 0) for one in counts),
        "load_ms": median(one.get("load_ms", 0) for one in counts),
        "stored_bytes": row.stored_bytes,
        "gpu_bytes": used - base_bytes if used and base_bytes else None,
        "kdn_bytes": engine.get("kdn_bytes"), "pinned_bytes": engine.get("pinned_bytes"),
    }  # fmt: skip


def held(figures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Contexts of 8K tokens that fit into 20 GB of the host's memory."""
    found = {}
    for one in figures:
        if one["context"] == HELD_TOKENS and one["stored_bytes"]:
            if one["system"] in (OFFLOADING, LMCACHE):
                found[one["system"]] = HELD_BYTES / one["stored_bytes"]
            elif one["system"] == HOST:
                name = f"{HOST}, {one['rate']}, {one['levels']} levels"
                found[name] = HELD_BYTES / one["stored_bytes"]
    return found


def _of(figures: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    fits = (one for one in figures if all(one[name] == value for name, value in wanted.items()))
    return next(fits, None)


def passes(
    figures: Sequence[Mapping[str, Any]], besides: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool]:
    """The bars that can be told from what was measured."""
    told = {}
    for (system, context), (limit_ms, _) in MS_BARS.items():
        one = _of(figures, system=system, context=context, rate="grouped", link=LOOPBACK, levels=3)
        if one is not None:
            told[f"{system}, {context:,} tokens: at most {limit_ms} ms"] = (
                1000 * one["ttft_s"] <= limit_ms
            )
    for (levels, context), times in LINK_BARS.items():
        one = _of(figures, system=NODE, context=context, rate="grouped", link=TENTH, levels=levels)
        if one is not None and one["times_faster"] is not None:
            told[f"{TENTH}, {context:,} tokens, {levels} levels: {times:g} times faster"] = (
                one["times_faster"] >= times
            )
    told |= _held_bars(held(figures))
    for variant in (LOADS, PUBLISHING):
        if variant in besides:
            told[f"eight requests {variant}: at least {BESIDE_BAR:.0%}"] = (
                besides[variant]["share"] >= BESIDE_BAR
            )
    for one in figures:
        if one["system"] != NONE and one["hit_tokens"] < one["context"]:
            told[f"{_name(one)}, {one['context']:,} tokens: known"] = False
        if one["system"] == HOST and one["host_tokens"] < one["context"]:
            told[f"{_name(one)}, {one['context']:,} tokens: from this host"] = False
    return told


def _held_bars(found: Mapping[str, float]) -> dict[str, bool]:
    own = found.get(f"{HOST}, grouped, 3 levels")
    others = [found[name] for name in (OFFLOADING, LMCACHE) if name in found]
    if own is None or not others:
        return {}
    return {f"{HELD_BAR:g} times as many contexts held": own >= HELD_BAR * max(others)}


def aims(figures: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    told = {}
    for (system, context), (_, aim_ms) in MS_BARS.items():
        one = _of(figures, system=system, context=context, rate="grouped", link=LOOPBACK, levels=3)
        if one is not None:
            told[f"aim: {system}, {context:,} tokens: at most {aim_ms} ms"] = (
                1000 * one["ttft_s"] <= aim_ms
            )
    return told


def _name(one: Mapping[str, Any]) -> str:
    levels = f"{one['levels']} levels" if one["levels"] else ""
    link = one["link"] if one["system"].startswith(NODE) else ""
    return ", ".join(filter(None, (one["system"], link, one["rate"], levels)))


def print_report(console: Console, results: Mapping[str, Any]) -> None:
    for context in sorted({one["context"] for one in results["figures"]}):
        headings = (
            "system", "first token, ms", "times\nfaster", "known", "from\nhost", "moved, MB",
            "bits a\nvalue", "load, ms", "GPU, MB\n(kdn says)",
        )  # fmt: skip
        table = table_of(f"vLLM on a GPU, {context:,} tokens", headings, no_wrap=True)
        for one in results["figures"]:
            if one["context"] == context:
                table.add_row(*_cells(one, results["task"]["token_values"]))
        console.print(table)
    for name, number in results["held"].items():
        console.print(f"{name}: {number:.0f} contexts of {HELD_TOKENS:,} tokens in 20 GB")
    for variant, one in results["beside"].items():
        every = " ".join(f"{share:.3f}" for share in one["every"])
        waits = "" if one["ttft_s"] is None else f"; these wait {1000 * one['ttft_s']:.0f} ms"
        console.print(
            f"eight requests {variant}: {one['share']:.1%} of their speed alone ({every}){waits}"
        )
    for name, passed in results["aims"].items():
        print_passed(console, name, passed)
    print_end(console, results)


def _cells(one: Mapping[str, Any], token_values: int) -> list[str]:
    moved = one["moved_bytes"]
    spread = [1000 * one[name] for name in ("ttft_s", "ttft_min_s", "ttft_max_s")]
    memory = "-" if one["gpu_bytes"] is None else f"{one['gpu_bytes'] / 1e6:.0f}"
    if one["kdn_bytes"] is not None:
        memory += f" ({one['kdn_bytes'] / 1e6:.0f})"
    return [
        _name(one),
        "{:.1f} ({:.1f}-{:.1f})".format(*spread),
        "-" if one["times_faster"] is None else f"{one['times_faster']:.1f}",
        f"{one['hit_tokens']:,}",
        f"{one['host_tokens']:,}" if one["host_tokens"] else "-",
        f"{moved / 1e6:.1f}" if moved else "-",
        f"{8 * moved / one['context'] / token_values:.3f}" if moved else "-",
        f"{one['load_ms']:.0f}" if one["load_ms"] else "-",
        memory,
    ]


def plot(path: Path, results: Mapping[str, Any]) -> None:
    """Time to first token, a panel for each length."""
    contexts = sorted({one["context"] for one in results["figures"]})
    with drawing(path) as pyplot:
        _, panels = pyplot.subplots(
            1, len(contexts), figsize=(5 * len(contexts), 6), layout="constrained", squeeze=False
        )
        for panel, context in zip(panels[0], contexts, strict=True):
            every = [one for one in results["figures"] if one["context"] == context]
            _plot_one(panel, every, context)


def _plot_one(panel: Any, figures: Sequence[Mapping[str, Any]], context: int) -> None:
    middle = [1000 * one["ttft_s"] for one in figures]
    spread = [
        [1000 * (one["ttft_s"] - one["ttft_min_s"]) for one in figures],
        [1000 * (one["ttft_max_s"] - one["ttft_s"]) for one in figures],
    ]
    colours = ["#d1495b" if "kdn" in one["system"] else "#6c757d" for one in figures]
    bars = panel.barh(range(len(figures)), middle, 0.7, xerr=spread, color=colours, capsize=2)
    panel.bar_label(bars, [f"{one:.0f}" for one in middle], fontsize=7, padding=3)
    panel.set_yticks(range(len(figures)), [_name(one) for one in figures], fontsize=7)
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.margins(x=0.15)
    panel.set_xlabel("ms to the first token")
    panel.set_title(f"{context:,} tokens", fontsize=10, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
