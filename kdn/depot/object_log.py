"""A log of what happened to names, in a bucket: the one truth of many nodes, without a server.

Each entry is one object, `log/<sequence>`, that is only ever created: whoever creates the next one
has made it happen, everybody else reads it, and tries again after it. So all nodes agree on one
order. Each has the state in memory (`name_state.py`) and reads what is new:

- an update is one request (after a lost race, a few more);
- a read that must see all updates is one request: for the next entry, which mostly is not there.

So that a newcomer need not read all of it, now and then a writer keeps the whole state beside it:
`state/<sequence>`, and in `newest` which one is the newest. Entries long before that are
overwritten with where that state is. They are not deleted: a writer that slept for a week and
believes that one of them is the next would create it a second time. Nothing of this has to be
atomic. An old `newest` leads to an entry that leads on; a state that is gone, too.

    begin                {"sequence"}: before the first entry
    log/<20 digits>      {"id", "kind", ...}, or {"state": S}: forgotten, go on at S
    newest               {"state": S}
    state/<20 digits>    all names, and the state before (`before`)
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any, TypeVar

from kdn.depot.name_state import Happening, NameState, Put, parse_happening, told
from kdn.depot.small_objects import SmallObjects
from kdn.errors import FormatError, KdnError, StoreError

H = TypeVar("H", bound=Happening)
logger = logging.getLogger(__name__)

STATE_EVERY = 64
"""Entries."""
MAX_CHANGES = 1000
MAX_ENTRY_BYTES = 8 << 20
MAX_STATE_BYTES = 1 << 30
WINDOWS = (1, 4, 16)
"""Entries that are asked for at once: more, the more there were."""
MAX_HOPS = 64
AT_ONCE = 8
PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""After a lost race."""
COMMIT_S = 45.0
CLOSE_S = 10.0


