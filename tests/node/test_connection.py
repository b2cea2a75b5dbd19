"""Connections are counted, bounded, and cut when closing takes too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kdn.config import NodeSettings, TenantSettings
from kdn.depot.tenants import tenants_of
from kdn.node.connection import Connections
from kdn.node.stats import NodeStats
from kdn.node.tenants import Tenants
from tests.node.harness import run, tenant


class Wire:
    """A transport that only says what was done to it."""

    def __init__(self, closing: bool) -> None:
        self.closing, self.aborted = closing, False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


def connections_for(settings: NodeSettings, *tenants: TenantSettings) -> Connections:
    node: Any = SimpleNamespace(
        settings=settings,
        stats=NodeStats(),
        tenants=Tenants(tenants_of(tenants), lambda: 0.0),
        ledger=None,
        behind_workers=False,
    )
    return Connections(node, None)  # type: ignore[arg-type]


def test_no_tenant_takes_all_connections() -> None:
    """Of 16 places 12 are tenants': 3 are Ann's own, 3 Bob's, and 6 for whoever comes first."""

    async def work() -> None:
        settings = NodeSettings(max_connections=16)
        tenants = (tenant("ann", "a"), tenant("bob", "b"))
        connections = connections_for(settings, *tenants)
        ann, bob = connections.node.tenants
        anns: list[Any] = [object() for _ in range(12)]
        wires: list[Any] = [Wire(closing=False) for _ in anns]
        for one, wire in zip(anns, wires, strict=True):
            assert connections.add(one, wire)
        assert [connections.claim(one, ann) for one in anns] == [True] * 9 + [False] * 3
        assert connections.claim(anns[0], ann)  # its next request
        bobs: list[Any] = [object() for _ in range(4)]
        for one in bobs:
            assert connections.add(one, Wire(closing=False))  # type: ignore[arg-type]
        assert [connections.claim(one, bob) for one in bobs] == [True] * 3 + [False]
        connections.remove(anns[0])
        assert connections.claim(bobs[3], bob)

    run(work())


def test_a_tenant_may_have_a_cap_of_its_own() -> None:
    async def work() -> None:
        settings = NodeSettings(max_connections=16)
        connections = connections_for(settings, tenant("ann", "a", max_connections=2))
        (ann,) = connections.node.tenants
        ones: list[Any] = [object() for _ in range(3)]
        for one in ones:
            assert connections.add(one, Wire(closing=False))  # type: ignore[arg-type]
        assert [connections.claim(one, ann) for one in ones] == [True, True, False]

    run(work())


def test_a_newcomer_pushes_out_the_oldest_stranger() -> None:
    async def work() -> None:
        connections = connections_for(NodeSettings(max_connections=4))
        (everybody,) = connections.node.tenants
        ones: list[Any] = [object() for _ in range(6)]
        wires: list[Any] = [Wire(closing=False) for _ in ones]
        for one, wire in zip(ones[:4], wires, strict=False):
            assert connections.add(one, wire)
        assert connections.claim(ones[0], everybody)
        for one, wire in zip(ones[4:], wires[4:], strict=True):
            assert connections.add(one, wire)
        assert [wire.aborted for wire in wires] == [False, True, True, False, False, False]
        assert not connections.claim(ones[1], everybody)

    run(work())


def test_closing_has_a_deadline() -> None:
    async def work() -> None:
        settings = NodeSettings(write_timeout_s=30, max_connections=2)
        connections = connections_for(settings)
        closing: Any = Wire(closing=True)
        open_: Any = Wire(closing=False)
        one: Any = object()
        two: Any = object()
        assert connections.add(one, closing)
        assert connections.add(two, open_)
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
