"""`kdn export`: what a place has, as files for any web server. Nothing here needs torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kdn.checked import shown
from kdn.cli.remote import NO_LIMIT, Whom
from kdn.config import load_config
from kdn.errors import UnsupportedError
from kdn.places.export import Exported, OnChunk, export
from kdn.places.places import open_places
from kdn.session.exporting import STREAMS


def run(whom: Whom, folder: Path, names: list[str], prune: bool) -> None:
    """`whom.url`: the place, a folder or a URL."""
    place = whom.url or ""
    if "://" not in place and not os.path.isdir(os.path.expanduser(place)):
        raise UnsupportedError(f"expected a folder or the URL of a node, found {shown(place)}")
    flags = {"client.token_file": whom.token_file, "client.tls_ca": whom.tls_ca}
    own = load_config(whom.config, flags).client.credentials

    async def work() -> Exported:
        opening = open_places(
            place, token=own.token, tls_ca=own.tls_ca, memory_bytes=0, disk_bytes=NO_LIMIT
        )
        with export_bar(Console(stderr=True)) as report:
            async with opening as places:
                return await export(
                    places, folder.expanduser(), STREAMS, names=names, prune=prune, on_chunk=report
                )

    tell(asyncio.run(work()), folder)


def tell(done: Exported, folder: Path) -> None:
    console, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, soft_wrap=True)
    pruned = f"; {done.pruned_files} files removed" if done.pruned_files else ""
    console.print(
        f"{folder}: {done.names} names, {done.chunks:,} chunks; {done.new_chunks:,} of them new "
        f"({done.new_bytes / 1e6:.1f} MB){pruned}",
        markup=False,
    )
    for name, count in sorted(done.missing.items()):
        notes.print(f"{name}: {count} chunks are not there any more", markup=False, style="yellow")
    if done.damaged:
        notes.print(
            f"{len(done.damaged)} chunks did not verify and were left out: {done.damaged[0]}, ...",
            markup=False, style="yellow",
        )  # fmt: skip


@contextmanager
def export_bar(console: Console) -> Iterator[OnChunk]:
    """On a terminal only, and gone afterwards."""
    columns = BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn()
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None, visible=False, state="")

        def report(done: int, total: int, num_bytes: int) -> None:
            state = f"{done:,} of {total:,} chunks, {num_bytes / 1e6:.1f} MB new"
            bar.update(task, completed=done, total=total, state=state, visible=True)

        yield report
