"""Connections are counted, bounded, and cut when closing takes too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kdn.config import NodeSettings
from kdn.node.connection import Connections
from kdn.node.stats import NodeStats
from tests.node.harness import run


class Wire:
    """A transport that only says what was done to it."""

    def __init__(self, closing: bool) -> None:
        self.closing, self.aborted = closing, False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


def test_closing_has_a_deadline() -> None:
    async def work() -> None:
        settings = NodeSettings(write_timeout_s=30, max_connections=2)
        node: Any = SimpleNamespace(settings=settings, stats=NodeStats())
        connections = Connections(node, None)  # type: ignore[arg-type]
        closing: Any = Wire(closing=True)
        open_: Any = Wire(closing=False)
        one: Any = object()
        two: Any = object()
        assert connections.add(one, closing)
        assert connections.add(two, open_)
        assert not connections.add(object(), open_)  # type: ignore[arg-type]
        for now_s in (100.0, 110.0, 129.9):
            connections.reap(now_s)
            assert not closing.aborted
        connections.reap(130.0)
        assert closing.aborted
        assert not open_.aborted
        assert not connections.all_closed.is_set()
        connections.remove(one)
        connections.remove(two)
        connections.remove(two)
        assert connections.all_closed.is_set()

    run(work())
