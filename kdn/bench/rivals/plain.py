"""The simple ways: half precision, 8 bits, and keeping only the ends of the context."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kdn.bench.rivals.base import ExactContext, Separate
from kdn.cache.keys import TokenIds
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache

SINK_TOKENS = 4
RECENT_TOKENS = 256


class Half(Separate):
    """Every value as a 16-bit float: what ratios are counted against."""

    name = "fp16"
    labels = ("fp16",)

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def encode(self, context: ExactContext, level: int) -> bytes:
        return _stacked(context.cache).half().numpy().tobytes()

    def decode(self, data: bytes, tokens: TokenIds, level: int) -> KVCache:
        halves = np.frombuffer(data, np.float16).reshape(self._shape(len(tokens)))
        keys, values = torch.from_numpy(halves.astype(np.float32))
        return KVCache(keys, values)

    def _shape(self, num_tokens: int) -> tuple[int, ...]:
        return (2, self.spec.num_layers, num_tokens, self.spec.num_kv_heads, self.spec.head_dim)


class Int8(Half):
    """Signed 8 bits with one 16-bit absolute-maximum scale per token and layer, K and V apart."""

    name = "int8"
    labels = ("int8",)

    def encode(self, context: ExactContext, level: int) -> bytes:
        stacked = _stacked(context.cache).float()
        scales = (stacked.abs().amax((3, 4), keepdim=True) / 127).half()
        # Half precision rounds small scales to zero and may round a scale down.
        codes = (stacked / scales.float().clamp_min(1e-9)).round().clamp(-127, 127).to(torch.int8)
        return scales.numpy().tobytes() + codes.numpy().tobytes()

    def decode(self, data: bytes, tokens: TokenIds, level: int) -> KVCache:
        count = 2 * self.spec.num_layers * len(tokens)
        scales = np.frombuffer(data, np.float16, count).astype(np.float32)
        codes = np.frombuffer(data, np.int8, offset=2 * count).reshape(self._shape(len(tokens)))
        scales = scales.reshape(2, self.spec.num_layers, len(tokens), 1, 1)
        keys, values = torch.from_numpy(codes.astype(np.float32) * scales)
        return KVCache(keys, values)


class Drop(Half):
    """Half precision, but only of the first 4 tokens and the last 256: the rest is forgotten."""

    name = "drop"
    labels = ("sinks+256",)

    def kept(self, num_tokens: int) -> npt.NDArray[np.bool_]:
        place = np.arange(num_tokens)
        kept: npt.NDArray[np.bool_] = (place < SINK_TOKENS) | (place >= num_tokens - RECENT_TOKENS)
        return kept

    def encode(self, context: ExactContext, level: int) -> bytes:
        kept = torch.from_numpy(self.kept(len(context.tokens)))
        return _stacked(context.cache)[:, :, kept].half().numpy().tobytes()

    def decode(self, data: bytes, tokens: TokenIds, level: int) -> KVCache:
        kept = self.kept(len(tokens))
        whole = np.zeros(self._shape(len(tokens)), np.float32)
        whole[:, :, kept] = np.frombuffer(data, np.float16).reshape(self._shape(int(kept.sum())))
        keys, values = torch.from_numpy(whole)
        return KVCache(keys, values)


def _stacked(cache: KVCache) -> torch.Tensor:
    """[2, layers, tokens, heads, head_dim] on the CPU."""
    return torch.stack((cache.keys, cache.values)).cpu()
