"""Processes that are killed at any moment, and others at the same time, lose no accepted chunk."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kdn.delivery.publish import Publisher
from kdn.delivery.spool import Spool
from kdn.store.base import Store
from tests.delivery import spooler
from tests.delivery.spooler import CHUNKS, NUMBERS, Numbered, stream
from tests.delivery.world import run

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.delivery.spooler"])
ROUNDS = 8
A_FEW = 20
"""Chunks for one process."""


class Told:
    """The numbers that a process sends, read to the end after its death."""

    def __init__(self) -> None:
        self.read, self.write = PROCESSES.Pipe(duplex=False)

    def next(self) -> list[int]:
        assert self.read.poll(30.0), "nothing told in time"
        return list(self.read.recv_bytes())

    def rest(self) -> list[int]:
        numbers = []
        with suppress(EOFError):
            while True:
                numbers += self.next()
        return numbers


@contextmanager
def started(work: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """Killed at the end. Arguments that are Told are its ends to write to."""
    pipes = [one for one in args if isinstance(one, Told)]
    ends: list[Connection] = [one.write for one in pipes]
    process = PROCESSES.Process(
        target=work, args=[one.write if isinstance(one, Told) else one for one in args], daemon=True
    )
    process.start()
    for end in ends:
        end.close()
    try:
        yield process
    finally:
        process.kill()
        process.join(30.0)
        assert process.exitcode == -9, "it was there until it was killed"


async def sent_to(store: Store, root: Path) -> None:
    """By a process that comes later, with the place there."""
    spool = Spool.open(root)
    async with Publisher(store, Numbered(), spool=spool), asyncio.timeout(20.0):
        while len(spool):
            await asyncio.sleep(0.01)
    spool.close()


@pytest.mark.parametrize("away", [1.0, 0.4])
def test_every_accepted_chunk_arrives(tmp_path: Path, away: float) -> None:
    rng, root, folder = Random(5), tmp_path / "spool", tmp_path / "place"
    accepted: set[int] = set()
    for number in range(ROUNDS):
        told, mine = Told(), range(number * A_FEW, (number + 1) * A_FEW)
        with started(spooler.publish, root, folder, number, away, mine, told):
            for _ in range(rng.randint(1, 4)):
                accepted.update(told.next())
            time.sleep(rng.uniform(0.0, 0.03))
        accepted.update(told.rest())

    async def work() -> dict[int, bytes]:
        store = await spooler.place(folder)
        await sent_to(store, root)
        found = {NUMBERS[entry.key]: await store.get(entry.key) async for entry in store.list()}
        await store.close()
        return {number: bytes(span.data) for number, span in found.items() if span is not None}

    found = run(work())
    assert accepted <= set(found) <= set(range(ROUNDS * A_FEW)), accepted - set(found)
    assert all(data == stream(number) for number, data in found.items())
    assert not list(root.iterdir())


def test_processes_that_live_keep_their_chunks(tmp_path: Path) -> None:
    """Another one neither sends nor removes them, before their owner is dead."""
    root, told, mine = tmp_path / "spool", Told(), range(8)
    with started(spooler.publish, root, tmp_path / "away", 0, 1.0, mine, told):
        accepted: set[int] = set()
        while accepted < set(mine):
            accepted.update(told.next())
        spool = Spool.open(root)
        assert (len(spool), spool.adopt(), spool.first()) == (0, 0, None)
        for number in mine:
            spool.remove(CHUNKS[number].key)
        spool.close()
        assert len(list(root.glob("*/*.chunk"))) == len(mine)
    again = Spool.open(root)
    assert len(again) == len(mine)
    again.close()


def test_many_owners_at_once_lose_no_chunk(tmp_path: Path) -> None:
    """That add, send, take over from each other, come, go and die."""
    rng, added, sent = Random(7), set[int](), set[int]()
    for number in range(4):
        rooms = [(Told(), Told()) for _ in range(3)]
        works = [
            started(spooler.hammer, tmp_path, 10 * number + i, _part(3 * number + i), *room)
            for i, room in enumerate(rooms)
        ]
        with works[0], works[1], works[2]:
            for told, _ in rooms:
                added.update(told.next())
            time.sleep(rng.uniform(0.0, 0.1))
        for told, gone in rooms:
            added.update(told.rest())
            sent.update(gone.rest())
    spool, left = Spool.open(tmp_path), set[int]()
    while (parcel := spool.first()) is not None:
        left.add(number := NUMBERS[parcel.key])
        assert parcel == spooler.parcel(number)
        spool.remove(parcel.key)
    spool.close()
    assert added <= sent | left, added - sent - left
    assert spool.damaged == 0
    assert not list(tmp_path.iterdir())


def _part(number: int) -> range:
    return range(number * 15, (number + 1) * 15)
