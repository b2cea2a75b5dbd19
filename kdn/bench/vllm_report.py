"""How `kdn bench vllm` is told: a table, JSON, a plot, and which bars hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kdn.bench.report import drawing, print_end, table_of
from kdn.bench.vllm_systems import LINKS, LOOPBACK
from kdn.errors import FormatError

LOOPBACK_BAR = 1.3
BYTES_BAR = 10.0
HIT_BAR = 0.9
RAW = ("ExampleConnector", "LMCache")
"""Systems that store what the engine holds: in a 16-bit engine, half of it."""
_COLOURS = {
    "no cache": "#6c757d", "ExampleConnector": "#3f7d20", "LMCache": "#2e6f95", "kdn": "#d1495b",
    "kdn, decoding": "#edae49",
}  # fmt: skip
_NOTES = (
    "Time to first token: median (least to most) over the documents, each read once by a fresh "
    "engine. Known: tokens of the prompt that were not computed. Stored, moved: bytes a document.",
    "LMCache on loopback: its server's RAM through shared memory; over links: a fresh server that "
    "reads from Redis behind a shaping proxy. kdn on loopback: what the first engine left in the "
    "host's shared memory, next to nothing from the node; over links: a fresh host and a node with "
    "an egress limit. kdn, decoding: on one host without shared memory.",
    "= : computed, not measured. ExampleConnector has files, no link: its loopback time and its "
    "bytes over the link's rate. At 16 bit: half of a raw cache's bytes and of their time on the "
    "link.",
)


class VllmRow(NamedTuple):
    """One system over one link."""

    system: str
    link: str
    answers: list[dict[str, Any]]
    """A document each, as `vllm_engine.EngineAnswer`."""
    moved_bytes: list[int]
    """A document each; empty where they could not be counted."""
    stored_bytes: int
    """A document."""
    vllm: str
    warm_up: dict[str, Any] | None = None
    """The engine's very first answer, not among the others."""


def read_rows(paths: Sequence[Path], task: dict[str, Any]) -> list[VllmRow]:
    """The rows of earlier runs, which must have had the same task."""
    rows = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
            rows += [VllmRow(**row) for row in found["rows"]]
            other = {name: found["task"][name] for name in task}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path}: expected JSON of kdn bench vllm: {error}") from error
        if other != task:
            raise FormatError(f"{path}: expected the task {task}, found {other}")
    return rows


def document(
    rows: Sequence[VllmRow],
    task: dict[str, Any],
    notes: Sequence[str],
    facts: dict[str, str],
) -> dict[str, Any]:
    """Everything, as it goes to JSON. Of two rows for the same, the later counts."""
    latest = {(row.system, row.link): row for row in rows}
    plain = next((row for row in latest.values() if row.system == "no cache"), None)
    figures = [summary(row, plain) for row in latest.values()]
    told = figures + [computed for one in figures for computed in at_links(one)]
    order = list(_COLOURS)
    told.sort(key=lambda one: (list(LINKS).index(one["link"]), order.index(one["system"])))
    return {
        "figures": told,
        "passes": passes({(one["system"], one["link"]): one for one in told}, task),
        "rows": [row._asdict() for row in latest.values()],
        "task": task,
        "notes": [*notes, *_NOTES],
        "hardware": facts | {"vllm": next((row.vllm for row in rows), "")},
        "commit": facts["commit"],
    }


def summary(row: VllmRow, plain: VllmRow | None) -> dict[str, Any]:
    """One row in figures."""
    ttft_s = [answer["ttft_s"] for answer in row.answers]
    moved_bytes = median(row.moved_bytes) if row.moved_bytes else _raw_moved(row)
    half = 2 if row.system in RAW else 1
    rate = LINKS[row.link]
    saved_s = (moved_bytes - moved_bytes / half) * 8 / rate if rate else 0.0
    return {
        "system": row.system,
        "link": row.link,
        "computed": False,
        "ttft_s": median(ttft_s),
        "ttft_min_s": min(ttft_s),
        "ttft_max_s": max(ttft_s),
        "ttft_16bit_s": median(ttft_s) - saved_s,
        "hit_tokens": min(answer["hit_tokens"] for answer in row.answers),
        "stored_bytes": row.stored_bytes,
        "stored_16bit_bytes": row.stored_bytes / half,
        "moved_bytes": moved_bytes,
        "moved_16bit_bytes": moved_bytes / half,
        "moved_counted": bool(row.moved_bytes),
        **_agreement(row, plain),
    }


