"""A node in a process, with settings from the environment. For tests that must find a mistake it
can have one: a region that answers a read of the latest from its copy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from kdn.config import load_config
from kdn.depot.names import Asked, Told
from kdn.node.server import run
from kdn.region.names import RegionNames


def answer_latest_from_copy() -> None:
    """As if nobody had asked for the latest."""
    honest: Callable[[RegionNames, str, str, Asked], Told | None] = RegionNames._from_copy

    def lying(names: RegionNames, tenant: str, name: str, asked: Asked) -> Told | None:
        return honest(names, tenant, name, replace(asked, latest=False))

    RegionNames._from_copy = lying  # type: ignore[method-assign,assignment]


def forget_what_clients_have_seen() -> None:
    """As if no client told what it had seen."""
    honest: Callable[[RegionNames, str, str, Asked], Told | None] = RegionNames._from_copy

    def lying(names: RegionNames, tenant: str, name: str, asked: Asked) -> Told | None:
        return honest(names, tenant, name, replace(asked, seen=0))

    RegionNames._from_copy = lying  # type: ignore[method-assign,assignment]


BUGS = {
    "answer-latest-from-copy": answer_latest_from_copy,
    "forget-what-clients-have-seen": forget_what_clients_have_seen,
}

if __name__ == "__main__":
    for bug in sys.argv[1:]:
        BUGS[bug]()
    run(load_config())
