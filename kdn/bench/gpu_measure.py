"""What `kdn bench gpu` measures of the codec on a device: ceilings, decoding stage by stage,
encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kdn.bench.gpu_model import Synthetic
from kdn.bench.gpu_timing import cuda_event, cuda_ms, replayed
from kdn.blend.seams import Block, Seams
from kdn.cache.keys import CHUNK_TOKENS
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt.decoder_triton import GpuDecoder
from kdn.codec.klt.gpu_encoding import CONTEXT_BYTES
from kdn.codec.klt.gpu_input import Slab
from kdn.codec.klt.gpu_target import Target
from kdn.codec.klt.profile import Group
from kdn.codec.klt.repaired import RepairedKlt

SEAM_RANK = 64


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: bytes read and written a second by a large copy, and operations a
    second of a large product of 16-bit floats."""

    bytes_per_s: float
    flops: float

    @classmethod
    def measure(cls) -> Ceilings:
        source = torch.empty(1 << 29, device="cuda").normal_()
        target = torch.empty_like(source)
        copy_ms = cuda_ms(lambda: target.copy_(source))
        size = 8192
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
        product_ms = cuda_ms(lambda: a @ b)
        return cls(2 * source.nbytes / copy_ms * 1e3, 2 * size**3 / product_ms * 1e3)


@dataclass(frozen=True)
class Decoded:
    """One decoding of a context, from compressed bytes on the device to the finished cache."""

    ms: float
    graph_ms: float
    stages_ms: dict[str, float]
    peak_bytes: int
    input_bytes: int
    cache_bytes: int
    floor_bytes_ms: float
    floor_flops_ms: float

    @property
    def floor_ms(self) -> float:
        return max(self.floor_bytes_ms, self.floor_flops_ms)

    def as_row(self) -> dict[str, Any]:
        return {
            **vars(self),
            "floor_ms": self.floor_ms,
            "over_floor": self.ms / self.floor_ms,
            "gb_per_s": self.cache_bytes / self.ms / 1e6,
            "peak_share": self.peak_bytes / self.cache_bytes,
        }


class DecodeBench:
    """Decodes contexts of any length: a few encoded chunks, over and over."""

    def __init__(self, synthetic: Synthetic, data: Sequence[bytes], ceilings: Ceilings) -> None:
        self._synthetic, self._ceilings, self._data = synthetic, ceilings, data
        self._streams = [Bitstream.parse(one) for one in data]
        self.spec = synthetic.codec.spec
        self.decoder = GpuDecoder(self.spec, synthetic.codec.profile, torch.device("cuda"))

    def repaired(self, seed: int) -> DecodeBench:
        """The same streams, decoded with seams of every layer: drawn, as only their size counts."""
        rng = torch.Generator().manual_seed(seed)
        spec = self.spec
        columns = 2 * spec.num_kv_heads * spec.head_dim
        blocks = [
            Block(
                (layer, layer + 1),
                torch.randn(columns, SEAM_RANK, generator=rng) / columns,
                torch.randn(SEAM_RANK, columns, generator=rng) / SEAM_RANK,
                torch.zeros(columns),
            )
            for layer in range(spec.num_layers)
        ]
        codec = RepairedKlt(self._synthetic.codec, Seams(spec.fingerprint, blocks))
        return DecodeBench(replace(self._synthetic, codec=codec), self._data, self._ceilings)

    def level_bytes(self, levels: int) -> float:
        """Of a chunk, header included, on average (not the first, which has sinks)."""
        ends = [stream.level_end(levels - 1) for stream in self._streams[1:]]
        return float(np.mean(ends))

    def slabs(self, num_tokens: int, levels: int, size: int) -> list[Slab]:
        count, chunks = num_tokens // CHUNK_TOKENS, self._synthetic.context(num_tokens, 5)
        first, *others = self._streams  # only a context's first chunk has sinks
        streams = [first, *(others[i % len(others)] for i in range(count - 1))]
        slots = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        return [
            self.decoder.slab(
                streams[i : i + size], chunks[i : i + size], levels, slots[i : i + size]
            )
            for i in range(0, count, size)
        ]

    def cache(self, num_tokens: int) -> KVCache:
        shape = (self.spec.num_layers, num_tokens, self.spec.num_kv_heads, self.spec.head_dim)
        keys, values = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return KVCache(keys, values)

    def measure(self, num_tokens: int, levels: int) -> Decoded:
        cache = self.cache(num_tokens)
        chunks = self._synthetic.context(num_tokens, 5)
        target = Target.of_cache(cache, chunks)
        plan = self.decoder.plan(len(chunks), target)
        slabs = self.slabs(num_tokens, levels, plan.num_chunks)

        def decode(stage: Callable[[str], None] = lambda _: None) -> None:
            for slab in slabs:
                self.decoder.run(slab, target, levels, plan, stage)

        ms = cuda_ms(decode)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        decode()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        sent = sum(slab.size_bytes for slab in slabs)
        moved = sent + cache.size_bytes + self.decoder.synthesis.matrix.nbytes
        counts = self._synthetic.codec.profile.levels[levels - 1].num_components
        rank = self._synthetic.codec.profile.tensors["predict.mix"].shape[1]
        groups = self._synthetic.codec.profile.groups
        products = sum(map(_products, groups, counts)) + rank * self.spec.values_per_token
        flops = 2 * num_tokens * products
        return Decoded(
            ms, cuda_ms(replayed(decode)), _stages(decode), peak, sent, cache.size_bytes,
            moved / self._ceilings.bytes_per_s * 1e3, flops / self._ceilings.flops * 1e3,
        )  # fmt: skip

    def encode_ms(self, num_tokens: int) -> float:
        """From a cache on the device to all sections there: a decoded one, and some noise."""
        from kdn.codec.klt.encoder_triton import GpuEncoder

        cache, chunks = self.cache(num_tokens), self._synthetic.context(num_tokens, 5)
        target = Target.of_cache(cache, chunks)
        plan, levels = self.decoder.plan(len(chunks), target), self._synthetic.codec.num_levels - 1
        for slab in self.slabs(num_tokens, levels, plan.num_chunks):
            self.decoder.run(slab, target, levels, plan)
        for side in (cache.keys, cache.values):
            side += 0.1 * torch.randn_like(side)
        encoder = GpuEncoder(self.spec, self._synthetic.codec.profile, torch.device("cuda"))
        items = [(chunk, cache.slice(chunk.start, chunk.end)) for chunk in chunks]
        size = max(1, CONTEXT_BYTES // encoder.memory_bytes(1))

        def encode() -> None:
            for first in range(0, len(items), size):
                encoder.encode(encoder.batch(items[first : first + size]))

        return cuda_ms(encode, repeat=3, warmup=1)


def _products(group: Group, count: int) -> int:
    """Multiplications per token that a group's components take, so many of which are coded."""
    columns = len(group.weight)
    if not group.leading:
        return columns * count
    inner = sum(group.leading)
    return columns * len(group.fine) + inner * (columns // len(group.leading) + count)


def _stages(decode: Callable[[Callable[[str], None]], None]) -> dict[str, float]:
    marks: list[tuple[str, Any]] = []

    def stage(name: str) -> None:
        marks.append((name, cuda_event()))
        marks[-1][1].record()

    stage("")
    decode(stage)
    torch.cuda.synchronize()
    found: dict[str, float] = {}
    for (_, begin), (name, end) in pairwise(marks):
        found[name] = found.get(name, 0.0) + begin.elapsed_time(end)
    return found
