"""Where the chunks of a join go: each to all its places (`kdn/blend/pieces.py`).

The first piece is decoded as it was learned. The others are decoded for their new positions, by a
codec that repairs them if there are seams, and without the head that they share with the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kdn.blend.pieces import Join, Place
from kdn.blend.seams import Seams
from kdn.cache.keys import Chunk
from kdn.cache.rows import NOWHERE, Slots, TokenRows, check_whole
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.base import Codec, Coded
from kdn.codec.threads import num_cores, parallel_map
from kdn.delivery.sink import GPU_BATCH_CHUNKS, Arrival
from kdn.errors import KdnError

SlotsAt = Callable[[int, int], Slots]
"""A slot for each position [start, end) of a join."""


class Spot(NamedTuple):
    """A chunk at one of its places: positions [at, end), of which those from `start` on count."""

    place: Place
    codec: Codec
    at: int
    end: int

    @property
    def start(self) -> int:
        return self.at + self.place.skipped


class Placing(ABC):
    """What all sinks do with the chunks of a join."""

    def __init__(
        self, codec: Codec, repaired: Codec | None, join: Join, seams: Seams | None
    ) -> None:
        self._codec, self._repaired = codec, repaired
        self._join, self._seams = join, seams

    def spots(self, chunk: Chunk) -> Iterator[Spot]:
        for place in self._join.places[chunk.key]:
            at = place.start(chunk)
            codec = self._codec if place.piece == 0 else self._repaired or self._codec
            yield Spot(place, codec, at, at + chunk.num_tokens)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        """Values of a chunk as it was learned, at its positions there."""
        given = values.slice(chunk.start, chunk.end)
        for spot in self.spots(chunk):
            self.write_at(self._moved(given, spot.place).slice(spot.start, spot.end))

    @abstractmethod
    def write_at(self, values: KVCache) -> None:
        """Values as they are, at positions of the join; they may change afterwards."""

    def _moved(self, learned: KVCache, place: Place) -> KVCache:
        """In new memory if they change: the reference for what codecs do while decoding."""
        if place.piece == 0:
            return learned
        if learned.ready is not None:
            torch.cuda.current_stream(learned.keys.device).wait_event(learned.ready)
        at, spec = learned.start + place.shift, self._codec.spec
        if self._repaired is not None:
            assert self._seams is not None, "values cannot be repaired without the seams"
            return self._seams.repair(learned, spec, at)
        keys = learned.keys.float().clone()
        rope.move(keys, spec, place.shift)
        return KVCache(keys.to(learned.dtype), learned.values, at)


class JoinSink(Placing):
    """Tensors in main memory that hold a join from its first token on."""

    def __init__(
        self,
        codec: Codec,
        repaired: Codec | None,
        join: Join,
        cache: KVCache,
        *,
        seams: Seams | None = None,
    ) -> None:
        """`repaired`: `codec.repaired(seams)`; None: pieces are moved, and no more. `seams` are
        needed only by `write`."""
        assert cache.start == 0, "memory from the first token on"
        assert cache.end >= join.num_tokens, "memory for the whole join"
        super().__init__(codec, repaired, join, seams)
        self._cache = cache

    @property
    def batch_chunks(self) -> int:
        """One for each core."""
        return num_cores()

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """On all cores: a chunk for each of them, or all for one chunk."""
        return parallel_map(self._decode, batch)

    def _decode(self, one: Arrival) -> KdnError | None:
        """Right into its places, but where a part of it is not wanted, or what is there must stay
        until all of it is known to be good."""
        apart: list[KVCache] = []
        try:
            _check_whole(one)
            for spot in self.spots(one.chunk):
                if one.improves or spot.place.skipped:
                    apart.append(self._decoded(one, spot, None).slice(spot.start, spot.end))
                else:
                    self._decoded(one, spot, self._cache.slice(spot.at, spot.end))
        except KdnError as error:
            return error
        for values in apart:
            self.write_at(values)
        return None

    def _decoded(self, one: Arrival, spot: Spot, out: KVCache | None) -> KVCache:
        return spot.codec.decode(
            one.stream, one.chunk, levels=one.levels, out=out, dtype=self._cache.dtype, at=spot.at
        )

    def write_at(self, values: KVCache) -> None:
        place = self._cache.slice(values.start, values.end)
        place.keys.copy_(values.keys)
        place.values.copy_(values.values)


class JoinRowsSink(Placing):
    """An engine's memory, on a GPU or not: each token into the slot that the engine names."""

    def __init__(
        self,
        codec: Codec,
        repaired: Codec | None,
        join: Join,
        rows: TokenRows,
        slots_at: SlotsAt,
        after: torch.cuda.Event | None = None,
        *,
        seams: Seams | None = None,
    ) -> None:
        """`slots_at` says -1 of a position that is not wanted. Nothing is written before the event
        `after`. `repaired` and `seams` as of `JoinSink`."""
        super().__init__(codec, repaired, join, seams)
        self._rows, self._slots_at, self._after = rows, slots_at, after

    @property
    def batch_chunks(self) -> int:
        """A GPU needs many chunks at a time to be busy; each core takes one."""
        return GPU_BATCH_CHUNKS if self._rows.device.type == "cuda" else num_cores()

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """All at once that one codec decodes. A chunk of several places may fail at one of them:
        then it counts as not there."""
        errors: list[KdnError | None] = [None] * len(batch)
        lots: dict[int, list[tuple[int, Spot]]] = {}
        for number, one in enumerate(batch):
            for spot in self.spots(one.chunk):
                lots.setdefault(id(spot.codec), []).append((number, spot))
        for lot in lots.values():
            coded = [self._coded(batch[number], spot) for number, spot in lot]
            said = lot[0][1].codec.decode_rows(coded, self._rows, after=self._after)
            for (number, _), error in zip(lot, said, strict=True):
                errors[number] = errors[number] or error
        return errors

    def _coded(self, one: Arrival, spot: Spot) -> Coded:
        slots = np.full(one.chunk.num_tokens, NOWHERE, dtype=np.int64)
        slots[spot.place.skipped :] = self._slots_at(spot.start, spot.end)
        return Coded(one.stream, one.chunk, one.levels, slots, spot.at)

    def write_at(self, values: KVCache) -> None:
        """If they are on a GPU, they are ready when they say so, or what the current stream has
        computed."""
        computed = values.ready
        if values.keys.is_cuda and computed is None:
            computed = torch.cuda.current_stream(values.keys.device).record_event()
        with self._rows.writing(self._after, computed):
            self._rows.write(values, self._slots_at(values.start, values.end))


def _check_whole(one: Arrival) -> None:
    """UnsupportedError if a layer lacks tokens: what stands behind them would miss them."""
    every = np.arange(one.chunk.num_tokens, dtype=np.int64)
    check_whole(one.stream.info.valid_from, one.chunk.start, every)
