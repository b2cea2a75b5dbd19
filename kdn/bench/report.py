"""What the reports of all benchmarks share: on what was measured, where it goes, how it looks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MIN_WIDTH = 132


def hardware(device: str) -> dict[str, str]:
    """What the figures were measured on, and with which code."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else 0
    facts = {
        "cpu": f"{_cpu_name()}, {cores} cores, {memory / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "commit": commit(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of the checkout this code runs from, marked if it has changes."""
    folder = Path(__file__).parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return told.stdout.strip() or "unknown"


def code_digest() -> str:
    """Of all of kdn's code: unlike a commit, it tells one change of a checkout from another."""
    digest, root = blake2b(digest_size=8), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def report_console() -> Console:
    """Where the report goes: into a file or pipe it is as wide as its widest table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, MIN_WIDTH))


def write_json(path: Path, results: Mapping[str, Any], *, allow_nan: bool = True) -> None:
    path.write_text(json.dumps(results, indent=1, allow_nan=allow_nan) + "\n")


def table_of(
    title: str, headings: Sequence[str], *, texts: int = 1, no_wrap: bool = False
) -> Table:
    """With its columns: the first `texts` of them hold words, the others figures."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        justify: Any = "right" if number >= texts else "left"
        table.add_column(heading, justify=justify, no_wrap=no_wrap)
    return table


def print_passed(console: Console, name: str, passed: bool) -> None:
    console.print(f"{name}: {'passes' if passed else 'FAILS'}", style=None if passed else "red")


def print_end(console: Console, results: Mapping[str, Any]) -> None:
    """Which bars hold, what is to be known of the figures, and on what they were measured."""
    for name, passed in results["passes"].items():
        print_passed(console, name, passed)
    for note in results["notes"]:
        console.print(note, style="dim")
    facts = results["hardware"]
    console.print("  ".join(f"{name} {fact}" for name, fact in facts.items()), style="dim")


@contextmanager
def drawing(path: Path) -> Iterator[Any]:
    """Pyplot, for one figure that is saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.savefig(path, dpi=140)
    pyplot.close()
