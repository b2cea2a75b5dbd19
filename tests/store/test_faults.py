"""The disk store on a file system that forgets or fails, at every step of every operation.

Power loss: each scenario is cut before its first file system call or index commit, before its
second, and so on. At each cut, every state that the unsynced changes can leave meets every state
that the index was in, and none, and a damaged one. Whatever they are, the store opens, has what it
acknowledged and nothing wrong, and index and files agree.

Errors: the same, with EIO and ENOSPC at every step, once and lasting.
"""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest

from kdn.errors import NoSpaceError, StoreError
from kdn.store.base import Store
from kdn.store.disk import DiskStore, footprint_bytes, open_disk
from kdn.store.evict import LRU
from tests.store.contract import content, read
from tests.store.faults import (
    Fuse,
    IndexState,
    PowerCut,
    TracedIndex,
    VolatileFiles,
    copy_index,
    restore_index,
    traced,
)
from tests.store.ledger import Ledger, WatchedLRU, check_agreement, scratch_folder

SIZE = 3000
CAPACITY_BYTES = 4 * footprint_bytes((b"a", bytes(16), SIZE, None, 0.0, 0, b""))
GARBAGE: IndexState = {"index.sqlite": content("garbage", 5000)}

Scenario = Callable[[Store, Ledger], Awaitable[None]]


def data_of(name: str) -> bytes:
    return content(name, SIZE)


async def putting(store: Store, ledger: Ledger) -> None:
    await ledger.put(store, b"new", data_of("new"))


async def putting_many(store: Store, ledger: Ledger) -> None:
    """The second evicts."""
    for name in ("new", "newer"):
        await ledger.put(store, name.encode(), data_of(name))


async def deleting(store: Store, ledger: Ledger) -> None:
    await ledger.delete(store, b"a")


async def replacing(store: Store, ledger: Ledger) -> None:
    await ledger.delete(store, b"b")
    await ledger.put(store, b"b", data_of("another b"))


async def giving_way(store: Store, ledger: Ledger) -> None:
    """One put replaces what is there."""
    await ledger.replace(store, b"b", data_of("another b"))


async def coming_back(store: Store, ledger: Ledger) -> None:
    """The first object is evicted, then put again with other bytes."""
    for name in ("new", "newer", "a"):
        if name.encode() not in ledger.must:
            await ledger.put(store, name.encode(), data_of(f"second {name}"))


async def reading_damage(store: Store, ledger: Ledger) -> None:
    """`c` is damaged; after that its key is free."""
    assert await read(store, b"c") is None
    await ledger.put(store, b"c", data_of("another c"))