class ObjectLog:
    def __init__(self, bucket: SmallObjects, folder: str = "names") -> None:
        self.bucket = bucket
        self._folder = folder
        self._state: NameState | None = None  # None: nothing is known yet
        self._kept = 0  # the newest `state/` known
        self._kept_before = 0
        self._updates = asyncio.Lock()
        """Guards the state: it is read by anybody, and changed by one at a time."""
        self._begun, self._done = 0, 0  # refreshes, by number
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_begun(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> NameState:
        """As it was at the last `refresh` or `commit`."""
        return self._state or NameState(0)

    def path(self, kind: str, which: int | str) -> str:
        number = f"{which:020d}" if isinstance(which, int) else which
        return f"{self._folder}/{kind}/{number}"

    async def refresh(self) -> NameState:
        """All that was acknowledged before this was called. Many callers share one request."""
        begun = self._begun
        async with self._updates:
            if self._done <= begun:  # none that began after this was called has succeeded
                self._begun += 1
                await self._read_on()
                self._done = self._begun
            return self.state

    async def begin(self) -> NameState:
        """The same, of a log that there is from now on."""
        async with self._updates:
            await self._begin()
            return self.state

    async def commit(self, decide: Callable[[NameState], H]) -> tuple[H, list[str]]:
        """Make happen what `decide` says of the newest state. It may be asked several times, and
        refuse with an error. What happened, and the bodies that are no longer needed."""
        try:
            async with asyncio.timeout(COMMIT_S), self._updates:
                await self._begin()
                return await self._commit(decide)
        except TimeoutError:
            raise StoreError(f"names were being changed by others for {COMMIT_S} s") from None

    async def _commit(self, decide: Callable[[NameState], H]) -> tuple[H, list[str]]:
        own, pause_s = token_hex(8), PAUSE_S
        while True:
            happening = await self._decided(decide)
            sequence = self.state.sequence + 1
            entry = json.dumps({"id": own, **told(happening)}, separators=(",", ":")).encode()
            if len(entry) > MAX_ENTRY_BYTES:
                raise StoreError(
                    f"an entry of {len(entry)} bytes is too large for the log of names"
                )
            if await self._create(sequence, entry, own):
                gone = self.state.apply(happening, MAX_CHANGES)
                self._keep_soon()
                return happening, gone
            await self._read_on()
            if _has_happened(happening, self.state):  # and was overwritten since
                return happening, []
            await asyncio.sleep(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _decided(self, decide: Callable[[NameState], H]) -> H:
        """A refusal counts only if nothing new was missed."""
        while True:
            sequence = self.state.sequence
            try:
                return decide(self.state)
            except KdnError:
                await self._read_on()
                if self.state.sequence == sequence:
                    raise

    async def _create(self, sequence: int, entry: bytes, own: str) -> bool:
        """Whether it is ours, even if the answer that said so was lost."""
        error: StoreError | None = None
        try:
            if await self.bucket.create(self.path("log", sequence), entry):
                return True
        except StoreError as found:
            error = found
        there = await self._entry(sequence)
        if there is None:
            raise error or StoreError("the log of names: an entry was there, and is gone")
        return there.get("id") == own

    async def _begin(self) -> None:
        await self.bucket.check()
        if self._state is None:
            await self._load()
        if self._state is None:
            first = {"sequence": time.time_ns() // 1000}
            await self.bucket.create(f"{self._folder}/begin", json.dumps(first).encode())
            await self._load()
        if self._state is None:
            raise StoreError("the log of names: could not be begun")

    async def _read_on(self) -> None:
        if self._state is None:
            await self._load()
            if self._state is None:
                return
        windows = iter(WINDOWS)
        window = next(windows)
        while True:
            first = self._state.sequence + 1
            found = await asyncio.gather(*(self._entry(first + i) for i in range(window)))
            for entry in found:
                if entry is None:
                    return
                if "state" in entry:
                    await self._load(_number(entry, "state"))
                    if self._state.sequence < first:
                        raise StoreError("the log of names leads back to where it came from")
                    break
                self._state.apply(parse_happening(_without_id(entry)), MAX_CHANGES)
            window = next(windows, WINDOWS[-1])

    async def _load(self, at: int | None = None) -> None:
        """The newest state that is kept, which may be older than the log."""
        if at is None:
            newest = await self._read(f"{self._folder}/newest", 1000)
            at = _number(newest, "state") if newest else None
        if at is None:
            begin = await self._read(f"{self._folder}/begin", 1000)
            if begin is not None:
                self._state = NameState(_number(begin, "sequence"))
            return
        for _ in range(MAX_HOPS):
            data = await self.bucket.get(self.path("state", at), MAX_STATE_BYTES)
            if data is not None:
                values = await asyncio.to_thread(_parse, data)
                state = await asyncio.to_thread(NameState.parse, values)
                self._state, self._kept = state, at
                self._kept_before = _number(values, "before")
                return
            onward = await self._entry(at + 1)
            at = _number(onward or {}, "state")
        raise StoreError("the log of names: found no state to begin with")

    async def _entry(self, sequence: int) -> dict[str, Any] | None:
        return await self._read(self.path("log", sequence), MAX_ENTRY_BYTES)

    async def _read(self, path: str, max_bytes: int) -> dict[str, Any] | None:
        data = await self.bucket.get(path, max_bytes)
        return None if data is None else _parse(data)

    # keeping the state

    def _keep_soon(self) -> None:
        idle = self._keeping is None or self._keeping.done()
        if idle and self.state.sequence - (self._kept or self.state.first) >= STATE_EVERY:
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """What fails is done by whoever comes next."""
        try:
            async with self._updates:
                newest = await self._read(f"{self._folder}/newest", 1000)
                kept = _number(newest, "state") if newest else 0
                if kept != self._kept and kept:
                    await self._learn_kept(kept)
                if self.state.sequence - self._kept < STATE_EVERY:
                    return  # another one was faster
                at, before, long_before = self.state.sequence, self._kept, self._kept_before
                data = await asyncio.to_thread(_dump_state, self.state, before)
            await self.bucket.put(self.path("state", at), data)
            await self.bucket.put(f"{self._folder}/newest", json.dumps({"state": at}).encode())
            self._kept, self._kept_before = at, before
            if before:
                await self._overwrite(long_before, before, at)
        except (StoreError, FormatError) as error:
            logger.warning("the state of names could not be kept: %s", error)

    async def _learn_kept(self, kept: int) -> None:
        data = await self.bucket.get(self.path("state", kept), MAX_STATE_BYTES)
        if data is not None:
            values = await asyncio.to_thread(_parse, data)
            self._kept, self._kept_before = kept, _number(values, "before")

    async def _overwrite(self, after: int, up_to: int, state: int) -> None:
        """Entries (after, up_to], with where to go on. The state at `after` is then needed by
        nobody: the entry that follows it leads on."""
        if not after:
            begin = await self._read(f"{self._folder}/begin", 1000)
            after = _number(begin or {}, "sequence")
        onward = json.dumps({"state": state}).encode()
        for first in range(after + 1, up_to + 1, AT_ONCE):
            some = range(first, min(first + AT_ONCE, up_to + 1))
            await asyncio.gather(*(self.bucket.put(self.path("log", one), onward) for one in some))
        await self.bucket.delete(self.path("state", after))

    async def delete_bodies(self, bodies: Sequence[str]) -> None:
        for first in range(0, len(bodies), AT_ONCE):
            some = bodies[first : first + AT_ONCE]
            await asyncio.gather(*(self.bucket.delete(self.path("bodies", one)) for one in some))

    async def close(self) -> None:
        if self._keeping is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._keeping


def _has_happened(happening: Happening, state: NameState) -> bool:
    """Whether a put is among what the state knows, by its body: no two have the same."""
    if not isinstance(happening, Put):
        return False
    record = state.record(happening.tenant, happening.name)
    held = record.find(happening.version) if record else None
    return held is not None and held.body == happening.body


def _dump_state(state: NameState, before: int) -> bytes:
    return json.dumps({**state.dump(), "before": before}, separators=(",", ":")).encode()


def _without_id(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "id"}


def _parse(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the log of names: expected JSON: {str(error)[:100]}") from error
    if not isinstance(values, dict):
        raise FormatError("the log of names: expected a JSON object")
    return values


def _number(values: dict[str, Any], name: str) -> int:
    found = values.get(name)
    if not isinstance(found, int):
        raise FormatError(f"the log of names: expected a number, {name}")
    return found
