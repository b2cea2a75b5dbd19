"""When a write waits for replicas, as the same write goes to one server after the other."""

from __future__ import annotations

from typing import Any, cast

from kdn.store.redis_acknowledging import Acknowledgements
from kdn.store.redis_address import RedisOptions
from kdn.store.redis_shards import Shards

ROLE_WITH_REPLICA: Any = [b"master", 5, [[b"10.0.0.2", b"6379", b"5"]]]


class FakeShards:
    address = "redis://fake"
    generation = 0
    master = ("10.0.0.1", 6379)

    def master_of(self, key: bytes) -> object:
        return self.master


def names(commands: Any) -> list[bytes]:
    return [command[0] for command in commands]


def test_a_write_sent_again_does_not_wait_for_replicas_of_another_server() -> None:
    """A server that has just taken over has none: waiting would take all of `wait_s`."""
    shards = FakeShards()
    kept = Acknowledgements(cast(Shards, shards), RedisOptions())
    assert kept.is_enough(b"k", [1, ROLE_WITH_REPLICA], wrote=True)
    job = kept.write(b"k", [(b"SET", b"k", b"v")])
    assert names(job.commands()) == [b"SET", b"WAIT", b"ROLE"]
    shards.generation += 1  # something failed, and may be elsewhere now, or where it once was
    assert names(job.commands()) == [b"SET", b"ROLE"]
    assert not kept.is_enough(b"k", [ROLE_WITH_REPLICA], wrote=True), (
        "it has one: that is confirmed"
    )
    assert names(job.commands()) == [b"SET", b"WAIT", b"ROLE"]


def test_who_asks_for_replicas_always_waits() -> None:
    shards = FakeShards()
    kept = Acknowledgements(cast(Shards, shards), RedisOptions(wait=2))
    job = kept.write(b"k", [(b"SET", b"k", b"v")])
    shards.generation += 1
    assert names(job.commands()) == [b"SET", b"WAIT"]