def _raw_moved(row: VllmRow) -> float:
    """Raw caches that come by file or shared memory: all that is stored."""
    return float(row.stored_bytes) if row.system in RAW else 0.0


def _agreement(row: VllmRow, plain: VllmRow | None) -> dict[str, Any]:
    """How many answers begin as those without a cache; tokens equal from the start, on average."""
    if plain is None or plain is row:
        return {"same_first": None, "same_tokens": None}
    pairs = [
        (answer["tokens"], other["tokens"])
        for answer, other in zip(row.answers, plain.answers, strict=True)
    ]
    equal = [_equal_from_start(*pair) for pair in pairs]
    return {
        "same_first": sum(count > 0 for count in equal) / len(equal),
        "same_tokens": sum(equal) / sum(len(tokens) for tokens, _ in pairs),
    }


def _equal_from_start(tokens: Sequence[int], others: Sequence[int]) -> int:
    count = 0
    for one, other in zip(tokens, others, strict=True):
        if one != other:
            break
        count += 1
    return count


def at_links(one: dict[str, Any]) -> list[dict[str, Any]]:
    """ExampleConnector over links, from its loopback time and its bytes."""
    if one["system"] != "ExampleConnector":
        return []
    told = []
    for link, rate in LINKS.items():
        if rate is not None:
            wire_s = one["moved_bytes"] * 8 / rate
            times = {name: one[name] + wire_s for name in ("ttft_s", "ttft_min_s", "ttft_max_s")}
            half = {"ttft_16bit_s": one["ttft_s"] + wire_s / 2}
            told.append(one | times | half | {"link": link, "computed": True})
    return told


def passes(figures: dict[tuple[str, str], dict[str, Any]], task: dict[str, Any]) -> dict[str, bool]:
    """The bars that can be told from what was measured."""
    told = {}
    for link in LINKS:
        own, other = figures.get(("kdn", link)), figures.get(("LMCache", link))
        if own and other and link == LOOPBACK:
            told[f"loopback: within {LOOPBACK_BAR} times of LMCache"] = (
                own["ttft_s"] <= LOOPBACK_BAR * other["ttft_s"]
            )
        elif own and other:
            told[f"{link}: faster than LMCache"] = own["ttft_s"] < other["ttft_s"]
            told[f"{link}: faster than LMCache, were its cache of 16 bit"] = (
                own["ttft_s"] < other["ttft_16bit_s"]
            )
        if own and other:
            told |= _bytes_bars(link, own, other)
    for (system, link), one in figures.items():
        if system != "no cache" and not one["computed"]:
            told[f"{system}, {link}: known"] = one["hit_tokens"] >= HIT_BAR * task["context"]
    return told


def _bytes_bars(link: str, own: dict[str, Any], other: dict[str, Any]) -> dict[str, bool]:
    """Of what moves on loopback, kdn counts only what its node sends: that says nothing."""
    told = {}
    for what in ("stored",) if link == LOOPBACK else ("stored", "moved"):
        for name, how in ((f"{what}_bytes", ""), (f"{what}_16bit_bytes", ", LMCache at 16 bit")):
            told[f"{link}: {BYTES_BAR:g} times fewer bytes {what}{how}"] = (
                own[name] * BYTES_BAR <= other[name]
            )
    return told


def print_report(console: Console, results: dict[str, Any]) -> None:
    console.print(_table(results))
    print_end(console, results)


def _table(results: dict[str, Any]) -> Table:
    task = results["task"]
    title = (
        f"A fresh vLLM engine, {task['model']}, {task['documents']} documents of "
        f"{task['context']:,} tokens ({task['text']})"
    )
    headings = (
        "link", "system", "first token, s", "at 16 bit", "known\ntokens", "stored, MB\n(at 16 bit)",
        "moved, MB\n(at 16 bit)", "same first\ntoken", "same\ntokens",
    )  # fmt: skip
    table = table_of(title, headings, texts=2, no_wrap=True)
    previous = ""
    for one in results["figures"]:
        if previous and one["link"] != previous:
            table.add_section()
        table.add_row(one["link"] if one["link"] != previous else "", *_cells(one))
        previous = one["link"]
    return table


