"""What routers are told: which of vLLM's blocks this engine could load instead of computing them.

vLLM names a block by a hash of all tokens up to its end. A chunk stands for the blocks that end in
it. What this engine's requests are found to have is remembered here, chunk by chunk, with their
blocks' hashes; what lookups and workers say of a chunk decides what routers are told of its blocks.

Only differences are told: so however long nobody takes them, there are at most two for a chunk. A
chunk that is forgotten, because there are too many, is told as removed: routers shall not believe
in what nobody follows any more. Everything here runs on the one thread of vLLM's scheduler.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdn.cache.keys import Chunk, TokenIds
from kdn.session.changes import Change, Medium

MAX_CHUNKS = 1 << 14
"""That are followed: 4 million tokens, some 50 MB."""

ExtraKeys = tuple[Any, ...]
ExtraKeysOf = Callable[[Any, int, int], "Sequence[ExtraKeys | None] | None"]
"""What else than tokens is in the hashes of a request's blocks [first, last), block by block."""


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a request."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    """Hash of the block before the first one."""
    tokens: TokenIds
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None

    def after(self, number: int) -> Blocks:
        """Without the first so many."""
        if not number:
            return self
        size = len(self.tokens) // len(self.hashes)
        extra = None if self.extra_keys is None else self.extra_keys[number:]
        return Blocks(
            self.hashes[number:], self.hashes[number - 1], self.tokens[number * size :],
            self.lora_id, self.lora_name, extra,
        )  # fmt: skip


@dataclass(frozen=True)
class Stored:
    blocks: Blocks
    medium: Medium


@dataclass(frozen=True)
class Removed:
    hashes: tuple[bytes, ...]
    medium: Medium


Event = Stored | Removed


class Followed:
    """A chunk: where it is, and where routers were told that it is."""

    __slots__ = ("blocks", "now", "told")

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.now: dict[Medium, int] = {}  # since which change
        self.told: set[Medium] = set()


class Events:
    """Those of one engine, until they are taken."""

    def __init__(
        self,
        block_tokens: int,
        extra_keys: ExtraKeysOf = lambda request, first, last: None,
        max_chunks: int = MAX_CHUNKS,
    ) -> None:
        self._block_tokens, self._extra_keys = block_tokens, extra_keys
        self._max_chunks = max_chunks
        self.num_changes = 0
        self._chunks: OrderedDict[bytes, Followed] = OrderedDict()  # the latest used last
        self._dirty: OrderedDict[tuple[bytes, Medium], None] = OrderedDict()
        self._gone: dict[Medium, list[bytes]] = {}
        self._told: dict[Medium, Counter[bytes]] = {medium: Counter() for medium in Medium}
        """Of how many chunks a block was told: a prompt's last, short chunk and the full one that
        takes its place later begin with the same blocks."""

    # what is the case

    def follow(self, request: Any, chunks: Iterable[Chunk]) -> None:
        """These are of this request's tokens. Nothing is told of them yet."""
        if len(request.block_hashes) != request.num_tokens // self._block_tokens:
            return  # blocks that vLLM hashes in another way: it is better to say nothing
        for chunk in chunks:
            if chunk.key in self._chunks:
                self._chunks.move_to_end(chunk.key)
            elif (blocks := self._blocks(request, chunk)) is not None:
                self._chunks[chunk.key] = Followed(blocks)
        while len(self._chunks) > self._max_chunks:
            self._forget(*self._chunks.popitem(last=False))

    def changed(self, changes: Iterable[Change], asked_at: int | None = None) -> None:
        """What a worker says, or a lookup that began at the change of that number: what came since
        then it cannot have missed. Of chunks that are not followed nothing is told."""
        self.num_changes += 1
        for key, medium, is_there in changes:
            if (one := self._chunks.get(key)) is None:
                continue
            if is_there:
                one.now[medium] = self.num_changes
            elif asked_at is None or one.now.get(medium, 0) <= asked_at:
                one.now.pop(medium, None)
            self._dirty[key, medium] = None

    def clear(self) -> None:
        """Nothing can be loaded any more."""
        self.changed([Change(key, medium, False) for key in self._chunks for medium in Medium])

    def _blocks(self, request: Any, chunk: Chunk) -> Blocks | None:
        size = self._block_tokens
        first, last = chunk.start // size, chunk.end // size
        if first >= last:
            return None
        hashes, lora, extra = request.block_hashes, request.lora_request, None
        if (found := self._extra_keys(request, first, last)) is not None:
            extra = tuple(found)
        return Blocks(
            tuple(hashes[first:last]),
            hashes[first - 1] if first else None,
            np.asarray(request.all_token_ids[first * size : last * size], dtype=np.uint32),
            lora.lora_int_id if lora else None,
            lora.lora_name if lora else None,
            extra,
        )

    def _forget(self, key: bytes, one: Followed) -> None:
        for medium in one.told:
            self._gone.setdefault(medium, []).extend(self._untold(one.blocks, medium))
        for medium in Medium:
            self._dirty.pop((key, medium), None)

    # what is told of it

    def take(self) -> list[Event]:
        """The differences since the last time. Removals come first: what came back meanwhile is
        there."""
        gone, self._gone = self._gone, {}
        stored: list[Event] = []
        dirty, self._dirty = self._dirty, OrderedDict()
        for key, medium in dirty:
            one = self._chunks[key]
            if medium in one.now and medium not in one.told:
                one.told.add(medium)
                stored += self._tell(one.blocks, medium)
            elif medium not in one.now and medium in one.told:
                one.told.discard(medium)
                gone.setdefault(medium, []).extend(self._untold(one.blocks, medium))
        return [*_removals(gone, self._told), *stored]

    def _tell(self, blocks: Blocks, medium: Medium) -> Iterator[Stored]:
        told = self._told[medium]
        known = next((i for i, one in enumerate(blocks.hashes) if not told[one]), None)
        told.update(blocks.hashes)
        if known is not None:
            yield Stored(blocks.after(known), medium)

    def _untold(self, blocks: Blocks, medium: Medium) -> list[bytes]:
        """Those of these blocks that no other chunk has."""
        told = self._told[medium]
        told.subtract(blocks.hashes)
        alone = [one for one in blocks.hashes if told[one] <= 0]
        for one in alone:
            del told[one]
        return alone


def _removals(
    gone: dict[Medium, list[bytes]], told: dict[Medium, Counter[bytes]]
) -> Iterator[Removed]:
    """Without those that another chunk brought back before anybody was told."""
    for medium, hashes in gone.items():
        left = tuple(one for one in dict.fromkeys(hashes) if one not in told[medium])
        if left:
            yield Removed(left, medium)
