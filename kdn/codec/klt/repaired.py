"""klt with a repair folded into its rows: `folding.py` says how.

The last level is not used: it corrects, value by value, what rounding left of the values that were
learned, and what rounding leaves here is something else. Added all the same it makes values worse:
of the repair's effect, in the model's own metric, 17 % is then missed, and 10 % without it
(SmolLM2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Coded
from kdn.codec.format import Bitstream
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.folding import folded, group_maps
from kdn.codec.repair import Repair, refuse_to_encode
from kdn.errors import KdnError


class RepairedKlt(KltCodec):
    """Decodes what another codec encoded. Its tables are its own, on GPUs too."""

    def __init__(self, codec: KltCodec, repair: Repair) -> None:
        repair.check_for(codec.spec)
        self._maps = group_maps(codec.profile, repair)
        super().__init__(codec.spec, folded(codec.profile, self._maps), repairs_sinks=True)

    def decode_rows(
        self,
        batch: Sequence[Coded],
        rows: TokenRows,
        *,
        after: torch.cuda.Event | None = None,
    ) -> list[KdnError | None]:
        used = [one._replace(levels=self._used(one.levels)) for one in batch]
        return super().decode_rows(used, rows, after=after)

    def _checked_levels(self, stream: Bitstream, chunk: Chunk, levels: int | None) -> int:
        return self._used(super()._checked_levels(stream, chunk, levels))

    def _used(self, levels: int) -> int:
        return levels - 1 if levels == self.num_levels else levels

    def _decode_sinks(self, stream: Bitstream, count: int) -> list[torch.Tensor]:
        found = super()._decode_sinks(stream, count)
        return [own.values(sinks) for own, sinks in zip(self._maps, found, strict=True)]

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        refuse_to_encode()

    def encode_all(self, chunks: Sequence[Chunk], cache: KVCache) -> list[bytes]:
        refuse_to_encode()

    def encode_batch(self, items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        refuse_to_encode()

    def simulate(self, chunk: Chunk, cache: KVCache, levels: int) -> KVCache:
        refuse_to_encode()