def _cells(one: dict[str, Any]) -> list[str]:
    computed = "= " if one["computed"] else ""
    spread = f"{one['ttft_s']:.2f} ({one['ttft_min_s']:.2f}-{one['ttft_max_s']:.2f})"
    raw = one["system"] in RAW and (one["computed"] or LINKS[one["link"]] is not None)
    sizes = [_sizes(one, what) for what in ("stored", "moved")]
    agreement = [
        "-" if one[name] is None else f"{one[name]:.0%}" for name in ("same_first", "same_tokens")
    ]
    return [
        one["system"],
        computed + spread,
        f"= {one['ttft_16bit_s']:.2f}" if raw else "-",
        f"{one['hit_tokens']:,}",
        *sizes,
        *agreement,
    ]


def _sizes(one: dict[str, Any], what: str) -> str:
    size, half = one[f"{what}_bytes"] / 1e6, one[f"{what}_16bit_bytes"] / 1e6
    return f"{size:.1f} ({half:.1f})" if size else "-"


def plot(path: Path, results: dict[str, Any]) -> None:
    """Time to first token by link, and bytes a document."""
    with drawing(path) as pyplot:
        _, (times, sizes) = pyplot.subplots(
            1, 2, figsize=(11, 4), layout="constrained", width_ratios=(2, 1)
        )
        _plot_times(times, results["figures"])
        _plot_bytes(sizes, results["figures"])


def _plot_times(panel: Any, figures: Sequence[dict[str, Any]]) -> None:
    plain = next((one for one in figures if one["system"] == "no cache"), None)
    figures = [one for one in figures if one is not plain]
    systems = [name for name in _COLOURS if any(one["system"] == name for one in figures)]
    links = [link for link in LINKS if any(one["link"] == link for one in figures)]
    width = 0.8 / max(1, len(systems))
    for number, system in enumerate(systems):
        rows = [one for one in figures if one["system"] == system]
        at = [links.index(one["link"]) + number * width for one in rows]
        middle = [one["ttft_s"] for one in rows]
        spread = [
            [one["ttft_s"] - one["ttft_min_s"] for one in rows],
            [one["ttft_max_s"] - one["ttft_s"] for one in rows],
        ]
        hatch = ["//" if one["computed"] else "" for one in rows]
        bars = panel.bar(
            at, middle, width, yerr=spread, hatch=hatch, edgecolor="white", capsize=2,
            color=_COLOURS[system], label=system,
        )  # fmt: skip
        panel.bar_label(bars, [f"{one:.2g}" for one in middle], fontsize=7, padding=2)
    if plain is not None:
        panel.axhline(
            plain["ttft_s"], color=_COLOURS["no cache"], linewidth=0.9, linestyle=(0, (4, 3)),
            label=f"no cache: {plain['ttft_s']:.2g} s",
        )  # fmt: skip
    panel.set_xticks([place + width * (len(systems) - 1) / 2 for place in range(len(links))], links)
    panel.set_yscale("log")
    panel.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    panel.minorticks_off()
    panel.set_ylim(0.4, 40)
    panel.set_ylabel("s to the first token")
    panel.set_title("A fresh vLLM engine (hatched: computed)", fontsize=10, loc="left")
    panel.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    panel.spines[["top", "right"]].set_visible(False)


def _plot_bytes(panel: Any, figures: Sequence[dict[str, Any]]) -> None:
    rows = {one["system"]: one for one in figures if one["moved_16bit_bytes"] > 0}
    sizes = [one["moved_16bit_bytes"] / 1e6 for one in rows.values()]
    bars = panel.barh(range(len(rows)), sizes, 0.6, color=[_COLOURS[name] for name in rows])
    panel.bar_label(bars, [f"{size:.1f}" for size in sizes], fontsize=8, padding=3)
    panel.set_yticks(range(len(rows)), list(rows), fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.set_xlabel("MB a document, were the cache of 16 bit")
    panel.set_title("Bytes moved", fontsize=10, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
