"""Encoding a batch by replaying its launches (`replays.py`), of which there are some two hundred.

Those of the ordinary batch are recorded, over memory of its own. Ordinary are whole chunks that do
not begin a context, with values of one type; a batch of fewer is filled up with whatever was
encoded before, and that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.codec.klt.encoder_triton import Encoded, GpuEncoder, Item, batch_arrays
from kdn.codec.klt.replays import recorded

NO_SINKS = 0


class Replay:
    """The launches of one encoder. Taken and used in its stream; what `encode` returns is
    overwritten by its next call."""

    def __init__(self, encoder: GpuEncoder, count: int, dtype: torch.dtype) -> None:
        spec, device = encoder.spec, encoder.device
        self._spec, self.count = spec, count
        shape = (count, 2, spec.num_layers, CHUNK_TOKENS, spec.num_kv_heads, spec.head_dim)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        chunks = cut([0] * (count + 1) * CHUNK_TOKENS, Namespace(b"", b""))[1:]
        items = [
            (chunk, KVCache(keys, values, chunk.start))
            for chunk, (keys, values) in zip(chunks, self._values, strict=True)
        ]
        arrays = batch_arrays(items, [NO_SINKS] * count, spec)
        self._pinned = [torch.from_numpy(array).pin_memory() for array in arrays]
        self._batch = encoder.batch(items)
        self._batch_bytes = encoder.memory_bytes(count)
        self._encoded = encoder.encode(self._batch)  # compiles what is compiled on first use

        def encode() -> None:
            self._encoded = encoder.encode(self._batch)

        self._graph = recorded(encode)
        self.works = self._graph is not None

    @property
    def memory_bytes(self) -> int:
        """On the device, for as long as this lives."""
        return self._values.nbytes + self._batch_bytes

    def suits(self, chunk: Chunk, cache: KVCache) -> bool:
        """Of a chunk and a cache that fit the model."""
        is_whole = chunk.start > 0 and chunk.num_tokens == CHUNK_TOKENS
        return is_whole and cache.dtype == self._values.dtype

    def encode(self, items: Sequence[Item]) -> Encoded:
        """At most `count` that suit. The caller waits for the last call's before the next one."""
        for place, (_, cache) in zip(self._values, items, strict=False):
            place[0].copy_(cache.keys)
            place[1].copy_(cache.values)
        whole = [*items, *self._batch.items[len(items) :]]
        arrays = batch_arrays(whole, self._batch.num_sinks, self._spec)
        batch = self._batch
        places = (batch.tokens_of, batch.cleared, batch.positions, batch.ids)
        for pinned, array, place in zip(self._pinned, arrays, places, strict=True):
            pinned.numpy()[:] = array
            place.copy_(pinned, non_blocking=True)
        self._graph.replay()
        return self._encoded
