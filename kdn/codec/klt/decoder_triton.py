"""Decoding klt streams on a GPU: many chunks at once, straight into the cache.

Per slab of chunks: `symbols_triton.py` turns the sections of all groups into integers, one launch
per level and kind; then, batch of groups by batch of groups, `transform_triton.py` turns integers
into components and these into values where they belong. Slabs and batches are as large as the
memory allowed for them: entropy decoding is a chain of small steps, and only many sections at a
time keep a GPU busy. The host looks at the outcome once, at the end; chunks that the kernels could
not do (damaged, or with values beyond all measure) are left to the caller, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt.correction_triton import Correction, Errors
from kdn.codec.klt.gpu_input import Slab, make_slab, split_slabs
from kdn.codec.klt.gpu_tables import (
    BLOCK_K,
    MAX_SINKS,
    WIDE_ROWS,
    Coding,
    SectionTables,
    Synthesis,
    Tensor,
    put,
)
from kdn.codec.klt.latents import Latents
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.sinks_triton import Sinks
from kdn.codec.klt.streams import Streams
from kdn.codec.klt.symbols_triton import decode_classes, decode_digits, decode_entering
from kdn.codec.klt.transform_triton import pack_components, restore

BLOCK_TOKENS = 128
MEMORY_SHARE = 0.09
"""Of the cache that is decoded: what slabs may take beside it."""
SLAB_SHARE = 0.8
"""Of that: for integers; the rest is for the matrix of a batch of groups."""
MIN_SLAB_BYTES = 64 << 20
MAX_COMPONENT = 65000.0
"""In A, whose 16-bit floats end at 65504: see `pack_components`."""
PREDICTED_TOKENS = 2048
"""At a time: its intermediate results are as large as a tenth of the values."""
_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@dataclass(frozen=True)
class Target:
    """Where values go: `pointers` [layers, 2] to each layer's keys and values, whose tokens lie
    `key_stride` and `value_stride` values apart."""

    pointers: Tensor
    key_stride: int
    value_stride: int
    dtype: torch.dtype
    whole: KVCache | None = None
    """A cache of which every value will be written: until then its memory is free to use."""
    inverse_scales: Tensor | None = None
    """[layers, 2] (float32): what keys and values are multiplied by before they are written."""

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Target:
        """Of tensors [slots, heads, channels] per layer."""
        pointers = [[k.data_ptr(), v.data_ptr()] for k, v in zip(keys, values, strict=True)]
        table = torch.tensor(pointers, dtype=torch.int64, device=keys[0].device)
        return cls(table, keys[0].stride(0), values[0].stride(0), keys[0].dtype)

    @classmethod
    def of_cache(cls, cache: KVCache, chunks: Sequence[Chunk]) -> Target:
        """Of a cache into which these chunks are decoded."""
        target = cls.of(list(cache.keys), list(cache.values))
        plain = cache.keys.is_contiguous() and cache.values.is_contiguous()
        filled = sum(chunk.num_tokens for chunk in chunks) == cache.num_tokens
        return replace(target, whole=cache) if plain and filled else target


@dataclass(frozen=True)
class Batching:
    """How many chunks are decoded at a time, and how many groups; where their integers are."""

    num_chunks: int
    num_groups: int
    planes: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Tiling:
    """How the product is cut: measured choices."""

    programs: int
    halves: bool
    flatten: bool
    warps: int
    stages: int

    @classmethod
    def of(cls, device: torch.device, block_columns: int) -> Tiling:
        if block_columns < 256:
            return cls(1 << 30, False, False, 4, 3)
        # As many programs as fit at once: each fetches its next tile's first blocks in time.
        programs = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(programs, True, True, 8, 3)


def _launch_order(part: SectionTables) -> tuple[int, bool]:
    """What enters at a level is decoded beside its digits, which take longer; at level 1, beside
    level 0, which is short."""
    is_main = part.is_digits or not part.level
    return (part.level if is_main or part.level > 1 else 0), is_main


class GpuDecoder:
    """Decodes streams of one profile on one device; `heads` are those of this worker's share."""

    def __init__(
        self, spec: ModelSpec, profile: Profile, device: torch.device, heads: range | None = None
    ) -> None:
        self.spec, self.profile, self.device = spec, profile, device
        self.heads = range(spec.num_kv_heads) if heads is None else heads
        self.coding = Coding.of(profile, device)
        self.synthesis = Synthesis.of(spec, profile, device, self.heads, self.coding.num_rows)
        self._latents = Latents(profile, device)
        self._sinks = Sinks(profile, device)
        self._correction = Correction(profile, self.coding, self.synthesis.source, device)
        self._asm = device.type == "cuda"
        self._streams = Streams(device, max(profile.num_levels, 2))
        self.tiling = Tiling.of(device, self.synthesis.block_columns)
        shape = [self.synthesis.block_columns, BLOCK_K]
        self._matrix = TensorDescriptor.from_tensor(self.synthesis.matrix, shape)
        self._blocks = [(c[1:] + BLOCK_K - 1) // BLOCK_K for c in self.coding.counts]
        pairs = self.synthesis.pairs
        self._pairs = tuple(put(p, device) for p in (pairs.first, pairs.second, pairs.frequency))
        turns = [f for rope in pairs.ropes for f in rope.inv_freq]
        sizes = [rope.amplitude for rope in pairs.ropes for _ in rope.inv_freq]
        self._turns = torch.tensor([turns, sizes], dtype=torch.float64, device=device)
        self._largest_factor = float((self.synthesis.row_factor.max() * 2).item())
        self._largest_offset = max(float(c.abs().max()) for c in self.coding.centroids)

    def _spare_words(self, levels: int) -> int:
        """As far as a damaged section may read beyond its end: two words a token and row."""
        columns = max(g.columns.stop - g.columns.start for g in self.profile.groups)
        rows = columns if levels == self.profile.num_levels else self.coding.num_rows
        return 2 * int(max(CHUNK_TOKENS * rows, MAX_SINKS * columns))

    def plan(self, num_chunks: int, target: Target) -> Batching:
        """The most at a time that the memory allows. Integers may lie where the values of the last
        groups will be: these are written when the last integer has been read."""
        values = 2 * self.spec.num_layers * len(self.heads) * self.spec.head_dim
        whole = num_chunks * CHUNK_TOKENS * values * target.dtype.itemsize
        budget = max(int(MEMORY_SHARE * whole), MIN_SLAB_BYTES)
        groups = len(self.profile.groups)
        for count in (n for n in range(1, groups + 1) if groups % n == 0):
            planes = self._borrowed(target, num_chunks, count)
            if planes is not None and self._batch_bytes(num_chunks, count) <= budget:
                return Batching(num_chunks, count, planes)
        per_chunk = sum(4 * prod(shape) for shape in self._plane_shapes(1))
        most = max(1, int(SLAB_SHARE * budget) // per_chunk)
        size = -(-num_chunks // -(-num_chunks // most))
        left = budget - size * per_chunk
        fitting = [n for n in range(1, groups + 1) if self._batch_bytes(size, n) <= left]
        return Batching(size, max(fitting, default=1))

    def _batch_bytes(self, num_chunks: int, num_groups: int) -> int:
        width = self.synthesis.num_latents + num_groups * self.coding.num_rows
        return num_chunks * CHUNK_TOKENS * width * 2

    def _plane_shapes(self, num_chunks: int) -> list[tuple[int, int, int, int]]:
        groups = len(self.profile.groups)
        rows = (self.coding.num_rows, WIDE_ROWS)
        return [(num_chunks, groups, n, CHUNK_TOKENS // 4) for n in rows]

    def _borrowed(
        self, target: Target, num_chunks: int, num_groups: int
    ) -> tuple[Tensor, Tensor] | None:
        """Planes in the memory of the last groups' layers, if they fit."""
        if target.whole is None:
            return None
        first, found = self.profile.groups[-num_groups].layers[0], []
        sides = (target.whole.keys[first:], target.whole.values[first:])
        for side, shape in zip(sides, self._plane_shapes(num_chunks), strict=True):
            if side.nbytes < 4 * prod(shape) or side.data_ptr() % 16:
                return None
            raw = side.reshape(-1).view(torch.uint8)[: 4 * prod(shape)]
            found.append(raw.view(torch.int32).view(shape))
        return found[0], found[1]

    def decode(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        levels: int,
        target: Target,
        slots: Sequence[npt.NDArray[np.int64]],
    ) -> list[int]:
        """Decodes chunks into a target, each token into its slot (-1: nowhere); returns which of
        them could not be done here."""
        plan, found = self.plan(len(chunks), target), []
        runs = split_slabs(chunks, plan.num_chunks)
        if len(runs) > 1 and plan.planes is not None:
            return self.decode(streams, chunks, levels, replace(target, whole=None), slots)
        for run in runs:
            own = slice(run.start, run.stop)
            slab = self.slab(streams[own], chunks[own], levels, slots[own])
            found.append((run, self.run(slab, target, levels, plan)))
        return [int(i) + run.start for run, s in found for i in np.flatnonzero(s.cpu().numpy())]

    def slab(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        levels: int,
        slots: Sequence[npt.NDArray[np.int64]],
    ) -> Slab:
        """Chunks on their way to the device: see `gpu_input.py`."""
        return make_slab(
            streams,
            chunks,
            slots,
            (*self.coding.parts, self.coding.correction),
            levels=levels,
            num_groups=len(self.profile.groups),
            spare_words=self._spare_words(levels),
            num_sinks=self.profile.num_sinks,
            vocab_size=self.spec.vocab_size,
            device=self.device,
        )

    def run(
        self,
        slab: Slab,
        target: Target,
        levels: int,
        plan: Batching,
        stage: Callable[[str], None] = lambda _: None,
    ) -> Tensor:
        """Decodes a slab; the result says of each chunk whether it failed. Nothing is waited for.
        `stage` is told what was just launched."""
        status = torch.zeros(slab.num_chunks, dtype=torch.int32, device=self.device)
        groups = len(self.profile.groups)
        shape = (slab.num_tokens, self._batch_bytes(1, plan.num_groups) // (2 * CHUNK_TOKENS))
        packed = torch.empty(shape, dtype=torch.float16, device=self.device)
        planes = self.planes(slab.num_chunks) if plan.planes is None else plan.planes
        begun = self._streams.mark()
        classes, sinks, turns = self._decode_symbols(
            slab, packed, planes, levels, target.dtype, status, begun
        )
        stage("symbols")
        product = TensorDescriptor.from_tensor(packed, [BLOCK_TOKENS, BLOCK_K])
        parts, size, largest = min(levels, self.profile.num_levels - 1), plan.num_groups, None
        if levels > parts:
            size = min(size, self._correction.groups_at_once(slab.num_chunks))
            largest = self._correction.largest(slab, planes, self.synthesis.row_factor, classes)
            self._correction.check(slab, status)
        if size < groups:
            self._pack((0, groups), slab, *planes, classes, parts, packed, status, check=True)
        for first in range(0, groups, size):
            batch, errors = (first, min(first + size, groups)), None
            self._pack(batch, slab, *planes, classes, parts, packed, status, largest)
            stage("components")
            if levels > parts:
                errors = self._correction.decode(slab, batch, classes, status)
                stage("correction")
            self._restore(batch, product, slab, sinks, turns, target, parts, status, errors)
            stage("transform")
        return status

    def _decode_symbols(
        self,
        slab: Slab,
        packed: Tensor,
        planes: tuple[Tensor, Tensor],
        levels: int,
        dtype: torch.dtype,
        status: Tensor,
        begun: torch.cuda.Event | None,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
        """Fills the planes, and A with the prediction; returns classes, sinks and angles. Entropy
        decoding is a chain of small steps that leaves most of a GPU idle: what does not wait for
        each other runs at once, components that enter at different levels, digits, sinks and
        prediction."""
        coding, sinks = self.coding, None
        classes = torch.full((slab.num_tokens,), 2, dtype=torch.uint8, device=self.device)
        decode_classes[(slab.num_chunks,)](
            slab.words, slab.class_places, slab.tokens_of, coding.token_bounds, classes, status,
            num_warps=1,
        )  # fmt: skip
        parts = [(part, index) for index, part in enumerate(coding.parts) if part.level < levels]
        for part, index in sorted(parts, key=lambda one: _launch_order(one[0])):
            if part.level > 1:
                self._streams.join(part.level - 1)
            is_main = part.is_digits or not part.level
            with nullcontext() if is_main else self._streams.side(part.level):
                self._decode_part(part, slab, slab.places[index], classes, planes, status)
        # Many small launches: they come when the long ones run already. Sinks take long as well.
        if slab.num_sinks:
            with self._streams.side(0, begun):
                sinks = self._sinks.decode(slab, self.synthesis.source, status)
        with self._streams.side(1, begun):
            for first in range(0, slab.num_tokens, PREDICTED_TOKENS):
                own = slice(first, first + PREDICTED_TOKENS)
                self._predict(slab.ids[own], packed[own])
            packed[: slab.num_sinks, : self.synthesis.num_latents] = 0
            turns = self._rope(slab.positions, dtype)
        for stream in range(0 if slab.num_sinks else 1, max(levels, 2)):
            self._streams.join(stream)
        return classes, sinks, turns

    def _predict(self, ids: Tensor, packed: Tensor) -> None:
        latents = self._latents(ids) * self.synthesis.latent_factor
        packed[:, : latents.shape[1]] = latents
        packed[:, latents.shape[1] : self.synthesis.num_latents] = 0

    def planes(self, num_chunks: int) -> tuple[Tensor, Tensor]:
        """For integers of as many chunks: see `symbols_triton.py`."""
        shapes = self._plane_shapes(num_chunks)
        low, high = (torch.empty(s, dtype=torch.int32, device=self.device) for s in shapes)
        return low, high

    def _decode_part(
        self, part: SectionTables, slab: Slab, places: Tensor, classes: Tensor,
        planes: tuple[Tensor, Tensor], status: Tensor,
    ) -> None:  # fmt: skip
        coding, grid = self.coding, (len(self.profile.groups), slab.num_chunks)
        shared = (slab.words, places, part.rows_of, slab.tokens_of, classes, coding.scales)
        sizes = (coding.num_rows, coding.num_rows, part.thresholds.shape[1], WIDE_ROWS)
        kernel = decode_digits if part.is_digits else decode_entering
        tables = (part.bounds,) if part.intervals is None else (part.bounds, part.intervals)
        kernel[grid](
            *shared, part.thresholds, *tables, *planes, status, *sizes,
            STEPS=CHUNK_TOKENS // 32, FULL=slab.is_full, ASM=self._asm, num_warps=1,
        )  # fmt: skip

    def _pack(
        self, batch: tuple[int, int], slab: Slab, low: Tensor, high: Tensor, classes: Tensor,
        levels: int, packed: Tensor, status: Tensor, largest: Tensor | None = None,
        *, check: bool = False,
    ) -> None:  # fmt: skip
        """Components of some groups into the matrix A; where the last level follows, rounded to
        bytes as it expects. `check` only finds those that are too large: before the first value is
        written, since a chunk is written as a whole or not at all."""
        coding, synthesis, (first, last) = self.coding, self.synthesis, batch
        factor = 3.0 ** (self.profile.num_levels - 1 - levels)
        rows = max(self.profile.levels[levels - 1].num_components)
        if check:
            rows = min(rows, self._rows_in_doubt(factor))
        # Up to whole blocks of the product: what no component fills is zero.
        parts = -(-rows // BLOCK_K) * (BLOCK_K // 32)
        grid = (parts, CHUNK_TOKENS // 128, (last - first) * slab.num_chunks)
        pack_components[grid](
            low.view(torch.int8), high.view(torch.int8), coding.scales, synthesis.row_factor,
            coding.centroids[levels - 1], classes, coding.class_factor, coding.counts[levels - 1],
            slab.skipped, packed, status, self._correction.num_fine,
            synthesis.row_factor if largest is None else largest, first, last - first,
            coding.num_rows, coding.num_rows, WIDE_ROWS, factor, packed.shape[1],
            synthesis.num_latents, BR=32, BT=128, BYTES=largest is not None, CHECK=check,
        )  # fmt: skip

    def _rows_in_doubt(self, level_factor: float) -> int:
        """The first rows of a plane whose components may be too large for A: those of 16 bits, and
        others only if a profile's basis is very uneven."""
        largest = self._largest_factor * level_factor * (128 + self._largest_offset)
        return WIDE_ROWS if largest < MAX_COMPONENT else self.coding.num_rows

    def _restore(
        self, batch: tuple[int, int], packed: TensorDescriptor, slab: Slab, sinks: Tensor | None,
        turns: tuple[Tensor, Tensor], target: Target, levels: int, status: Tensor,
        errors: Errors | None,
    ) -> None:  # fmt: skip
        synthesis, (first, last) = self.synthesis, batch
        nothing = synthesis.bias
        no_errors = (nothing, nothing, nothing, nothing, nothing, 0, 0)
        begin, end = synthesis.tiles_before[first], synthesis.tiles_before[last]
        token_tiles = slab.num_tokens // BLOCK_TOKENS
        tiling = self.tiling
        restore[(min((end - begin) * token_tiles, tiling.programs),)](
            packed, self._matrix, synthesis.tiles, begin, end - begin, self._blocks[levels - 1],
            synthesis.num_latents, self.coding.num_rows, first, synthesis.scale, synthesis.bias,
            *self._pairs, *turns, synthesis.pairs.num_frequencies, slab.slots, target.pointers,
            target.key_stride, target.value_stride, nothing if sinks is None else sinks,
            0 if sinks is None else len(synthesis.source), token_tiles,
            synthesis.pairs.first.shape[1], status,
            nothing if target.inverse_scales is None else target.inverse_scales,
            *(no_errors if errors is None else errors.arguments), BM=BLOCK_TOKENS,
            BN=synthesis.block_columns, BK=BLOCK_K, EXACT=synthesis.pairs.contiguous,
            DTYPE=_DTYPES[target.dtype], HALVES=tiling.halves, FLATTEN=tiling.flatten,
            ERRORS=errors is not None, HAS_SCALES=target.inverse_scales is not None,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, frequencies]; angles are computed in float64."""
        angles = positions.double()[:, None] * self._turns[0]
        cos, sin = angles.cos() * self._turns[1], angles.sin() * self._turns[1]
        # Rounded to 16 bits they err by 2**-12, a quarter of what rounding a value to 16 bits may.
        kept = torch.float32 if dtype == torch.float32 else torch.float16
        return cos.to(kept), sin.to(kept)
