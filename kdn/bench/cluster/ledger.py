"""A load that keeps books: what was acknowledged, what every operation came to, and afterwards
whether all that was acknowledged is there, byte by byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from kdn.bench.cluster.items import make_items, put_item
from kdn.errors import KdnError
from kdn.store.base import Store

ITEM_BYTES = 16 << 10
SLOW_S = 0.5
"""An operation that took longer was held up by what went on."""
PAUSE_S = 0.01
"""Between two operations of a client: the machine has other work, too."""
VERIFY_TRIES, VERIFY_PAUSE_S = 5, 1.0
AT_ONCE = 16


class Operation(NamedTuple):
    kind: str
    began_s: float
    ended_s: float
    error: str
    """Empty: it succeeded."""

    @property
    def was_held_up(self) -> bool:
        return bool(self.error) or self.ended_s - self.began_s > SLOW_S


class Acknowledged(NamedTuple):
    etag: bytes
    size_bytes: int
    checksum: int

    def is_same(self, etag: bytes, data: bytes | memoryview) -> bool:
        return (etag, len(data), xxh3_64_intdigest(data)) == self


@dataclass
class Ledger:
    acknowledged: dict[bytes, Acknowledged] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    under_way: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Kinds and beginnings of those that have not ended."""
    missing: int = 0
    """Reads of what was acknowledged that found nothing, at the time."""
    wrong_bytes: int = 0
    _numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def noted(self, kind: str) -> Iterator[None]:
        """Around an operation, whose failure is noted and no more."""
        number, began_s, error = next(self._numbers), time.monotonic(), ""
        self.under_way[number] = kind, began_s
        try:
            yield
        except (KdnError, OSError) as failure:
            error = reason_of(failure)
        finally:
            del self.under_way[number]
            self.operations.append(Operation(kind, began_s, time.monotonic(), error))

    async def caught_up(self, limit_s: float) -> None:
        """Until no operation is held up, but no longer than this."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            before_s = time.monotonic() - SLOW_S
            if not any(began_s < before_s for _, began_s in self.under_way.values()):
                return
            await asyncio.sleep(SLOW_S / 10)

    def since(self, start_s: float) -> list[Operation]:
        """Those that still wait count as if they had succeeded just now."""
        now_s = time.monotonic()
        waiting = [Operation(kind, began_s, now_s, "") for kind, began_s in self.under_way.values()]
        return [one for one in self.operations + waiting if one.ended_s >= start_s]

    def outage(self, start_s: float) -> dict[str, Any]:
        """Of what happened at that time: for how long operations failed or were held up."""
        after = self.since(start_s)
        failed = [one.ended_s for one in after if one.error]
        held_up = [one.ended_s for one in after if one.was_held_up]
        return {
            "errors": len(failed),
            "error_s": max(failed) - min(failed) if failed else 0.0,
            "back_s": max(held_up) - start_s if held_up else 0.0,
            "operations": len(after),
        }

    def reasons(self) -> list[str]:
        """Of failures, each kind once."""
        return sorted({one.error for one in self.operations if one.error})[:5]


@asynccontextmanager
async def load(
    store: Store, ledger: Ledger, writers: int, readers: int, seed: Sequence[int]
) -> AsyncIterator[None]:
    """Clients that put and read until the block ends."""
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(_write(store, ledger, [*seed, at], stop)) for at in range(writers)
    ] + [asyncio.create_task(_read(store, ledger, Random(at), stop)) for at in range(readers)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def _write(store: Store, ledger: Ledger, seed: Sequence[int], stop: asyncio.Event) -> None:
    for item in make_items(ITEM_BYTES, seed):
        if stop.is_set():
            return
        with ledger.noted("put"):
            if await put_item(store, item):
                told = Acknowledged(item.etag, item.size_bytes, item.checksum)
                ledger.acknowledged[item.key] = told
        await asyncio.sleep(PAUSE_S)


async def _read(store: Store, ledger: Ledger, rng: Random, stop: asyncio.Event) -> None:
    keys: list[bytes] = []
    for number in count():
        if stop.is_set():
            return
        if number % 16 == 0:
            keys = list(ledger.acknowledged)
        if keys:
            await _read_one(store, ledger, rng.choice(keys))
        await asyncio.sleep(PAUSE_S)


async def _read_one(store: Store, ledger: Ledger, key: bytes) -> None:
    told = ledger.acknowledged[key]
    with ledger.noted("get"):
        span = await store.get(key)
        if span is None:
            ledger.missing += 1
        elif not told.is_same(span.entry.etag, span.data):
            ledger.wrong_bytes += 1


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


async def verify(store: Store, ledger: Ledger) -> dict[str, int]:
    """Everything that was acknowledged, when all is calm again."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def state(key: bytes, told: Acknowledged) -> str:
        async with turns:
            for attempt in range(VERIFY_TRIES):
                try:
                    span = await store.get(key)
                except (KdnError, OSError):
                    span = None
                if span is not None:
                    return "right" if told.is_same(span.entry.etag, span.data) else "wrong"
                if attempt < VERIFY_TRIES - 1:
                    await asyncio.sleep(VERIFY_PAUSE_S)
            return "lost"

    found = await asyncio.gather(*(state(*one) for one in ledger.acknowledged.items()))
    return {
        "acknowledged": len(found),
        "acknowledged_lost": found.count("lost"),
        "wrong_bytes": found.count("wrong") + ledger.wrong_bytes,
        "missing_at_the_time": ledger.missing,
    }
