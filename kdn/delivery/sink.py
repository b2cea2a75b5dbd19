"""Where delivered values go. A delivery hands a sink streams to decode and values that a model
computed; the sink writes them where its engine wants them: tensors in main memory (`HostSink`),
the blocks of a paged cache, a GPU.

Batches are decoded in threads that others wait for, one at a time unless the sink takes several
(`batches_at_once`); values of other chunks may be written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import Slots, TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec, Coded
from kdn.codec.format import Bitstream
from kdn.codec.threads import num_cores, parallel_map
from kdn.errors import KdnError

GPU_BATCH_CHUNKS = 32
"""Chunks decoded together on a GPU: fewer leave it idle, more only take memory."""


class Arrival(NamedTuple):
    """The first `levels` levels of a chunk, verified, to be decoded."""

    chunk: Chunk
    stream: Bitstream
    levels: int
    improves: bool
    """The sink holds the chunk already, coarser: if this fails, that must stay as it is."""


class Sink(Protocol):
    @property
    def batch_chunks(self) -> int:
        """How many chunks it likes to decode at a time."""
        ...

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """Write each chunk as a whole, or say why not."""
        ...

    def write(self, chunk: Chunk, values: KVCache) -> None:
        """Values of a chunk that need no decoding; they may change afterwards."""
        ...


def batches_at_once(sink: Sink) -> int:
    """How many batches a sink likes to decode side by side: one, unless it says otherwise; none as
    long as it has no memory (`LateSink`)."""
    return int(getattr(sink, "batches_at_once", 1))


class LateSink:
    """Memory that is not there yet: until it is given, streams may come, and none is decoded."""

    def __init__(self, batch_chunks: int) -> None:
        """`batch_chunks`: as the sink will have it that is given."""
        self.on_given: Callable[[], None] = lambda: None
        self._batch_chunks = batch_chunks
        self._sink: Sink | None = None

    def give(self, sink: Sink) -> None:
        """Once."""
        assert self._sink is None
        self._sink = sink
        self.on_given()

    @property
    def batch_chunks(self) -> int:
        return self._batch_chunks if self._sink is None else self._sink.batch_chunks

    @property
    def batches_at_once(self) -> int:
        return 0 if self._sink is None else batches_at_once(self._sink)

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        assert self._sink is not None
        return self._sink.decode(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        assert self._sink is not None
        self._sink.write(chunk, values)


class HostSink:
    """Tensors in main memory, each chunk at its own positions."""

    def __init__(self, codec: Codec, cache: KVCache) -> None:
        """`cache` holds at least the positions of all chunks that will come."""
        self._codec, self._cache = codec, cache
        self._valid_from: dict[int, tuple[int, ...]] = {}  # of each chunk, by where it starts

    @classmethod
    def of(cls, codec: Codec, chunks: Sequence[Chunk], dtype: torch.dtype) -> HostSink:
        """In new memory for these chunks."""
        spec, start = codec.spec, chunks[0].start
        return cls(
            codec,
            KVCache.empty(
                spec.num_layers, chunks[-1].end - start, spec.num_kv_heads, spec.head_dim,
                dtype=dtype, start=start,
            ),
        )  # fmt: skip

    @property
    def cache(self) -> KVCache:
        """All of it: see `until`."""
        return self.until(self._cache.end)

    def until(self, end: int) -> KVCache:
        """The tokens before `end`, with what layers lack, as the chunks say that were written: a
        layer with a sliding window lacks the oldest tokens, be it in one chunk or in several."""
        cache = self._cache.slice(self._cache.start, end)
        valid_from = list(cache.valid_from)
        for start, positions in sorted(self._valid_from.items()):
            for layer, position in enumerate(positions if start < end else ()):
                if position > start:
                    valid_from[layer] = min(position, end)
        return KVCache(cache.keys, cache.values, cache.start, tuple(valid_from))

    def held_from(self, chunk: Chunk) -> tuple[int, ...] | None:
        """The first position that each layer holds of a chunk; None if it was not written."""
        return self._valid_from.get(chunk.start)

    @property
    def batch_chunks(self) -> int:
        """One for each core."""
        return num_cores()

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """On all cores: a chunk for each of them, or all for one chunk."""
        return parallel_map(self._decode, batch)

    def _decode(self, one: Arrival) -> KdnError | None:
        place = self._cache.slice(one.chunk.start, one.chunk.end)
        try:
            if one.improves:
                values = self._codec.decode(
                    one.stream, one.chunk, levels=one.levels, dtype=place.dtype
                )
                self.write(one.chunk, values)
                return None
            values = self._codec.decode(one.stream, one.chunk, levels=one.levels, out=place)
        except KdnError as error:
            return error
        self._valid_from[one.chunk.start] = values.valid_from
        return None

    def write(self, chunk: Chunk, values: KVCache) -> None:
        place, given = (cache.slice(chunk.start, chunk.end) for cache in (self._cache, values))
        place.keys.copy_(given.keys)
        place.values.copy_(given.values)
        self._valid_from[chunk.start] = given.valid_from


class RowsSink:
    """An engine's memory, on a GPU or not: each token into the slot that the engine names."""

    def __init__(
        self,
        codec: Codec,
        rows: TokenRows,
        slots_of: Callable[[Chunk], Slots],
        after: torch.cuda.Event | None = None,
    ) -> None:
        """`slots_of` has a slot for each token of a chunk, -1 for one that is not wanted. Nothing
        is written before the event `after`."""
        self._codec, self._rows, self._slots_of, self._after = codec, rows, slots_of, after

    @property
    def batch_chunks(self) -> int:
        """A GPU needs many chunks at a time to be busy; each core takes one."""
        return GPU_BATCH_CHUNKS if self._rows.device.type == "cuda" else num_cores()

    @property
    def batches_at_once(self) -> int:
        """The host reads one into a buffer while the GPU decodes another: of 12 ms that 32 chunks
        of an 8B model take one after the other, the GPU works for 5."""
        device = self._rows.device
        return 2 if device.type == "cuda" and self._codec.decodes_on(device) else 1

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """What fails leaves memory as it was, also where it held the chunk already, coarser."""
        coded = [
            Coded(one.stream, one.chunk, one.levels, self._slots_of(one.chunk)) for one in batch
        ]
        return self._codec.decode_rows(coded, self._rows, after=self._after)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        """Returns when they are there: `values` may change afterwards. If these are on a GPU, they
        are ready when they say so, or what the current stream has computed."""
        computed = values.ready
        if values.keys.is_cuda and computed is None:
            computed = torch.cuda.current_stream(values.keys.device).record_event()
        with self._rows.writing(self._after, computed):
            self._rows.write(values.slice(chunk.start, chunk.end), self._slots_of(chunk))
