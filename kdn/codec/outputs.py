"""What codecs check of a cache before they encode it, and where they decode to."""

from __future__ import annotations

import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.header import StreamInfo
from kdn.errors import MismatchError


def check_input(spec: ModelSpec, chunk: Chunk, cache: KVCache) -> None:
    """That this cache holds exactly this chunk of this model."""
    expected = (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)
    if tuple(cache.keys.shape) != expected:
        raise MismatchError(f"expected a cache of {expected}, found {tuple(cache.keys.shape)}")
    if cache.start != chunk.start:
        raise MismatchError(f"expected a cache from {chunk.start}, found from {cache.start}")


def output_cache(info: StreamInfo, out: KVCache | None, dtype: torch.dtype) -> KVCache:
    """Where to decode to: `out`'s tensors if given, else new ones of `dtype`. Says what is absent
    as the stream does; absent tokens are zero, the others are for the decoder to write."""
    if out is None:
        keys = torch.empty(info.shape, dtype=dtype)
        cache = KVCache(keys, torch.empty_like(keys), info.start, info.valid_from)
    else:
        if tuple(out.keys.shape) != info.shape or out.start != info.start:
            raise MismatchError(
                f"expected to decode {info.shape} from {info.start}, "
                f"found a cache of {tuple(out.keys.shape)} from {out.start}"
            )
        cache = KVCache(out.keys, out.values, info.start, info.valid_from)
    clear_absent(cache)
    return cache


def clear_absent(cache: KVCache) -> None:
    """Zero what layers do not hold."""
    for layer, position in enumerate(cache.valid_from):
        if position > cache.start:
            cache.keys[layer, : position - cache.start] = 0
            cache.values[layer, : position - cache.start] = 0
