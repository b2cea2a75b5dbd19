"""What an engine and its fetcher (`fetcher.py`, `fetcher_process.py`) say to each other: lines of
JSON over a socket that only these two have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from kdn.store.base import NodeAt


class Hello(NamedTuple):
    """The first line: who asks. It is the only way that a token takes."""

    connections: int
    arena_bytes: int
    token: str | None = None
    client: str | None = None
    tls_ca: str | None = None


class Span(NamedTuple):
    """Bytes [start, end) of a stream, which begins in the arena at `at`. What is before `start` is
    there. `parts`: where each part ends that has a digest of its own, and that digest, from the
    stream's first level on, which begins at `first`."""

    key: str
    etag: str
    start: int
    end: int
    at: int
    first: int
    parts: Sequence[tuple[int, str]]


class Order(NamedTuple):
    """Spans to be fetched by then, on the clock that all processes share. `shares`: which of them
    each node is asked for."""

    number: int
    until_s: float
    spans: Sequence[Span]
    shares: Sequence[tuple[NodeAt, Sequence[int]]]


class News(NamedTuple):
    """Of an order. `verified`: of these spans so many parts are there and right. Nothing is written
    to a span of which all are, nor to any when it has `ended`."""

    number: int
    fetched_bytes: int
    verified: Sequence[tuple[int, int]] = ()
    ended: bool = False
    trouble: str = ""


class Stop(NamedTuple):
    number: int


def pack(message: Hello | Order | Stop | News) -> bytes:
    return json.dumps([type(message).__name__, *message]).encode() + b"\n"


def parse_order(line: bytes) -> Hello | Order | Stop:
    kind, *found = json.loads(line)
    if kind == "Order":
        number, until_s, spans, shares = found
        nodes = [(NodeAt(*node), own) for node, own in shares]
        return Order(number, until_s, [Span(*span) for span in spans], nodes)
    return Hello(*found) if kind == "Hello" else Stop(*found)


def parse_news(line: bytes) -> News:
    """ValueError or TypeError if it is none."""
    found: list[Any] = json.loads(line)
    return News(*found[1:])
