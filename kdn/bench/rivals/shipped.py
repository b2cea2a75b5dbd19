"""CacheGen as LMCache ships it, every byte counted but the pickle around it.

No deltas. Symmetric absolute-maximum quantisation with one 16-bit scale per (layer, token) over all
heads, K and V apart. Chunks of 256 tokens, each with its own probability tables: `max bins + 1`
16-bit bounds per (layer, channel), and the 32-bit length of that channel's stream. Level "32/16" is
what ships (32 bins in the first layers, then 16); the others scale the bins to draw a curve.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kdn.bench.rivals import arithmetic
from kdn.bench.rivals.base import ExactContext, Separate
from kdn.cache.keys import TokenIds
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache

CHUNK_TOKENS = 256
FIRST_LAYERS = (10, 2)
"""How many layers have the finer bins: of K, of V."""

Floats = npt.NDArray[np.float32]


class Shipped(Separate):
    name = "cachegen-shipped"
    labels = ("16/8", "32/16", "64/32", "128/64", "250/128")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.channels = spec.num_kv_heads * spec.head_dim

    def encode(self, context: ExactContext, level: int) -> bytes:
        rows = torch.cat((context.cache.keys, context.cache.values)).float().cpu()
        values = rows.flatten(2).numpy()  # [K layers then V layers, tokens, channels]
        starts = range(0, len(context.tokens), CHUNK_TOKENS)
        return b"".join(self._encode_chunk(values[:, s : s + CHUNK_TOKENS], level) for s in starts)

    def _encode_chunk(self, values: Floats, level: int) -> bytes:
        peaks = self._peaks(level)
        scales = np.abs(values).max(2, keepdims=True).astype(np.float16)
        steps = np.maximum(scales.astype(np.float32), 1e-9) / peaks
        codes = np.clip(np.rint(values / steps), -peaks, peaks) + peaks
        symbols = np.ascontiguousarray(codes.transpose(0, 2, 1), np.uint8)
        symbols = symbols.reshape(-1, values.shape[1])  # one stream per (layer, channel)
        cdfs = _tables(symbols, self._max_bins(level))
        payload, lengths = arithmetic.encode(symbols, cdfs)
        return b"".join((scales.tobytes(), cdfs.tobytes(), lengths.tobytes(), payload))

    def decode(self, data: bytes, tokens: TokenIds, level: int) -> KVCache:
        layers = 2 * self.spec.num_layers
        values = np.empty((layers, len(tokens), self.channels), np.float32)
        offset = 0
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = values[:, start : start + CHUNK_TOKENS]
            offset = self._decode_chunk(data, offset, chunk, level)
        shape = (2, self.spec.num_layers, len(tokens), self.spec.num_kv_heads, self.spec.head_dim)
        keys, vals = torch.from_numpy(values).view(shape)
        return KVCache(keys, vals)

    def _decode_chunk(self, data: bytes, offset: int, out: Floats, level: int) -> int:
        layers, num_tokens, channels = out.shape
        entries = self._max_bins(level) + 1
        scales = np.frombuffer(data, np.float16, layers * num_tokens, offset)
        offset += scales.nbytes
        cdfs = np.frombuffer(data, np.uint16, layers * channels * entries, offset)
        offset += cdfs.nbytes
        lengths = np.frombuffer(data, np.int32, layers * channels, offset)
        offset += lengths.nbytes
        end = offset + int(lengths.sum())
        symbols = arithmetic.decode(
            data[offset:end], lengths, cdfs.reshape(-1, entries), num_tokens
        )
        codes = symbols.reshape(layers, channels, num_tokens).transpose(0, 2, 1)
        peaks = self._peaks(level)
        steps = scales.reshape(layers, num_tokens, 1).astype(np.float32) / peaks
        np.multiply(codes.astype(np.float32) - peaks, steps, out=out)
        return end

    def _max_bins(self, level: int) -> int:
        return int(self.labels[level].split("/")[0])

    def _peaks(self, level: int) -> Floats:
        """The largest code of each K layer, then of each V layer."""
        fine, coarse = map(int, self.labels[level].split("/"))
        bins = [
            fine if layer < first else coarse
            for first in FIRST_LAYERS
            for layer in range(self.spec.num_layers)
        ]
        return (np.array(bins, np.float32) // 2 - 1).reshape(-1, 1, 1)


def _tables(symbols: arithmetic.Symbols, bins: int) -> arithmetic.CdfTables:
    """Cumulative counts of each stream, scaled to 16 bits so that every symbol keeps a slot."""
    rows = len(symbols)
    flat = symbols.astype(np.int64) + np.arange(rows, dtype=np.int64)[:, None] * bins
    counts = np.bincount(flat.ravel(), minlength=rows * bins).reshape(rows, bins)
    bounds = np.zeros((rows, bins + 1))
    bounds[:, 1:] = counts.cumsum(1) / symbols.shape[1]
    tables = np.rint(bounds * (65536 - bins)).astype(np.int64) + np.arange(bins + 1)
    return (tables & 0xFFFF).astype(np.uint16)
