"""What the progress bar says, and to whom."""

from __future__ import annotations

import io

from rich.console import Console

from kdn.cli.progress import bar, describe, share
from kdn.delivery.request import Snapshot

SNAPSHOT = Snapshot(0.5, 1.5, (3, 3, -1, 0, 1), 6, 1_250_000, 6e6)


def test_words() -> None:
    expected = "2 at 3/6, 1 at 1/6, 1 missing, 1 computed | 1.2 MB | 48 Mbit/s | 1.5 s left"
    assert describe(SNAPSHOT) == expected
    assert share(SNAPSHOT) == 0.25
    assert share(Snapshot(0.0, 0.0, (), 1, 0, 0.0)) == 1.0


def drawn(*snapshots: Snapshot, terminal: bool) -> str:
    file = io.StringIO()
    with bar(Console(file=file, force_terminal=terminal, width=150)) as report:
        for snapshot in snapshots:
            report(snapshot)
    return file.getvalue()


def test_the_bar_is_drawn_on_a_terminal_only() -> None:
    assert describe(SNAPSHOT) in drawn(SNAPSHOT, terminal=True)
    assert drawn(SNAPSHOT, terminal=False) == ""


def test_nothing_is_drawn_while_nothing_is_delivered() -> None:
    assert "left" not in drawn(terminal=True)
