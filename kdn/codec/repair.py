"""A repair of what was decoded: a linear map that changes a chunk's values where it stands behind
others than it was learned behind. `kdn/blend/seams.py` has them; codecs know no more than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn, Protocol

import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec, output_cache
from kdn.codec.format import Bitstream, StreamInfo
from kdn.errors import UnsupportedError


class LayerMap(Protocol):
    """Adds `x @ down @ up + bias` to the values x [tokens, columns] of layers [first, last): their
    keys without rotation, then their values, each `[layer, head, channel]`."""

    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def down(self) -> torch.Tensor: ...
    @property
    def up(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor: ...


class Repair(Protocol):
    """Maps of all layers of one model."""

    @property
    def blocks(self) -> Sequence[LayerMap]: ...

    def check_for(self, spec: ModelSpec) -> None:
        """MismatchError unless it is for this model."""

    def repair(self, cache: KVCache, spec: ModelSpec, at: int | None = None) -> KVCache:
        """A complete cache with the maps applied, in float32 and in new memory, its first token at
        `at` (None: where it is)."""


class Repaired(Codec):
    """Decodes as another codec does, and applies a repair to the values."""

    name: ClassVar[str] = "repaired"

    def __init__(self, codec: Codec, repair: Repair) -> None:
        repair.check_for(codec.spec)
        self._codec, self._repair = codec, repair
        self.spec, self.num_levels = codec.spec, codec.num_levels
        self.profile_id = codec.profile_id

    def decodes_to(self, info: StreamInfo, dtype: torch.dtype) -> bool:
        return self._codec.decodes_to(info, dtype)

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        refuse_to_encode()

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype | None = None,
        at: int | None = None,
    ) -> KVCache:
        wanted = dtype if out is None else out.dtype
        if wanted is None:
            found = self._codec.decode(stream, chunk, levels=levels)
        else:
            found = self._codec.decode(stream, chunk, levels=levels, dtype=wanted)
        check_complete(found)
        cache = output_cache(stream.info, out, found.dtype, at)
        repaired = self._repair.repair(found, self.spec, cache.start)
        cache.keys.copy_(repaired.keys)
        cache.values.copy_(repaired.values)
        return cache


def refuse_to_encode() -> NoReturn:
    """What would be encoded has been repaired, and must not be taken for what was learned."""
    raise UnsupportedError("a codec that repairs what it decodes does not encode")


def check_complete(cache: KVCache) -> None:
    if not cache.is_complete:
        raise UnsupportedError("a layer lacks tokens: such a chunk cannot be repaired")
