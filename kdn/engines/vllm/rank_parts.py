"""A rank's heads of a chunk as a file: raw values after a header that says whose they are.

One part never passes for another: the checksum covers key, rank, dtype and shape. Where ranks hold
the same heads, the first of them has a part.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import Heads
from kdn.errors import ChecksumError, FormatError, MismatchError

HEADER_BYTES = 512
"""Padded with spaces: so that values begin at a multiple of any element's size."""


@dataclass(frozen=True)
class Share:
    """Which heads each rank has; this one is `rank`."""

    spec: ModelSpec
    rank: int
    ranks: int

    def heads(self, rank: int) -> Heads:
        return Heads.of_rank(self.spec.num_kv_heads, rank, self.ranks)

    @property
    def writers(self) -> list[int]:
        """The first of those with the same heads; in order, so that rank 0 comes first."""
        return [rank for rank in range(self.ranks) if self.heads(rank) != self.heads(rank - 1)]

    def whole_shape(self, chunk: Chunk) -> tuple[int, int, int, int]:
        spec = self.spec
        return (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)

    def shape(self, chunk: Chunk, rank: int) -> tuple[int, int, int, int]:
        spec = self.spec
        return (spec.num_layers, chunk.num_tokens, self.heads(rank).count, spec.head_dim)

    def header(self, chunk: Chunk, rank: int, dtype: torch.dtype) -> dict[str, Any]:
        """Of that rank's part, but for the checksum."""
        return {
            "key": chunk.key.hex(),
            "rank": rank,
            "ranks": self.ranks,
            "dtype": str(dtype),
            "shape": list(self.shape(chunk, rank)),
        }


def pack(share: Share, chunk: Chunk, cache: KVCache) -> list[bytes | memoryview]:
    """This rank's part of a chunk as a file."""
    if tuple(cache.keys.shape) != share.shape(chunk, share.rank):
        raise MismatchError(f"{tuple(cache.keys.shape)} is no part of rank {share.rank}")
    header = share.header(chunk, share.rank, cache.dtype)
    values = [_bytes_of(side) for side in (cache.keys, cache.values)]
    header["xxh3"] = _digest(header, *values)
    return [json.dumps(header).encode().ljust(HEADER_BYTES), *(side.data for side in values)]


def unpack(
    share: Share, chunk: Chunk, rank: int, dtype: torch.dtype, data: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of that rank's part, in the place where they are. FormatError if they are
    not the ones that are expected."""
    shape = share.shape(chunk, rank)
    expected = share.header(chunk, rank, dtype)
    try:
        header = json.loads(bytes(data[:HEADER_BYTES]))
    except ValueError as error:
        raise FormatError("a rank's part has no header") from error
    if not isinstance(header, dict) or {**header, **expected} != header:
        raise FormatError(f"expected the part {expected}, found {header}")
    size = 2 * math.prod(shape) * dtype.itemsize
    if len(data) != HEADER_BYTES + size:
        raise FormatError(f"a part of {len(data)} bytes, expected {size} of values")
    values = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
    if _digest(expected, values) != header.get("xxh3"):
        raise ChecksumError("a rank's part is damaged")
    keys, values = torch.from_numpy(values).view(dtype).view(2, *shape)
    return keys, values


def _digest(header: dict[str, Any], *values: npt.NDArray[np.uint8]) -> str:
    digest = xxh3_64(json.dumps(header).encode())
    for part in values:
        digest.update(part.data)
    return digest.hexdigest()


def _bytes_of(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1)
