"""Cutting objects on disk, and making them whole again, while the power or the disk fails at every
step: what is left is the object or its beginning, and never anything else."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from kdn.errors import StoreError
from kdn.store.base import Hints, Store
from kdn.store.disk import footprint_bytes
from kdn.store.evict import LRU
from tests.store.contract import content, put, read
from tests.store.faults import Fuse, PowerCut
from tests.store.ledger import Ledger, scratch_folder
from tests.store.test_faults import Machine

SIZE, KEPT = 9000, 3000
HINTS = Hints(cuts=(KEPT, SIZE))
CAPACITY_BYTES = 4 * footprint_bytes((b"a", bytes(16), SIZE, None, 0.0, 0, bytes(16)))


class CutLedger(Ledger):
    """`must_some`: acknowledged, and then cut: all of it is there, or its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.must_some: defaultdict[bytes, set[bytes]] = defaultdict(set)

    async def put(self, store: Store, key: bytes, data: bytes) -> None:
        """Also of one that was cut."""
        self.may[key].add(data)
        entry = await put(store, key, data, HINTS)
        assert entry.size_bytes == len(data)
        self.must_some.pop(key, None)
        self.must[key] = data

    def cut(self, key: bytes) -> None:
        data = self.must.get(key)
        self.lose(key)
        if data is not None:
            self.must_some[key] = {data, data[:KEPT]}
            self.may[key] |= self.must_some[key]

    def lose(self, key: bytes) -> None:
        super().lose(key)
        self.must_some.pop(key, None)

    async def check(self, store: Store) -> None:
        for key, some in self.must_some.items():
            assert await read(store, key) in some, f"{key!r} was cut, and is lost or wrong"
        await super().check(store)


class WatchedCuts(LRU):
    """Cuts what is whole, drops what is cut, the least recently used first; and says so first."""

    may_cut = True

    def __init__(self, ledger: CutLedger) -> None:
        super().__init__()
        self._ledger = ledger
        self._whole: set[bytes] = set()
        self._named: bytes | None = None

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        super().add(key, size_bytes, hints)
        self._whole.add(key)

    def cut(self, key: bytes, size_bytes: int, kept_bytes: int) -> None:
        self._whole.discard(key)

    def remove(self, key: bytes) -> None:
        super().remove(key)
        if key == self._named:  # it could not be cut
            self._ledger.lose(key)

    def victim(self, held: bool = False) -> bytes | None:
        *others, _ = self._order or [None]  # the last one is just coming
        order = [*(key for key in others if key in self._whole), *self._order]
        self._named = order[0] if order else None
        if self._named in self._whole:
            self._ledger.cut(self._named)
        elif self._named is not None:
            self._ledger.lose(self._named)
        return self._named

    def kept_bytes(self, key: bytes) -> int:
        return KEPT if key in self._whole else 0


class CutMachine(Machine):
    capacity_bytes = CAPACITY_BYTES
    policy = WatchedCuts
    new_ledger = CutLedger

    async def prepare(self, damage: bytes | None = None) -> None:
        """Four whole objects: no more fit."""
        store = await self.open(Fuse())
        for key in (b"a", b"b", b"c", b"d"):
            await self.ledger.put(store, key, data_of(key.decode()))
        await store.close()


def data_of(name: str) -> bytes:
    return content(name, SIZE)


async def cutting(store: Store, ledger: Ledger) -> None:
    await ledger.put(store, b"new", data_of("new"))


async def cutting_and_dropping(store: Store, ledger: Ledger) -> None:
    for number in range(6):
        await ledger.put(store, b"n%d" % number, data_of(f"n{number}"))


async def healing(store: Store, ledger: Ledger) -> None:
    """`a` is cut, and then put again: others are cut for it."""
    await ledger.put(store, b"new", data_of("new"))
    await ledger.put(store, b"a", data_of("a"))


async def deleting_what_was_cut(store: Store, ledger: Ledger) -> None:
    await ledger.put(store, b"new", data_of("new"))
    ledger.lose(b"a")
    await store.delete(b"a")  # it is gone already where it could not be cut
    ledger.may[b"a"].clear()
    await ledger.put(store, b"a", content("another a", SIZE))


Scenario = Callable[[Store, Ledger], Awaitable[None]]
SCENARIOS: list[Scenario] = [cutting, cutting_and_dropping, healing, deleting_what_was_cut]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as name:
        yield Path(name)


async def stopped(folder: Path, scenario: Scenario, fuse: Fuse, at: int) -> CutMachine:
    """The machine after a fault at step `at`; `fuse.blown` if there was one."""
    machine = CutMachine(folder)
    await machine.prepare()
    store = await machine.open(fuse)
    fuse.steps.clear()
    fuse.at = at
    try:
        await scenario(store, machine.ledger)
    except PowerCut:
        pass
    except StoreError:
        fuse.at = None
        await machine.ledger.check(store)
    await machine.crash(store)
    return machine


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_power_loss_at_every_step(folder: Path, scenario: Scenario, thorough: bool) -> None:
    async def work() -> int:
        at, checked = 0, 0
        while True:
            fuse = Fuse()
            machine = await stopped(folder, scenario, fuse, at)
            states = machine.index_states()
            for turn, files in enumerate(machine.files.survivors(), at):
                for state in states if thorough else [states[turn % len(states)]]:
                    await machine.check(files.after_kill(), state)
                    checked += 1
            if not fuse.blown:
                return checked
            at += 1 if thorough or scenario is cutting else 3

    assert asyncio.run(work()) > 10


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_at_every_step(
    folder: Path, scenario: Scenario, code: int, thorough: bool
) -> None:
    """What cannot be cut goes; what cannot be made whole may be gone; the rest stays as it was."""

    async def work() -> int:
        at = 0
        while True:
            fuse = Fuse(error=OSError(code, "injected"), lasting=False)
            machine = await stopped(folder, scenario, fuse, at)
            for files in machine.files.survivors()[:1]:
                await machine.check(files.after_kill(), machine.index_states()[-1])
            if not fuse.blown:
                return at
            at += 1 if thorough else 3

    assert asyncio.run(work()) > 4


def test_objects_are_cut_here(folder: Path) -> None:
    """That the tests above test it."""

    async def work() -> None:
        machine = CutMachine(folder)
        await machine.prepare()
        store = await machine.open(Fuse())
        await cutting_and_dropping(store, machine.ledger)
        stats = await store.stats()
        assert stats.cuts >= 4
        assert stats.evictions > 0
        assert len(deepcopy(machine.ledger).must_some) > 0
        await healing(store, machine.ledger)
        await machine.ledger.check(store)
        await store.close()

    asyncio.run(work())
