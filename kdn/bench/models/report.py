"""The report of `kdn bench models`: a table, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kdn.bench.models.judging import LEAST_RATIO, Judged
from kdn.bench.models.training import Trained
from kdn.bench.report import drawing, hardware, print_end, table_of

NOTES = (
    "ratio at quality: KLD at most 0.01 and recall KLD at most 0.05, on documents that neither "
    "training nor calibration has seen",
    "decoding counts where it is faster, on the CPU or on the device: a GPU reads so small a model "
    "in the time it takes to launch its kernels",
)


@dataclass(frozen=True)
class Row:
    trained: Trained
    judged: Judged


def document(rows: Mapping[str, Row], device: str) -> dict[str, Any]:
    return {
        "models": {
            name: {"training": asdict(row.trained), "judged": row.judged.as_json()}
            for name, row in rows.items()
        },
        "passes": {
            f"{name}: {bar}": passed
            for name, row in rows.items()
            for bar, passed in row.judged.passes().items()
        },
        "notes": list(NOTES),
        "hardware": hardware(device),
    }


def print_report(console: Console, rows: Mapping[str, Row], results: Mapping[str, Any]) -> None:
    table = table_of(
        "Trained models, on documents kept out",
        (
            "model", "weights", "trained", "loss", "kept out", "unigrams",
            "passage read\nfirst, again", "ratio at\nquality", "KLD\nreported",
            "KLD\nmeasured", "prefill/decode\non the CPU", "on the\ndevice", "exact\ntokens",
        ),
    )  # fmt: skip
    for name, row in rows.items():
        table.add_row(*_cells(name, row))
    console.print(table)
    print_end(console, results)


def _cells(name: str, row: Row) -> list[str]:
    trained, judged = row.trained, row.judged
    exact = judged.handed_over
    return [
        name,
        f"{trained.parameters / 1e6:.1f}M",
        f"{trained.tokens / 1e6:.1f}M tokens, {trained.seconds:.0f} s",
        f"{trained.loss:.2f}",
        f"{trained.held_out:.2f}",
        f"{trained.unigram:.2f}",
        f"{trained.new:.2f}, {trained.recalled:.2f}",
        f"{judged.ratio:.1f}",
        f"{judged.expected_kld:.4f}",
        f"{judged.measured_kld:.4f} ({judged.off:+.0%})",
        f"{judged.on_cpu:.0f}",
        f"{judged.on_device:.0f}",
        f"{exact.same_tokens}/{exact.tokens}",
    ]


def plot(path: Path, rows: Mapping[str, Row]) -> None:
    """Divergence over compression, of each model on other text and as its report had it."""
    with drawing(path) as pyplot:
        _, panel = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for name, row in rows.items():
            for source, style in ((row.judged.other, "-"), (row.judged.calibrated, ":")):
                levels = source["levels"]
                panel.plot(
                    [level["ratio"] for level in levels],
                    [max(level["kld"], 1e-6) for level in levels],
                    style, marker="o", color=f"C{list(rows).index(name)}",
                    label=name if style == "-" else f"{name}, as reported",
                )  # fmt: skip
        panel.axhline(0.01, color="#444444", linewidth=0.9, linestyle="--")
        panel.axvline(LEAST_RATIO, color="#444444", linewidth=0.9, linestyle="--")
        panel.set(xscale="log", yscale="log")
        panel.set_xlabel("times smaller than fp16")
        panel.set_ylabel("KLD (nats per token)")
        panel.legend(frameon=False)
