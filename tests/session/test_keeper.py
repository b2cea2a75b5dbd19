"""Streams on their way to the host's memory: later, bounded, and not after the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kdn.background import faults
from kdn.cache.keys import Chunk
from kdn.codec.format import Buffer
from kdn.session import keeper as keeper_module
from kdn.session.keeper import StreamKeeper
from tests.session.levelled import prompt

[CHUNK] = prompt(1)


class Streams:
    """That can be held up."""

    def __init__(self) -> None:
        self.put_ones: list[tuple[int, int]] = []
        self.used_ones: list[int] = []
        self.unkept: list[str] = []
        self.go_on = threading.Event()
        self.error: Exception | None = None

    def put(self, chunk: Chunk, data: Buffer, levels: int) -> bool:
        self.go_on.wait(5)
        if self.error:
            raise self.error
        self.put_ones.append((len(data), levels))
        return True

    def note_unkept(self, why: str) -> None:
        self.unkept.append(why)

    def used(self, chunks: Sequence[Chunk]) -> None:
        self.used_ones.append(len(chunks))


@pytest.fixture
def streams() -> Any:
    return Streams()


def soon(condition: Any) -> None:
    until_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_too_much_at_once_is_not_kept(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "KEEP_AFTER_S", 0.0)
    keeper = StreamKeeper(streams, max_bytes=10)
    assert keeper.keep(CHUNK, bytes(6), 2)
    assert not keeper.keep(CHUNK, bytes(5), 2)
    assert streams.unkept == ["too many are on their way"]
    assert keeper.keep(CHUNK, bytes(4), 3)
    streams.go_on.set()
    soon(lambda: len(streams.put_ones) == 2)
    soon(lambda: keeper.keep(CHUNK, bytes(10), 1))
    soon(lambda: len(streams.put_ones) == 3)
    assert streams.put_ones == [(6, 2), (4, 3), (10, 1)]
    keeper.close()


def test_what_fails_is_counted_and_gives_its_room_back(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "KEEP_AFTER_S", 0.0)
    keeper, before = StreamKeeper(streams, max_bytes=10), faults["keeping a stream"]
    streams.error = RuntimeError("ours")
    streams.go_on.set()
    assert keeper.keep(CHUNK, bytes(10), 1)
    soon(lambda: faults["keeping a stream"] == before + 1)
    soon(lambda: keeper.keep(CHUNK, bytes(10), 1))
    keeper.close()


def test_streams_are_kept_later_and_not_after_the_end(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute: it is over before."""
    monkeypatch.setattr(keeper_module, "KEEP_AFTER_S", 30.0)
    keeper = StreamKeeper(streams)
    streams.go_on.set()
    began_s = time.monotonic()
    assert keeper.keep(CHUNK, bytes(10), 1)
    keeper.used([CHUNK, CHUNK])
    keeper.close()
    assert time.monotonic() - began_s < 20
    assert keeper.keep(CHUNK, bytes(10), 1)
    keeper.used([CHUNK])
    assert (streams.put_ones, streams.used_ones) == ([], [])


def test_streams_count_as_used_when_nobody_waits_any_more(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "KEEP_AFTER_S", 0.01)
    keeper = StreamKeeper(streams)
    keeper.used([CHUNK, CHUNK])
    keeper.used([])
    soon(lambda: streams.used_ones == [2])
    keeper.close()
