"""`kdn demo`: feel the speedup, in processes that share nothing but a node.

A node serves at 100 Mbit/s. One process learns a document. Another, which never read it, answers
two questions: from what the node delivers, and then by reading the document itself. Every figure
shown is measured in this run; nothing is kept from one run to the next but the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from rich.console import Console

from kdn.bench.node_servers import start_kdn
from kdn.bench.report import hardware, write_json
from kdn.checked import checked_number, checked_output, checked_plot
from kdn.cli.client import as_quality, read_text
from kdn.cli.demo_show import Screen, report
from kdn.errors import KdnError
from kdn.session.quality import enough_kld

START_S = 60.0
SILENCE_S = 300.0
QUESTIONS = (
    "What does the assert statement do?",
    "What is an assignment statement used for?",
)


class DemoError(KdnError):
    """A process of the demo failed."""


@dataclass(frozen=True)
class Extent:
    """How much the demo does."""

    num_tokens: int = 6144
    """Of the document."""
    questions: tuple[str, ...] = QUESTIONS
    max_tokens: int = 40
    """Of an answer."""

    @classmethod
    def of(cls, quick: bool, num_tokens: int | None) -> Extent:
        """Quick: enough to see that everything works, in under a minute."""
        extent = cls(1024, QUESTIONS[:1], 12) if quick else cls()
        return extent if num_tokens is None else replace(extent, num_tokens=num_tokens)


def run(
    text_path: Path | None,
    extent: Extent,
    mbit: float,
    quality: str,
    device: str,
    out: Path,
    json_path: Path | None = None,
) -> None:
    from kdn.cli.demo_text import document
    from kdn.engines.device import chosen_device
    from kdn.engines.models import smollm2_folder

    console = Console()
    mbit = checked_number("mbit", mbit, 0.1, 1e6)
    enough_kld(as_quality(quality))
    checked_plot(out)
    if json_path is not None:
        checked_output(json_path)
    where = {"device": str(chosen_device(device))}
    own = read_text(text_path) if text_path else None
    smollm2_folder()  # fetched once, before anything is timed
    text = document(own, extent.num_tokens)
    screen = Screen(console, extent.questions, mbit)
    shaped = {"egress_bits_per_s": int(mbit * 1e6), "memory_bytes": "256MiB"}
    with (
        tempfile.TemporaryDirectory(prefix="kdn-demo-") as folder,
        start_kdn(Path(folder), shaped) as node,
        screen,
    ):
        screen.say("Process A loads the model and reads the document")
        for event in worker({"do": "learn", "url": node.url, "text": text, **where}):
            screen.learned(event)
        screen.say("Process B, which never read it, loads the model")
        task = {"do": "answer", "url": node.url, "questions": extent.questions}
        how = {"max_tokens": extent.max_tokens, "quality": as_quality(quality)}
        for event in worker({**task, **how, **where}):
            screen.answered(event)
    console.print(report(screen))
    _plot(screen, out, console)
    if json_path is not None:
        write_json(json_path, {"hardware": hardware(where["device"]), **results(screen)})


def worker(
    task: Mapping[str, Any], module: str = "kdn.cli.demo_worker"
) -> Iterator[dict[str, Any]]:
    """Runs a task in a process of its own: what it tells, as it tells it."""
    command = [sys.executable, "-m", module]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(task))
        process.stdin.close()
        lines = _lines(process.stdout)
        try:
            while (line := lines.get(timeout=SILENCE_S)) is not None:
                yield json.loads(line)
            if process.wait(START_S):
                errors.seek(0)
                raise DemoError(f"a process failed: {errors.read()[-2000:]}")
        except Empty:
            raise DemoError(f"a process said nothing for {SILENCE_S:.0f} s") from None
        finally:
            process.kill()
            process.wait(START_S)


def _lines(stream: Any) -> Queue[str | None]:
    """Read in a thread, so that every wait can have a deadline; None at the end."""
    lines: Queue[str | None] = Queue()

    def copy() -> None:
        with suppress(OSError, ValueError), stream:  # what is no text is an end, too
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=copy, daemon=True).start()
    return lines


def results(screen: Screen) -> dict[str, Any]:
    """All that was measured, for programs."""
    learn = {name: value for name, value in screen.learn.items() if name not in ("event", "way")}
    answers = [
        {"question": screen.questions[number], "way": way, **asdict(side), "ttft_s": side.ttft_s}
        for (number, way), side in screen.sides.items()
    ]
    return {"mbit": screen.mbit, "learn": learn, "answers": answers, "klds": screen.klds}


def _plot(screen: Screen, out: Path, console: Console) -> None:
    try:
        from kdn.cli.demo_plot import plot
    except ImportError:
        console.print("No timeline: pip install 'kdn[plot]'", markup=False)
        return
    plot(screen.sides, screen.learn, screen.mbit, out)
    console.print(f"Timeline: {out}", highlight=False, markup=False)
