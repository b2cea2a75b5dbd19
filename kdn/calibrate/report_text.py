"""The report of `kdn calibrate`, shown on the terminal, as JSON or as a plot."""

from __future__ import annotations

import json as json_text
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kdn.calibrate.ratios import KLD_LIMIT, RECALL_LIMIT
from kdn.calibrate.report import Report, ReportedLevel
from kdn.calibrate.report_plot import plot_report
from kdn.defaults import QUALITY
from kdn.session.quality import enough_kld

_HEADINGS = (
    "level", "bits/\nvalue", "ratio", "KLD", "95 %", "recall\nKLD", "95 %", "top-1",
    "prefill/\ndecode",
)  # fmt: skip

_WIDTH = 120
"""In a file or a pipe: the table as it is."""


def show_report(report: Report, *, json: Path | None = None, plot: Path | None = None) -> None:
    if json is not None:
        json.write_text(json_text.dumps(report.as_json(), indent=1) + "\n")
    if plot is not None:
        plot_report(plot, report)
    console = Console()
    wide = console if console.is_terminal else Console(width=max(console.width, _WIDTH))
    print_report(wide, report)


def print_report(console: Console, report: Report) -> None:
    console.print(_table(report))
    for line in _lines(report):
        console.print(line, highlight=False)
    verdict = report.verdict
    said = "Fit for use." if verdict.is_fit else "Not fit for use:"
    console.print(said, style="bold green" if verdict.is_fit else "bold red")
    for finding in verdict.against:
        console.print(f"- {finding.reason}", highlight=False)
        console.print(f"  What helps: {finding.help}.", highlight=False)
    for finding in verdict.notes:
        console.print(f"Note: {finding.reason}; {finding.help}.", style="dim", highlight=False)


def _table(report: Report) -> Table:
    count = report.figures.num_windows
    title = f"{count} contexts of {report.context:,} tokens kept out of calibration"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for level in report.levels:
        table.add_row(*_cells(level, report.prefill_s))
    return table


def _cells(level: ReportedLevel, prefill_s: float) -> list[str]:
    return [
        str(level.level),
        f"{level.bits_per_value:.3f}",
        f"{level.ratio:.1f}",
        f"{level.kld:.4f}",
        "{:.4f} to {:.4f}".format(*level.kld_interval),
        f"{level.recall_kld:.4f}",
        "{:.4f} to {:.4f}".format(*level.recall_interval),
        f"{level.top1:.3f}",
        f"{prefill_s / max(level.decode_s, 1e-9):.0f}",
    ]


def _lines(report: Report) -> list[str]:
    default, figures = report.levels[report.default_level], report.figures
    lines = [
        f"ratio at quality (KLD {KLD_LIMIT:g}, recall KLD {RECALL_LIMIT:g}): "
        f"{figures.ratio_at_quality:.1f}",
        f"at the default quality (KLD {enough_kld(QUALITY):g}) levels 0 to {default.level} are "
        f"fetched: {default.ratio:.1f} times smaller than fp16, decoded in "
        f"1/{figures.prefill_over_decode:.0f} of the prefill's time ({report.device})",
        f"profile: {report.profile_bytes / 1e6:.1f} MB, {figures.profile_share:.1%} of the "
        f"weights, made from {figures.num_tokens:,} tokens; {figures.overlap:.1%} of the 8-grams "
        "kept out occur in them, too",
    ]
    if figures.is_own_text:
        lines.append(f"{report.num_dropped} texts that repeated themselves were dropped")
    return lines
