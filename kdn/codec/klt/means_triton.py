"""Means of what a level leaves out (`means.py`), on a GPU: what they add to each chunk's bias.

As tokens do (`transform_triton.py`), chunks have a line each in a matrix A, which holds means where
a token's has components. Times B, which the product of tokens reads as well, that is one bias for
each chunk and column.
"""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kdn.codec.klt.gpu_input import Slab
from kdn.codec.klt.gpu_means import MeanTables
from kdn.codec.klt.gpu_memory import Carving, aligned
from kdn.codec.klt.gpu_stages import Parts, Stages
from kdn.codec.klt.gpu_tables import BLOCK_K, Coding, Synthesis, Tensor
from kdn.codec.klt.profile import MEAN_LANES, Profile
from kdn.codec.klt.symbols_triton import decode_plain

BLOCK_CHUNKS, BLOCK_ROWS = 16, 256
"""A product needs 16 lines at least."""
MAX_MEAN = tl.constexpr(65000.0)
MAX_SUM = tl.constexpr(1e30)


class Means:
    """Of one decoder."""

    def __init__(
        self, profile: Profile, coding: Coding, synthesis: Synthesis, stages: Stages | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._coding, self._synthesis, self._stages = coding, synthesis, stages
        self._num_groups = len(profile.groups)
        levels = range(profile.num_levels)
        self.sections = tuple(
            (level, group)
            for level in levels
            for group in range(self._num_groups)
            if profile.num_means(level, group)
        )
        self._tables = [MeanTables.of(profile, level, device) for level in levels]
        self._blocks = [
            None if tables is None else self._blocks_of(tables) for tables in self._tables
        ]
        width = self._num_groups * coding.num_rows
        self._width = width + (0 if stages is None else self._num_groups * stages.width)

    def are_at(self, level: int) -> bool:
        return self._tables[level] is not None

    def scratch_bytes(self, num_chunks: int) -> int:
        """Of the largest `Room`."""
        every = [self._parts(one, num_chunks) for one in self._tables if one is not None]
        sizes = [sum(aligned(prod(shape) * kind.itemsize) for shape, kind in one) for one in every]
        return max(sizes, default=0)

    def room(self, level: int, num_chunks: int, memory: Carving) -> Room:
        return Room(*(memory.take(*part) for part in self._parts(self._tables[level], num_chunks)))

    def _parts(
        self, tables: MeanTables, num_chunks: int
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        integers = (num_chunks, self._num_groups, MEAN_LANES * tables.scales.shape[1])
        return [
            (integers, torch.int32),
            ((num_chunks, self._width), torch.float16),
            ((num_chunks, len(self._synthesis.bias)), torch.float32),
        ]

    def _blocks_of(self, tables: MeanTables) -> Tensor:
        """[group, 2]: first and last of the blocks of components that a tile sums itself."""
        first, end = tables.spans[:, 0] // BLOCK_K, -(-tables.spans[:, 1] // BLOCK_K)
        if self._stages is not None:
            own = self._stages.own_blocks(end)
            first, end = torch.minimum(first, own), own
        return torch.stack([first, end], 1).to(torch.int32).contiguous()

    def bias(self, slab: Slab, level: int, matrix: TensorDescriptor, room: Room) -> Tensor:
        """[chunk, column], given B. The status is set of a chunk whose section is damaged, or whose
        means are beyond all measure."""
        tables, synthesis, groups = self._tables[level], self._synthesis, self._num_groups
        whole, packed, out = room
        part, rows = tables.part, tables.scales.shape[1]
        decode_plain[(groups, 1, slab.num_chunks)](
            slab.words, slab.mean_places, part.rows_of, tables.scales, part.bounds, part.intervals,
            whole, slab.status, MEAN_LANES, rows, KEPT=MEAN_LANES, ASM=slab.status.is_cuda,
            RUN_ROWS=0, num_warps=1,
        )  # fmt: skip
        num_rows = self._coding.num_rows
        place_means[(-(-num_rows // BLOCK_ROWS), groups, slab.num_chunks)](
            whole, tables.spans, synthesis.row_factor, slab.tokens_of, packed, slab.status,
            whole.shape[2], num_rows, packed.shape[1], tables.step, BR=BLOCK_ROWS,
        )  # fmt: skip
        stages, leading_from = self._stages, groups * num_rows
        leading = (synthesis.bias, synthesis.bias, 0, 0)
        if stages is not None:
            stages.lead(packed, range(groups), Parts(0, leading_from), num_rows)
            leading = stages.arguments(leading_from)
        sum_means[(len(synthesis.tiles), -(-slab.num_chunks // BLOCK_CHUNKS))](
            packed, matrix, synthesis.tiles, self._blocks[level], synthesis.num_latents, num_rows,
            synthesis.scale, synthesis.bias, out, slab.status, slab.num_chunks, packed.shape[1],
            out.shape[1], *leading, BM=BLOCK_CHUNKS, BN=synthesis.block_columns, BK=BLOCK_K,
            STAGED=stages is not None,
        )  # fmt: skip
        return out


class Room(NamedTuple):
    """Memory for integers [chunk, group, component], the matrix A [chunk, k] and what comes of
    it [chunk, column]."""

    whole: Tensor
    packed: Tensor
    bias: Tensor


@triton.jit
def place_means(
    whole, spans, row_factor, tokens_of, packed, status, most, num_rows, width, step,
    BR: tl.constexpr,
):  # fmt: skip
    """Integers of one (group, chunk) into its line of A, zero for components that have none."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    group, chunk = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(spans + group * 2), tl.load(spans + group * 2 + 1)
    known = (row >= first) & (row < end)
    section = (chunk * tl.num_programs(1) + group).to(tl.int64)
    value = tl.load(whole + section * most + row - first, mask=known, other=0).to(tl.float32)
    value *= tl.load(row_factor + group * num_rows + row, mask=known, other=0.0)
    value *= step / tl.sqrt(tl.load(tokens_of + chunk).to(tl.float32))
    if tl.max(tl.abs(value), 0) > MAX_MEAN:
        tl.atomic_or(status + chunk, 1)
    line = packed + chunk.to(tl.int64) * width + group * num_rows
    tl.store(line + row, value.to(tl.float16), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_chunks"])
def sum_means(
    packed, matrix, tiles, blocks_of, latents, group_width, column_scale, bias, out, status,
    num_chunks, width, num_columns, leading_begins, leading_blocks, leading_from, leading_width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """One tile of columns, of BM chunks: as `transform_triton.restore` sums components, from block
    to block of `blocks_of` [group, 2]. The status is set where that overflows: between two stages
    are 16 bits, and each mean may be as large as they hold."""
    tile, chunk = tl.program_id(0), tl.program_id(1) * BM + tl.arange(0, BM)
    group, layer = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    first, end = tl.load(blocks_of + group * 2), tl.load(blocks_of + group * 2 + 1)
    own = packed + chunk.to(tl.int64)[:, None] * width + tl.arange(0, BK)[None, :]
    known = (chunk < num_chunks)[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    for block in range(first, end):
        a = tl.load(own + group * group_width + block * BK, mask=known, other=0.0)
        b = matrix.load([tile * BN, latents + block * BK])
        sums = tl.dot(a, b.T, sums)
    if STAGED:
        leading = leading_from + group * leading_width + tl.load(leading_begins + layer)
        for block in range(tl.load(leading_blocks + layer)):
            a = tl.load(own + leading + block * BK, mask=known, other=0.0)
            b = matrix.load([tile * BN, latents + (end + block) * BK])
            sums = tl.dot(a, b.T, sums)
    column = tile * BN + tl.arange(0, BN)
    is_finite = tl.min((tl.abs(sums) < MAX_SUM).to(tl.int32), 1)
    tl.atomic_or(status + chunk, 1, mask=(chunk < num_chunks) & (is_finite == 0))
    sums = sums * tl.load(column_scale + column)[None, :] + tl.load(bias + column)[None, :]
    place = chunk.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out + place, sums, mask=known)
