"""Bytes in any order, verified level by level."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from random import Random

import pytest

from kdn.codec.format import Bitstream
from kdn.codec.header import Header
from kdn.delivery.assemble import IN_LOOP_BYTES, Assembly, Intervals
from tests.node.harness import chunk_stream, key_of


def test_intervals_hold_what_a_set_would() -> None:
    rng = Random(1)
    intervals, model = Intervals(), set[int]()
    for _ in range(500):
        start = rng.randrange(60)
        end = start + rng.randrange(12)
        if rng.random() < 0.7:
            intervals.add(start, end)
            model |= set(range(start, end))
        else:
            intervals.remove(start, end)
            model -= set(range(start, end))
        missing = [i for lo, hi in intervals.missing(5, 65) for i in range(lo, hi)]
        assert missing == [i for i in range(5, 65) if i not in model]
        assert intervals.first_gap == min(set(range(75)) - model)


@pytest.fixture
def stream() -> bytes:
    return chunk_stream(key_of(1), 5000)


def begun(stream: bytes) -> Assembly:
    header = Header.parse(stream)
    return Assembly(header, stream[: header.size_bytes + 7])


def add(assembly: Assembly, start: int, data: bytes | bytearray) -> int:
    """Take bytes and verify what is whole."""
    new_bytes = assembly.add(start, data)
    asyncio.run(assembly.verify())
    return new_bytes


@pytest.mark.parametrize("seed", range(20))
def test_pieces_in_any_order_make_the_stream(stream: bytes, seed: int) -> None:
    rng, assembly = Random(seed), begun(stream)
    edges = sorted({0, len(stream), *(rng.randrange(len(stream)) for _ in range(30))})
    pieces = [(lo, stream[lo:hi]) for lo, hi in pairwise(edges)]
    rng.shuffle(pieces)
    new_bytes = sum(add(assembly, start, data) for start, data in pieces)
    assert new_bytes == len(stream) - assembly.header.size_bytes - 7
    assert assembly.levels == 3
    assert not assembly.missing(len(stream))
    assembly.stream(3).verify()


def test_levels_count_when_they_are_whole(stream: bytes) -> None:
    assembly = begun(stream)
    ends = assembly.level_ends
    add(assembly, 0, stream[: ends[0] - 1])
    assert assembly.levels == 0
    add(assembly, ends[1], stream[ends[1] :])
    assert assembly.levels == 0
    add(assembly, ends[0] - 1, stream[ends[0] - 1 : ends[0]])
    assert (assembly.levels, assembly.arrived_bytes) == (1, ends[0])
    assert assembly.missing(ends[2]) == [(ends[0], ends[1])]
    assert Bitstream.parse(stream[: ends[0]]).section(0, 0, 0) == assembly.stream(1).section(
        0, 0, 0
    )


def test_a_damaged_level_is_missing_again_and_all_behind_it(stream: bytes) -> None:
    assembly = begun(stream)
    ends = assembly.level_ends
    damaged = bytearray(stream)
    damaged[ends[0] + 5] ^= 1
    add(assembly, 0, damaged)
    assert (assembly.levels, assembly.damages) == (1, 1)
    assert assembly.missing(ends[2]) == [(ends[0], ends[2])]
    add(assembly, 0, stream)
    assert assembly.levels == 3


def test_bytes_that_are_there_are_not_written_again(stream: bytes) -> None:
    assembly = begun(stream)
    add(assembly, 0, stream)
    assert add(assembly, 0, bytes(len(stream))) == 0
    assembly.stream(3).verify()


def test_bytes_after_the_end_are_ignored(stream: bytes) -> None:
    assembly = begun(stream)
    add(assembly, 0, stream + b"more")
    assert assembly.levels == 3


def test_large_levels_are_verified_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = chunk_stream(key_of(1), 6 * IN_LOOP_BYTES)
    assembly = begun(stream)
    threads = set()
    check_level = Header.check_level

    def seen(self: Header, level: int, data: memoryview, *, windowed: bool) -> None:
        threads.add(threading.current_thread())
        check_level(self, level, data, windowed=windowed)

    monkeypatch.setattr(Header, "check_level", seen)
    add(assembly, 0, stream)
    assert assembly.levels == 3
    assert threading.current_thread() not in threads


def test_a_verification_that_was_stopped_can_be_made_again() -> None:
    stream = chunk_stream(key_of(1), 6 * IN_LOOP_BYTES)
    assembly = begun(stream)
    assembly.add(0, stream)

    async def stop() -> None:
        task = asyncio.create_task(assembly.verify())
        await asyncio.sleep(0)
        assert not assembly.is_ripe  # somebody is at it
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(stop())
    assert assembly.is_ripe
    asyncio.run(assembly.verify())
    assert assembly.levels == 3


def test_a_level_is_not_verified_again_to_be_decoded(stream: bytes) -> None:
    assembly = begun(stream)
    add(assembly, 0, stream)
    before = assembly.stream(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Header, "check_level", None)
        assert before.section(2, 0, 0)
