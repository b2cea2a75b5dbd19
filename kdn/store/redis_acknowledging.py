"""When a write counts as kept: when enough replicas of the server have it (`WAIT`).

WAIT speaks of the writes of one connection. So it is sent with the write; where somebody else wrote
what is there, or an earlier attempt did, a write that changes nothing goes before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdn.errors import StoreError
from kdn.store.redis_address import Address, RedisOptions
from kdn.store.redis_pool import refusal
from kdn.store.redis_reading import range_of
from kdn.store.redis_record import RECORD_BYTES
from kdn.store.redis_shards import Shards
from kdn.store.redis_topology import replica_addresses
from kdn.store.redis_wire import Command, ErrorReply, Job, Reply

ATTEMPTS = 3
MARK_MS = 1000


class Acknowledgements:
    """With `wait` unset, every write asks its server whether it has a replica (`ROLE`); whether to
    wait for one is decided by what it said last, if nothing has failed since, and put right if that
    has changed."""

    def __init__(self, shards: Shards, options: RedisOptions) -> None:
        self._shards = shards
        self._wait, self._wait_ms = options.wait, int(options.wait_s * 1000)
        self._had: dict[Address | None, int] = {}  # master to 1 if it had a replica
        self._had_in = 0  # the generation of where things are

    def write(self, name: bytes, commands: Sequence[Command]) -> Job:
        """A write of this key, and what tells whether it is kept."""
        return _Write(name, commands, self)

    def commands(self, name: bytes) -> list[Command]:
        """To be sent after a write of this key, on the same connection."""
        number = self._expected(name)
        wait: list[Command] = [(b"WAIT", number, self._wait_ms)] if number else []
        return [*wait, (b"ROLE",)] if self._wait is None else wait

    def is_enough(self, name: bytes, replies: Sequence[Reply], *, wrote: bool) -> bool:
        """What they say; False if only `confirm` can tell. StoreError if replicas are late.
        `wrote`: the connection did write what is to be kept."""
        if self._wait is not None:
            return not self._wait or (wrote and self._are_there(replies[0], self._wait))
        *waited, role = replies
        if not isinstance(role, list) or role[:1] != [b"master"]:
            return False
        number = min(1, len(replica_addresses(role)))
        self._forget_failed()
        self._had[self._shards.master_of(name)] = number
        return not number or (wrote and bool(waited) and self._are_there(waited[0], number))

    async def confirm(self, name: bytes, expected: bytes | None) -> None:
        """Wait until enough replicas have what is there now: this record, or (None) anything."""
        if self._wait == 0:
            return
        for _ in range(ATTEMPTS):
            mark_it: Command = (b"SET", name + b":ack", b"", b"PX", MARK_MS)
            job = self.write(name, [range_of(name, 0, RECORD_BYTES), mark_it])
            await self._shards.run([job])
            there, mark, *replies = job.replies
            if isinstance(mark, ErrorReply):
                raise refusal(self._shards.address, mark)
            if expected is not None and there != expected:
                raise StoreError(f"{self._shards.address}: {name!r} has changed meanwhile")
            if self.is_enough(name, replies, wrote=True):
                return
        raise StoreError(f"{self._shards.address}: who has {name!r} changes all the time")

    def _expected(self, name: bytes) -> int:
        if self._wait is not None:
            return self._wait
        self._forget_failed()
        return self._had.get(self._shards.master_of(name), 0)

    def _forget_failed(self) -> None:
        if self._had_in != self._shards.generation:
            self._had_in = self._shards.generation
            self._had.clear()

    def _are_there(self, reply: Reply, number: int) -> bool:
        if isinstance(reply, int) and reply >= number:
            return True
        raise StoreError(
            f"{self._shards.address}: after {self._wait_ms} ms, {reply!r} replicas have it, "
            f"not {number}"
        )


class _Write(Job):
    """Sent again to another server, it waits for replicas if that one has any: one that has just
    taken over may have none, and to wait for it would take all of `wait_s`."""

    def __init__(self, name: bytes, commands: Sequence[Command], kept: Acknowledgements) -> None:
        super().__init__(name, commands, writes=True)
        self._kept = kept

    def commands(self) -> Sequence[Command]:
        return [*super().commands(), *self._kept.commands(self.key)]
