"""What the progress bar says."""

from __future__ import annotations

from kdn.delivery.progress import bar, describe, share
from kdn.delivery.request import Snapshot

SNAPSHOT = Snapshot(0.5, 1.5, (3, 3, -1, 0, 1), 6, 1_250_000, 6e6)


def test_words() -> None:
    expected = "2 at 3/6, 1 at 1/6, 1 missing, 1 computed | 1.2 MB | 48 Mbit/s | 1.5 s left"
    assert describe(SNAPSHOT) == expected
    assert share(SNAPSHOT) == 0.25
    assert share(Snapshot(0.0, 0.0, (), 1, 0, 0.0)) == 1.0


def test_the_bar_takes_reports() -> None:
    with bar() as report:
        report(SNAPSHOT)
