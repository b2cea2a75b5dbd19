"""Decoding klt streams on a GPU: many chunks at once, straight into the cache.

Per slab of chunks: `symbols_triton.py` turns the sections of all groups into integers, one launch
per level and kind; then, batch of groups by batch of groups, `transform_triton.py` turns integers
into components and these into values where they belong. Slabs and batches are as large as the
memory allowed for them: entropy decoding is a chain of small steps, and only many sections at a
time keep a GPU busy. `gpu_launch.py` says how slabs follow one another. Of chunks that the kernels
could not do (damaged, or with values beyond all measure) nothing is written; they are left to the
caller, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import triton.language as tl
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from kdn.cache.keys import CHUNK_TOKENS
from kdn.cache.spec import ModelSpec
from kdn.codec.klt.correction_triton import Correction, Errors
from kdn.codec.klt.gpu_input import Slab, SlabMaker, spare_words
from kdn.codec.klt.gpu_launch import Batching, Launcher
from kdn.codec.klt.gpu_memory import ALIGNMENT, SLAB_CHUNKS, Carving, Fresh, aligned
from kdn.codec.klt.gpu_stages import Parts, Stages
from kdn.codec.klt.gpu_tables import (
    BLOCK_K,
    WIDE_ROWS,
    Coding,
    SectionTables,
    Synthesis,
    Tensor,
)
from kdn.codec.klt.gpu_target import Channels, Target
from kdn.codec.klt.known_triton import place_latents, turn_tables
from kdn.codec.klt.latents import Latents, Products
from kdn.codec.klt.means_triton import Means
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.sinks_triton import Sinks
from kdn.codec.klt.streams import CudaStreams
from kdn.codec.klt.symbols_triton import decode_classes, decode_digits, decode_entering
from kdn.codec.klt.transform_triton import pack_components, restore

BLOCK_TOKENS = 128
MEMORY_SHARE = 0.09
"""Memory that a slab may take, as a share of the cache that is decoded."""
SCRATCH_BYTES = 256 << 20
"""Memory that a slab may take otherwise: enough for 32 chunks of an 8B model."""
SLAB_SHARE = 0.8
"""Of that: for integers; the rest is for the matrix of a batch of groups."""
MIN_BATCH_BYTES = 64 << 20
PREDICTED_TOKENS = 4096
LATENT_TOKENS, TURN_TOKENS = 8, 16
MAX_COMPONENT = 65000.0
"""In A, whose 16-bit floats end at 65504: see `pack_components`."""
_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


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


class GpuDecoder(Launcher):
    """Decodes streams of one profile on one device; `heads` are those of this worker's share."""

    def __init__(
        self,
        spec: ModelSpec,
        profile: Profile,
        device: torch.device,
        heads: range | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
        beside: GpuDecoder | None = None,
    ) -> None:
        """`beside`: a decoder of a profile of the same shape, whose turns and memory it shares."""
        self.spec, self.profile = spec, profile
        self.heads = range(spec.num_kv_heads) if heads is None else heads
        self.coding = Coding.of(profile, device)
        rows = self.coding.num_rows
        self.stages = Stages.of(profile, device, rows)
        self.synthesis = Synthesis.of(spec, profile, device, self.heads, rows, self.stages)
        self._latents = Latents(profile, device)
        self._sinks = Sinks(profile, device)
        self._means = Means(profile, self.coding, self.synthesis, self.stages, device)
        self._correction = Correction(profile, self.coding, self.synthesis.source, device)
        self._asm = device.type == "cuda"
        self.tiling = Tiling.of(device, self.synthesis.block_columns)
        shape = [self.synthesis.block_columns, BLOCK_K]
        self._matrix = TensorDescriptor.from_tensor(self.synthesis.matrix, shape)
        self._blocks = [(c[1:] + BLOCK_K - 1) // BLOCK_K for c in self.coding.counts]
        if self.stages is not None:
            self._blocks = [self.stages.own_blocks(blocks) for blocks in self._blocks]
        pairs = self.synthesis.pairs
        self._channels = Channels(pairs, spec.head_dim, device)
        turns = [f for rope in pairs.ropes for f in rope.inv_freq]
        sizes = [rope.amplitude for rope in pairs.ropes for _ in rope.inv_freq]
        self._turns = torch.tensor([turns, sizes], dtype=torch.float64, device=device)
        self._largest_factor = float((self.synthesis.row_factor.max() * 2).item())
        self._largest_offset = max(float(c.abs().max()) for c in self.coding.centroids)
        self._scratch_bytes = scratch_bytes
        self._num_groups: dict[int, int] = {}  # what was found: it takes long
        maker = SlabMaker(
            (*self.coding.parts, self.coding.correction), len(profile.groups), profile.num_sinks,
            spec.vocab_size, self._spare_words, self._means.sections,
        )  # fmt: skip
        self.recorded_levels = profile.num_levels - 1  # the last one's errors are large
        streams = (
            CudaStreams(device, max(profile.num_levels, 2)) if beside is None else beside._streams
        )
        super().__init__(device, maker, streams, beside)

    @property
    def _spare_words(self) -> int:
        columns = max(g.columns.stop - g.columns.start for g in self.profile.groups)
        return spare_words(int(max(self.coding.num_rows, columns)))

    def plan(self, num_chunks: int, target: Target) -> Batching:
        """The most at a time that the memory allows. In a whole cache, integers may lie where the
        values of the last groups will be: these are written when the last integer has been read."""
        groups = len(self.profile.groups)
        if target.whole is not None:
            budget = max(int(MEMORY_SHARE * target.whole.size_bytes), MIN_BATCH_BYTES)
            for count in (n for n in range(1, groups + 1) if groups % n == 0):
                planes = self._borrowed(target, num_chunks, count)
                if planes is not None and self._batch_bytes(num_chunks, count) <= budget:
                    return Batching(num_chunks, count, planes)
        size = -(-num_chunks // -(-num_chunks // self._most_chunks))
        return Batching(size, self._num_groups_of(size))

    @cached_property
    def _most_chunks(self) -> int:
        return max((n for n in range(1, SLAB_CHUNKS + 1) if self._fits(n)), default=1)

    @cached_property
    def _most_bytes(self) -> int:
        """Of scratch for any slab: one of fewer chunks may take more, since more groups fit beside
        it. Taken at once: to grow would take time and memory, and all recorded launches."""
        every = range(1, self._most_chunks + 1)
        return max(self._slab_bytes(count, self._num_groups_of(count)) for count in every)

    def lent_tables(self, target: Target) -> tuple[Tensor, ...]:
        return self._channels.of(target.head_strides)

    def _num_groups_of(self, num_chunks: int) -> int:
        """Of a batch beside the integers of as many chunks; all batches about as large."""
        if num_chunks not in self._num_groups:
            self._num_groups[num_chunks] = self._found_num_groups(num_chunks)
        return self._num_groups[num_chunks]

    def _found_num_groups(self, num_chunks: int) -> int:
        groups, room = len(self.profile.groups), self._scratch_bytes
        fitting = [n for n in range(1, groups + 1) if self._slab_bytes(num_chunks, n) <= room]
        return -(-groups // -(-groups // max(fitting, default=1)))

    def _fits(self, num_chunks: int) -> bool:
        """Whether there is room for as many, and for a batch of groups that is worth a launch."""
        integers = sum(4 * prod(shape) for shape in self._plane_shapes(num_chunks))
        room = self._scratch_bytes
        return integers <= SLAB_SHARE * room and self._slab_bytes(num_chunks, 1) <= room

    def _slab_bytes(self, num_chunks: int, num_groups: int) -> int:
        """Of scratch, that `run` takes."""
        tokens = num_chunks * CHUNK_TOKENS
        found = sum(aligned(4 * prod(shape)) for shape in self._plane_shapes(num_chunks))
        found += aligned(self._batch_bytes(num_chunks, num_groups))
        found += 2 * aligned(4 * tokens * self.synthesis.pairs.num_frequencies)
        found += self._means.scratch_bytes(num_chunks)
        return found + self._latents.products_bytes(min(tokens, PREDICTED_TOKENS)) + 2 * ALIGNMENT

    def _batch_bytes(self, num_chunks: int, num_groups: int) -> int:
        of_group = self.coding.num_rows + (0 if self.stages is None else self.stages.width)
        width = self.synthesis.num_latents + num_groups * of_group
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

    def run(
        self,
        slab: Slab,
        target: Target,
        levels: int,
        plan: Batching,
        stage: Callable[[str], None] = lambda _: None,
    ) -> Tensor:
        """Decodes a slab in the current stream; the result says of each chunk whether it failed.
        Nothing is waited for. `stage` is told what was just launched."""
        groups = len(self.profile.groups)
        memory = self._memory(slab.num_chunks, plan)
        shape = (slab.num_tokens, self._batch_bytes(1, plan.num_groups) // (2 * CHUNK_TOKENS))
        packed = memory.take(shape, torch.float16)
        planes = self.planes(slab.num_chunks, memory) if plan.planes is None else plan.planes
        bias, sinks, turns = self._decode_symbols(
            slab, packed, planes, levels, target.dtype, memory
        )
        stage("symbols")
        product = TensorDescriptor.from_tensor(packed, [BLOCK_TOKENS, BLOCK_K])
        parts, largest = min(levels, self.profile.num_levels - 1), None
        latents = self.synthesis.num_latents
        if levels > parts:
            largest = self._correction.largest(
                slab, planes, self.synthesis.row_factor, slab.classes
            )
            self._correction.check(slab, slab.status)
        if plan.num_groups < groups:
            self._pack((0, groups), slab, *planes, parts, packed, check=True)
        for first in range(0, groups, plan.num_groups):
            batch = first, min(first + plan.num_groups, groups)
            self._pack(batch, slab, *planes, parts, packed, largest)
            places = Parts(latents, latents + plan.num_groups * self.coding.num_rows)
            if self.stages is not None:
                self.stages.lead(packed, range(*batch), places, self._packed_rows(parts))
            stage("components")
            # Integers may lie where this batch's values go: from here on they are not needed.
            for own, errors in self._errors(slab, batch) if levels > parts else [(batch, None)]:
                self._restore(
                    first,
                    own,
                    product,
                    places.leading,
                    slab,
                    bias,
                    sinks,
                    turns,
                    target,
                    parts,
                    errors,
                )
            stage("transform")
        return slab.status

    def _errors(
        self, slab: Slab, batch: tuple[int, int]
    ) -> Iterator[tuple[tuple[int, int], Errors]]:
        """What the last level adds to groups, so many at a time as its memory allows."""
        size = self._correction.groups_at_once(slab.num_chunks)
        for first in range(*batch, size):
            own = first, min(first + size, batch[1])
            yield own, self._correction.decode(slab, own, slab.classes, slab.status)

    def _memory(self, num_chunks: int, plan: Batching) -> Carving:
        if plan.planes is not None:
            return Fresh(self.device)
        size = self._slab_bytes(num_chunks, plan.num_groups)
        return self._scratch.carve(max(size, self._most_bytes))

    def _decode_symbols(
        self,
        slab: Slab,
        packed: Tensor,
        planes: tuple[Tensor, Tensor],
        levels: int,
        dtype: torch.dtype,
        memory: Carving,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
        """Fills the planes, the classes, and A with the prediction; returns the bias of all chunks
        or of each, sinks and angles.
        Entropy decoding is a chain of small steps that leaves most of a GPU idle: what does not
        wait for each other runs at once, components that enter at different levels, digits, sinks,
        means and prediction.

        Memory that streams beside the current one use is taken in the current one, and they begin
        after `begun` and are joined at the end: so nothing else uses it meanwhile. What sinks take
        in their stream is theirs, and they use it again only after a later `begun`, when this
        slab's values are written."""
        coding, sinks = self.coding, None
        angles = self._angles(slab.num_tokens, dtype, memory)
        count = min(slab.num_tokens, PREDICTED_TOKENS)
        products = self._latents.products_in(count, memory)
        bias, has_means = self.synthesis.bias, self._means.are_at(levels - 1)
        room = self._means.room(levels - 1, slab.num_chunks, memory) if has_means else None
        begun = self._streams.mark()
        decode_classes[(slab.num_chunks,)](
            slab.words, slab.class_places, slab.tokens_of, coding.token_bounds, slab.classes,
            slab.status, num_warps=1,
        )  # fmt: skip
        parts = [(part, index) for index, part in enumerate(coding.parts) if part.level < levels]
        used: set[int] = set()  # a CUDA graph cannot wait for a stream that it does not hold
        for part, index in sorted(parts, key=lambda one: _launch_order(one[0])):
            if part.level > 1 and part.level - 1 in used:
                self._streams.join(part.level - 1)
            is_main = part.is_digits or not part.level
            with nullcontext() if is_main else self._streams.side(part.level):
                self._decode_part(part, slab, slab.places[index], planes)
            used |= set() if is_main else {part.level}
        # They come when the long ones run already. Sinks take long as well.
        if slab.num_sinks:
            with self._streams.side(0, begun):
                sinks = self._sinks.decode(slab, self.synthesis.source, slab.status)
            self._streams.lend(sinks)
        with self._streams.side(1, begun):
            self._turn(slab.positions, angles)
            self._predict(slab, packed, products, count)
            if room is not None:
                bias = self._means.bias(slab, levels - 1, self._matrix, room)
        for stream in used | ({0, 1} if slab.num_sinks else {1}):
            self._streams.join(stream)
        if room is not None and sinks is not None:
            sinks[: slab.num_sinks] += self.synthesis.bias - bias[0]  # nothing moves these
        return bias, sinks, angles

    def _predict(self, slab: Slab, packed: Tensor, products: Products, count: int) -> None:
        """Latent variables into A, so many tokens at a time: what is multiplied takes memory."""
        synthesis, latents = self.synthesis, self._latents
        for first in range(0, slab.num_tokens, count):
            own = slice(first, first + count)
            found = products(slab.ids[own])
            place_latents[(len(found) // LATENT_TOKENS,)](
                found, latents.scale, synthesis.latent_factor, packed[own], found.shape[1],
                packed.shape[1], latents.rank, latents.num_fine, synthesis.num_latents,
                max(slab.num_sinks - first, 0), BT=LATENT_TOKENS,
                BR=next_power_of_2(synthesis.num_latents),
            )  # fmt: skip

    def _angles(
        self, num_tokens: int, dtype: torch.dtype, memory: Carving
    ) -> tuple[Tensor, Tensor]:
        """For cosines and sines [tokens, frequencies]. Rounded to 16 bits they err by 2**-12, a
        quarter of what rounding a value to 16 bits may."""
        kept = torch.float32 if dtype == torch.float32 else torch.float16
        shape = (num_tokens, self.synthesis.pairs.num_frequencies)
        return memory.take(shape, kept), memory.take(shape, kept)

    def _turn(self, positions: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        count = self.synthesis.pairs.num_frequencies
        if count:
            turn_tables[(len(positions) // TURN_TOKENS,)](
                positions, self._turns, *angles, count, BT=TURN_TOKENS, BF=next_power_of_2(count)
            )

    def planes(self, num_chunks: int, memory: Carving) -> tuple[Tensor, Tensor]:
        """For integers of as many chunks: see `symbols_triton.py`."""
        low, high = (memory.take(s, torch.int32) for s in self._plane_shapes(num_chunks))
        return low, high

    def _decode_part(
        self, part: SectionTables, slab: Slab, places: Tensor, planes: tuple[Tensor, Tensor]
    ) -> None:
        coding = self.coding
        num_runs = part.num_runs(coding.run_rows)
        shared = (slab.words, places, part.rows_of, slab.tokens_of, slab.classes, coding.scales)
        sizes = (coding.num_rows, coding.num_rows, part.thresholds.shape[1], WIDE_ROWS)
        kernel = decode_digits if part.is_digits else decode_entering
        tables = (part.bounds,) if part.intervals is None else (part.bounds, part.intervals)
        kernel[(len(self.profile.groups), slab.num_chunks, num_runs)](
            *shared, part.thresholds, *tables, *planes, slab.status, *sizes,
            STEPS=CHUNK_TOKENS // 32, FULL=slab.is_full, ASM=self._asm, RUN_ROWS=coding.run_rows,
            num_warps=1,
        )  # fmt: skip

    def _pack(
        self, batch: tuple[int, int], slab: Slab, low: Tensor, high: Tensor, levels: int,
        packed: Tensor, largest: Tensor | None = None, *, check: bool = False,
    ) -> None:  # fmt: skip
        """Components of some groups into the matrix A; where the last level follows, rounded to
        bytes as it expects. `check` only finds those that are too large: before the first value is
        written, since a chunk is written as a whole or not at all."""
        coding, synthesis, (first, last) = self.coding, self.synthesis, batch
        factor = 3.0 ** (self.profile.num_levels - 1 - levels)
        rows = self._packed_rows(levels)
        if check:
            rows = min(rows, self._rows_in_doubt(factor))
        grid = (-(-rows // BLOCK_K) * (BLOCK_K // 32), CHUNK_TOKENS // 128,
                (last - first) * slab.num_chunks)  # fmt: skip
        pack_components[grid](
            low.view(torch.int8), high.view(torch.int8), coding.scales, synthesis.row_factor,
            coding.centroids[levels - 1], slab.classes, coding.class_factor,
            coding.counts[levels - 1], slab.skipped, packed, slab.status,
            self._correction.num_fine, synthesis.row_factor if largest is None else largest, first,
            last - first, coding.num_rows, coding.num_rows, WIDE_ROWS, factor, packed.shape[1],
            synthesis.num_latents, BR=32, BT=128, BYTES=largest is not None, CHECK=check,
        )  # fmt: skip

    def _packed_rows(self, levels: int) -> int:
        """Rows of A that some levels fill, up to whole blocks of the product: what no component
        fills is zero."""
        rows = max(self.profile.levels[levels - 1].num_components)
        if self.stages is not None:
            rows = max(rows, BLOCK_K * max(self.stages.fine_blocks))
        return -(-rows // BLOCK_K) * BLOCK_K

    def _rows_in_doubt(self, level_factor: float) -> int:
        """The first rows of a plane whose components may be too large for A: those of 16 bits, and
        others only if a profile's basis is very uneven."""
        largest = self._largest_factor * level_factor * (128 + self._largest_offset)
        return WIDE_ROWS if largest < MAX_COMPONENT else self.coding.num_rows

    def _restore(
        self, packed_first: int, batch: tuple[int, int], packed: TensorDescriptor,
        leading_from: int, slab: Slab, bias: Tensor, sinks: Tensor | None,
        turns: tuple[Tensor, Tensor], target: Target, levels: int, errors: Errors | None,
    ) -> None:  # fmt: skip
        """Values of some of the groups in A, of which `packed_first` is the first."""
        stages = self.stages
        synthesis, (first, last) = self.synthesis, batch
        nothing = synthesis.bias
        no_errors = (nothing, nothing, nothing, nothing, nothing, 0, 0)
        no_stages = (nothing, nothing, 0, 0)
        begin, end = synthesis.tiles_before[first], synthesis.tiles_before[last]
        token_tiles = slab.num_tokens // BLOCK_TOKENS
        tiling, channels = self.tiling, self._channels
        restore[(min((end - begin) * token_tiles, tiling.programs),)](
            packed, self._matrix, synthesis.tiles, begin, end - begin, self._blocks[levels - 1],
            synthesis.num_latents, self.coding.num_rows, packed_first, synthesis.scale, bias,
            0 if bias.ndim == 1 else bias.stride(0), *channels.of(target.head_strides),
            channels.frequency, *turns,
            synthesis.pairs.num_frequencies, slab.slots, target.pointers, target.key_stride,
            target.value_stride, nothing if sinks is None else sinks,
            0 if sinks is None else len(synthesis.source), token_tiles, channels.num_pairs,
            channels.num_layers * channels.num_pairs, slab.status,
            nothing if target.inverse_scales is None else target.inverse_scales,
            *(no_errors if errors is None else errors.arguments), first,
            *(no_stages if stages is None else stages.arguments(leading_from)), BM=BLOCK_TOKENS,
            BN=synthesis.block_columns, BK=BLOCK_K,
            EXACT=synthesis.pairs.contiguous and target.is_aligned, DTYPE=_DTYPES[target.dtype],
            HALVES=tiling.halves, FLATTEN=tiling.flatten, ERRORS=errors is not None,
            HAS_SCALES=target.inverse_scales is not None, STAGED=stages is not None,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
