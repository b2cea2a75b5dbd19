"""The link is kept full whatever the round trip, and not fuller than that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kdn.cache.keys import Chunk
from kdn.codec.header import Header
from kdn.delivery.assemble import Assembly
from kdn.delivery.endpoints import Endpoints
from kdn.delivery.estimate import Estimator
from kdn.delivery.flight import Limits
from kdn.delivery.lookup import Incoming, Question
from kdn.delivery.plan import Fetch, Link
from kdn.delivery.transfer import Transfer
from kdn.store.base import Store
from kdn.store.streaming import Ask, Piece
from tests.delivery.world import Proxy, make_world, run
from tests.node.harness import chunk_stream, key_of

PIECE_BYTES = 16 << 10
PRIOR = Link(rate=2e6, low_rate=5e5, latency_s=0.05)


class Line(Proxy):
    """A link with a round trip and a rate that all requests share, first come, first served."""

    def __init__(self, inner: Store, rate: float, round_trip_s: float) -> None:
        super().__init__(inner)
        self.rate, self.round_trip_s = rate, round_trip_s
        self.free_s = 0.0
        self.waiting_bytes = self.most_bytes = 0

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece, None]:
        size = sum(ask.end - ask.start for ask in asks)
        self.waiting_bytes += size
        self.most_bytes = max(self.most_bytes, self.waiting_bytes)
        await asyncio.sleep(self.round_trip_s)
        for number, ask in enumerate(asks):
            for start in range(ask.start, ask.end, PIECE_BYTES):
                end = min(start + PIECE_BYTES, ask.end)
                self.free_s = max(self.free_s, time.monotonic()) + (end - start) / self.rate
                await asyncio.sleep(max(0.0, self.free_s - time.monotonic()))
                self.waiting_bytes -= end - start
                yield Piece(number, start, bytes(end - start))


def incoming(number: int, size_bytes: int) -> Incoming:
    stream = chunk_stream(key_of(number), size_bytes, levels=1)
    header, none = Header.parse(stream), np.zeros(0, np.uint32)
    chunk = Chunk(key_of(number), b"", 16 * number, np.zeros(16, np.uint32), none, b"")
    return Incoming(number, chunk, Assembly(header, stream[: header.size_bytes]))


@pytest.mark.parametrize(("round_trip_s", "rate"), [(0.1, 8e6), (0.002, 8e6), (0.05, 1e6)])
def test_the_link_is_full(
    round_trip_s: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    total_bytes = int(1.5 * rate)
    # What arrives are zeros: they need not verify here.
    monkeypatch.setattr(Header, "check_level", lambda self, level, data, *, windowed: None)

    async def test() -> None:
        world = make_world(1)
        line = Line(await world.store(), rate, round_trip_s)
        known = [incoming(number, total_bytes // 40) for number in range(40)]
        question = Question([], world.codec, time.monotonic, Random(1))
        transfer = Transfer(
            known, question, Endpoints([line]), Estimator(PRIOR), Limits(), time.monotonic() + 60
        )
        fetches = [Fetch(number, 1) for number in range(40)]
        began_s = time.monotonic()
        while any(one.assembly.missing(one.assembly.level_ends[0]) for one in known):
            transfer.watch()
            transfer.pump(fetches)
            await asyncio.sleep(0.002)
        took_s = time.monotonic() - began_s
        await transfer.close()
        assert transfer.failures == 0
        # A first round trip is lost, and some more until the estimate has grown.
        assert total_bytes / rate / (took_s - round_trip_s) > 0.5
        product = rate * max(round_trip_s, 0.1)
        assert line.most_bytes < 4 * product

    run(test())


def test_a_dead_endpoint_rests_between_attempts() -> None:
    class Dead(Proxy):
        attempts = 0

        async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece, None]:
            self.attempts += 1
            raise ConnectionResetError
            yield

    async def test() -> None:
        world = make_world(1)
        dead = Dead(await world.store())
        question = Question([], world.codec, time.monotonic, Random(1))
        transfer = Transfer(
            [incoming(0, 1000)], question, Endpoints([dead]), Estimator(),
            replace(Limits(), requests=2), time.monotonic() + 60,
        )  # fmt: skip
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s or dead.attempts < 3:
            transfer.pump([Fetch(0, 1)])
            await asyncio.sleep(0.002)
        await transfer.close()
        assert dead.attempts <= 10
        assert transfer.failures == dead.attempts
        assert transfer.troubles

    run(test())
