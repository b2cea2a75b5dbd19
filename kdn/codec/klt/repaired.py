"""klt with a repair folded into its rows: `folding.py` says how.

What the last level corrects is no sum of rows. Cores decode all levels as they were learned and
then apply the repair. Kernels add the correction as it is: of the repair's effect, in the model's
own metric, 17 % are then missed (SmolLM2; 5 % at the level before, 1 % at the first). A repair
itself misses far more of the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec, clear_absent
from kdn.codec.format import Bitstream
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.folding import folded, group_maps
from kdn.codec.repair import Repair, refuse_to_encode
from kdn.errors import KdnError, UnsupportedError


class RepairedKlt(KltCodec):
    """Decodes what another codec encoded. Its tables are its own, on GPUs too; memory that decoding
    takes there it shares with that codec."""

    def __init__(self, codec: KltCodec, repair: Repair) -> None:
        repair.check_for(codec.spec)
        self._unrepaired, self._repair = codec, repair
        self._maps = group_maps(codec.profile, repair)
        super().__init__(codec.spec, folded(codec.profile, self._maps), unrepaired=codec)

    def _decode_into(
        self,
        cache: KVCache,
        stream: Bitstream,
        chunk: Chunk,
        wanted: int,
        heads: range | None = None,
    ) -> None:
        if wanted < self.num_levels:
            super()._decode_into(cache, stream, chunk, wanted, heads)
            return
        learned = self._unrepaired.decode(stream, chunk, levels=wanted)
        # What a layer lacks is zero, and so it is again in the end.
        whole = KVCache(learned.keys, learned.values, learned.start)
        found = self._repair.repair(whole, self.spec, cache.start)
        own = found if heads is None else found.of_heads(heads)
        cache.keys.copy_(own.keys)
        cache.values.copy_(own.values)
        clear_absent(cache)

    def _decode_sinks(self, stream: Bitstream, groups: range, count: int) -> list[torch.Tensor]:
        found = super()._decode_sinks(stream, groups, count)
        for group, sinks in zip(groups, found, strict=True):
            self._maps[group].add_to_values(sinks)
        return found

    def repaired(self, repair: Repair) -> Codec:
        raise UnsupportedError("these values are repaired already")

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        refuse_to_encode()

    def encode_all(self, chunks: Sequence[Chunk], cache: KVCache) -> list[bytes]:
        refuse_to_encode()

    def encode_batch(self, items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        refuse_to_encode()

    def simulate(self, chunk: Chunk, cache: KVCache, levels: int) -> KVCache:
        refuse_to_encode()
