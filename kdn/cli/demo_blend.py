"""`kdn demo --blend`: three documents learned apart, and one question over all of them.

A node serves at 100 Mbit/s. One process learns three chapters of Python's manual, each by itself.
Another, which never read them, answers a question about all three: from the three joined, from the
same repaired by seams if any are found for this model, and then by reading everything.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from kdn.bench.node_servers import start_kdn
from kdn.checked import checked_number
from kdn.cli.client import as_quality
from kdn.cli.demo import worker
from kdn.cli.demo_blend_show import Screen, report
from kdn.session.quality import enough_kld

MAX_TOKENS = 48
WORKER = "kdn.cli.demo_blend_worker"
CHAPTERS = ("raise", "with", "for")
QUESTION = "What do the raise statement, the with statement and the for statement do?"


def run(mbit: float, quality: str, device: str) -> None:
    from kdn.engines.device import chosen_device
    from kdn.engines.models import smollm2_folder

    console = Console()
    mbit = checked_number("mbit", mbit, 0.1, 1e6)
    enough_kld(as_quality(quality))
    where = {"device": str(chosen_device(device))}
    smollm2_folder()  # fetched once, before anything is timed
    screen = Screen(console, QUESTION, mbit)
    shaped = {"egress_bits_per_s": int(mbit * 1e6), "memory_bytes": "256MiB"}
    with (
        tempfile.TemporaryDirectory(prefix="kdn-demo-") as folder,
        start_kdn(Path(folder), shaped) as node,
        screen,
    ):
        screen.say("Process A loads the model and reads each document by itself")
        for event in worker({"do": "learn", "url": node.url, "texts": chapters(), **where}, WORKER):
            screen.learned(event)
        screen.say("Process B, which never read them, loads the model")
        task = {"do": "answer", "url": node.url, "names": CHAPTERS, "question": QUESTION}
        how = {"max_tokens": MAX_TOKENS, "quality": as_quality(quality)}
        for event in worker({**task, **how, **where}, WORKER):
            screen.answered(event)
    console.print(report(screen))


def chapters() -> dict[str, str]:
    """Of Python's own manual, which every installation carries."""
    from pydoc_data.topics import topics

    return {name: topics[name].strip() for name in CHAPTERS}