async def writing_at_once(store: Store, ledger: Ledger) -> None:
    names = ("p", "q", "r")
    results = await asyncio.gather(
        *(ledger.put(store, name.encode(), data_of(name)) for name in names),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


SCENARIOS: list[Scenario] = [
    putting,
    putting_many,
    deleting,
    replacing,
    giving_way,
    coming_back,
    reading_damage,
    writing_at_once,
]

BRIEF = (putting, deleting, replacing, giving_way, reading_damage)
"""Short enough to try every error by default; of the others, every fifth."""

ERRORS = list(product((errno.EIO, errno.ENOSPC), (True, False)))
"""Each lasting, and once."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as name:
        yield Path(name)


class Machine:
    """A store with three objects, a scenario that meets a fault, and what is left."""

    capacity_bytes = CAPACITY_BYTES
    policy: Callable[..., LRU] = WatchedLRU
    new_ledger: Callable[[], Ledger] = Ledger

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = type(self).new_ledger()
        self.files = VolatileFiles()
        self.states: list[IndexState] = []
        restore_index(folder, {})

    async def open(self, fuse: Fuse) -> DiskStore:
        self.files.fuse = fuse
        policy = type(self).policy(self.ledger)
        opener = traced(fuse, self.states)
        return await open_disk(
            self.folder, self.capacity_bytes, policy, files=self.files, open_index=opener
        )

    async def prepare(self, damage: bytes | None) -> None:
        store = await self.open(Fuse())
        for key in (b"a", b"b", b"c"):
            await self.ledger.put(store, key, data_of(key.decode()))
        await store.close()
        self.states.append(copy_index(self.folder))
        if damage:
            self._damage(damage)

    def _damage(self, key: bytes) -> None:
        objects = self.folder / "objects"
        [name] = [n for n in self.files.folders[objects].names if n.startswith(key.hex() + "-")]
        self.files.flip(objects / name, -1)
        self.ledger.must.pop(key)
        self.ledger.may[key].clear()
        self.ledger.damaged.add(key)

    async def crash(self, store: DiskStore) -> None:
        """The process is gone; nothing it still had to say reaches the disk."""
        store._tasks.shut_down()
        index = store._folder._index
        assert isinstance(index, TracedIndex)
        index.close()

    async def check(self, files: VolatileFiles, state: IndexState) -> None:
        """Start again from here, look at everything, and stop in good order. (What had been
        evicted may be back, and something else be evicted for it.)"""
        restore_index(self.folder, state)
        ledger = deepcopy(self.ledger)
        policy = type(self).policy(ledger)
        store = await open_disk(self.folder, self.capacity_bytes, policy, files=files, threads=1)
        await ledger.check(store)
        assert (await store.stats()).corruptions <= len(ledger.damaged)
        await store.close()
        check_agreement(self.folder, files)

    def index_states(self) -> list[IndexState]:
        distinct = {tuple(sorted(state.items())): state for state in [{}, GARBAGE, *self.states]}
        return list(distinct.values())


def damaged_in(scenario: Scenario) -> bytes | None:
    return b"c" if scenario is reading_damage else None


async def cut_at(folder: Path, scenario: Scenario, at: int) -> tuple[Machine, bool]:
    """The machine after a power cut at step `at` of a scenario; False if it ended before."""
    machine = Machine(folder)
    await machine.prepare(damaged_in(scenario))
    fuse = Fuse()
    store = await machine.open(fuse)
    fuse.steps.clear()
    fuse.at = at
    try:
        await scenario(store, machine.ledger)
        cut = False
    except PowerCut:
        cut = True
    await machine.crash(store)
    return machine, cut


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_power_loss_at_every_step(folder: Path, scenario: Scenario, thorough: bool) -> None:
    """By default every state of the files meets one of the index, in turn; thoroughly, all."""

    async def work() -> tuple[int, int]:
        checked = 0
        cut, at = True, 0
        while cut:
            machine, cut = await cut_at(folder, scenario, at)
            states = machine.index_states()
            for turn, files in enumerate(machine.files.survivors(), at):
                for state in states if thorough else [states[turn % len(states)]]:
                    # Healing changes the files: each index meets them as they were.
                    await machine.check(files.after_kill(), state)
                    checked += 1
            at += 1
        return at, checked

    steps, checked = asyncio.run(work())
    assert steps > 4
    assert checked >= steps
    print(f"{scenario.__name__}: {steps} cuts, {checked} restarts")  # noqa: T201


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_power_loss_while_healing(folder: Path, scenario: Scenario, thorough: bool) -> None:
    """A second power loss, at every step of the start after the first."""

    async def heal_again(machine: Machine, files: VolatileFiles) -> None:
        cut, at = True, 0
        while cut:
            restore_index(folder, {})
            machine.files, machine.states = files.after_kill(), []
            fuse = Fuse(at)
            try:
                store = await machine.open(fuse)
                await machine.crash(store)
                cut = False
            except PowerCut:
                pass
            for after in machine.files.survivors():
                await machine.check(after, machine.index_states()[-1])
            at += 1

    async def work() -> None:
        cut, at = True, 0
        while cut:
            machine, cut = await cut_at(folder, scenario, at)
            survivors = machine.files.survivors()
            for files in survivors if thorough else survivors[-1:]:
                await heal_again(machine, files)
            at += 1 if thorough else 8

    asyncio.run(work())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_an_error_at_every_step(folder: Path, scenario: Scenario, thorough: bool) -> None:
    """A clear error or none; nothing lost, in this process, after its death, after power loss."""

    async def fail_at(at: int, code: int, lasting: bool) -> bool:
        machine = Machine(folder)
        await machine.prepare(damaged_in(scenario))
        fuse = Fuse(error=OSError(code, "injected"), lasting=lasting)
        store = await machine.open(fuse)
        fuse.steps.clear()
        fuse.at = at
        problem: StoreError | None = None
        try:
            await scenario(store, machine.ledger)
        except StoreError as error:
            problem = error
        check_clear(problem, code)
        blown, fuse.at = fuse.blown, None
        await machine.ledger.check(store)
        survivors = machine.files.survivors()
        left = [machine.files.after_kill(), *(survivors if thorough else survivors[:1])]
        states, remembered = machine.index_states()[-2:], deepcopy(machine.ledger)
        await retry(store, machine.ledger)
        await store.close()
        for state in (copy_index(folder), {}):
            await machine.check(machine.files.after_kill(), state)
        machine.ledger = remembered
        for files in left:
            for state in states if thorough else states[-1:]:
                await machine.check(files.after_kill(), state)
        return blown

    def check_clear(problem: StoreError | None, code: int) -> None:
        if problem is not None:
            assert "injected" in str(problem)
            assert isinstance(problem, NoSpaceError) == (code == errno.ENOSPC)

    async def retry(store: Store, ledger: Ledger) -> None:
        """Once the disk is well again, so is the store. Every other key is deleted first; what is
        put under the others must not be taken for what a failed operation left there."""
        for turn, key in enumerate([*ledger.may, *ledger.damaged]):
            if key in ledger.must or turn % 2:
                ledger.lose(key)
                await store.delete(key)
                ledger.may[key].clear()
            await ledger.put(store, key, data_of(f"retry {key!r}"))
        await ledger.check(store)

    async def work() -> None:
        stride = 1 if thorough or scenario in BRIEF else 5
        for code, lasting in ERRORS if thorough else ERRORS[::3]:
            at = 0
            while await fail_at(at, code, lasting):
                at += stride
            assert at > 3

    asyncio.run(work())


def test_the_fault_layer_finds_a_missing_sync(folder: Path) -> None:
    """The tests above can fail: without its syncs, the same store loses what it acknowledged."""

    class Careless(VolatileFiles):
        def sync(self, fd: int) -> None:
            self.fuse.step("no sync")

    class Forgetful(VolatileFiles):
        def sync_folder(self, folder: Path) -> None:
            self.fuse.step("no sync of the folder")

    async def losses(files: VolatileFiles) -> int:
        machine = Machine(folder)
        machine.files = files
        store = await machine.open(Fuse())
        await machine.ledger.put(store, b"a", data_of("a"))
        await machine.crash(store)
        lost = 0
        for after in files.survivors():
            try:
                await machine.check(after, machine.states[-1])
            except AssertionError:
                lost += 1
        return lost

    assert asyncio.run(losses(VolatileFiles())) == 0
    assert asyncio.run(losses(Careless())) > 0
    assert asyncio.run(losses(Forgetful())) > 0
