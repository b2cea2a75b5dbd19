"""The process that the crash test kills: puts and deletes as fast as it can, and says so.

    python -m tests.store.victim FOLDER CAPACITY_BYTES SEED

Every report is one line on standard output, written at once, so that what the parent read did
happen, and numbered, so that none is missed unnoticed: "ready"; "begin KEY" before a put; "put KEY
ETAG" when it was acknowledged; "evict KEY" before an eviction; "delete KEY" before a deletion and
"deleted KEY" when it was acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from itertools import count
from pathlib import Path

from kdn.store.base import Store
from kdn.store.disk import open_disk
from kdn.store.evict import LRU
from tests.store.contract import content, put

WRITERS = 4
KEYS_PER_WRITER = 40


numbers = count()


def say(*words: str) -> None:
    os.write(1, (" ".join([str(next(numbers)), *words]) + "\n").encode())


class TalkingLRU(LRU):
    def __init__(self) -> None:
        super().__init__()
        self.evictions: Counter[bytes] = Counter()

    def victim(self) -> bytes | None:
        key = super().victim()
        if key is not None:
            self.evictions[key] += 1
            say("evict", key.hex())
        return key


async def write(store: Store, policy: TalkingLRU, writer: int, chance: random.Random) -> None:
    """Each writer has keys of its own, so that its reports of one key are in order."""
    while True:
        key = b"%d.%d" % (writer, chance.randrange(KEYS_PER_WRITER))
        if chance.random() < 0.1:
            say("delete", key.hex())
            await store.delete(key)
            say("deleted", key.hex())
            continue
        # Every version of an object differs, names its key, and has its digest as etag.
        version = f"{key.decode()}/{chance.random()}"
        data = key + b":" + content(version, chance.choice((0, 100, 5000, 70_000, 200_000)))
        say("begin", key.hex())
        evictions = policy.evictions[key]
        entry = await put(store, key, data)
        if evictions == policy.evictions[key]:  # else it may be gone already
            say("put", key.hex(), entry.etag.hex())


async def main(folder: Path, capacity_bytes: int, seed: int) -> None:
    policy = TalkingLRU()
    store = await open_disk(folder, capacity_bytes, policy)
    say("ready")
    chance = random.Random(seed)
    writers = [random.Random(chance.random()) for _ in range(WRITERS)]
    await asyncio.gather(*(write(store, policy, i, own) for i, own in enumerate(writers)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
