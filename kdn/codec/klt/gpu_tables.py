"""A profile as tensors on a device, arranged for the Triton kernels. Plain torch: tested anywhere.

`Coding` is what `symbols_triton.py` reads: tables, thresholds and scale classes of all groups,
padded to one shape. `Synthesis` is what `transform_triton.py` reads: the matrix B, and where each
of its columns belongs in a layer. Both say in their fields which index means what. Of groups of two
stages, `gpu_stages.py` says what their rows in B are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.codec.klt import symbols
from kdn.codec.klt.kinds import KIND_CORRECTION, KIND_DIGITS, KIND_ENTERING
from kdn.codec.klt.profile import NUM_CLASSES, Group, Level, LevelTables, Profile
from kdn.codec.klt.runs import runs_of
from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from kdn.codec.klt.gpu_stages import Stages

BLOCK_K = 64
WIDE_ROWS = 64
"""Rows whose integers are kept with 16 bits; the others' almost always fit into 8."""
NEVER = 2**31 - 1
MAX_SINKS = 16
"""First tokens of a context that kernels decode, and encode; a profile with more is left to the
reference."""

Tensor = torch.Tensor


@dataclass(frozen=True)
class SectionTables:
    """One kind of section of all groups: first row and number of rows (also as `sizes`)
    [group, 2], thresholds [group, block, 8], and its tables' bounds (and intervals, where
    components enter)."""

    level: int
    is_digits: bool
    sizes: tuple[int, ...]
    rows_of: Tensor
    thresholds: Tensor
    bounds: Tensor
    intervals: Tensor | None
    is_correction: bool = False

    @property
    def kind(self) -> int:
        """What such sections are called in a stream."""
        if self.is_correction:
            return KIND_CORRECTION
        return KIND_DIGITS if self.is_digits else KIND_ENTERING

    def num_runs(self, run_rows: int) -> int:
        """Of the largest of them."""
        return len(runs_of(max(self.sizes), run_rows or None))


@dataclass(frozen=True)
class Coding:
    """`scales` [group, row]; `parts` in the order in which they must be decoded; `num_rows` of a
    plane, `run_rows` of a run (0: sections have one); `counts` [level][1 + group]: the number of
    groups, then each one's components; `correction` and `fix_scales` [group, column] are the last
    level's."""

    scales: Tensor
    parts: tuple[SectionTables, ...]
    num_rows: int
    run_rows: int
    token_bounds: Tensor
    counts: tuple[Tensor, ...]
    centroids: tuple[Tensor, ...]
    class_factor: Tensor
    correction: SectionTables
    fix_scales: Tensor

    @classmethod
    def of(cls, profile: Profile, device: torch.device) -> Coding:
        count = max(len(group.scale) for group in profile.groups)
        num_rows = -(-count // BLOCK_K) * BLOCK_K
        scales = _padded_rows([group.scale for group in profile.groups], num_rows)
        fixes = [profile.tensors["fix.scale"][group.columns] for group in profile.groups]
        levels = profile.levels[:-1]
        parts = [part for level in range(len(levels)) for part in _parts(levels, level, device)]
        freqs = profile.tensors["token.freqs"][0].astype(np.int32)
        halvings = np.arange(NUM_CLASSES, dtype=np.float32) - NUM_CLASSES // 2
        return cls(
            put(scales, device),
            tuple(parts),
            num_rows,
            profile.run_rows or 0,
            put(np.concatenate([[0], np.cumsum(freqs)]).astype(np.int32), device),
            tuple(
                put(np.array([len(scales), *level.num_components], np.int32), device)
                for level in levels
            ),
            tuple(put(np.pad(level.centroids, ((0, 0), (1, 0))), device) for level in levels),
            put(np.exp2(-halvings / 2).astype(np.float32), device),
            _correction(profile, device),
            put(_padded_rows(fixes, max(map(len, fixes))), device),
        )


def _padded_rows(rows: Sequence[npt.NDArray[np.uint8]], width: int) -> npt.NDArray[np.uint8]:
    out = np.zeros((len(rows), width), np.uint8)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def _correction(profile: Profile, device: torch.device) -> SectionTables:
    """The last level's: as if every column were a component that enters."""
    last = profile.levels[-1]
    zero = (0,) * len(last.num_components)
    part = _part(profile.num_levels - 1, last.entering, zero, last.num_components, device)
    return replace(part, is_correction=True)


def _parts(levels: Sequence[Level], index: int, device: torch.device) -> list[SectionTables]:
    level, zero = levels[index], (0,) * len(levels[index].num_components)
    before = levels[index - 1].num_components if index else zero
    found = []
    if level.digits is not None:
        found.append(_part(index, level.digits, zero, before, device, is_digits=True))
    found.append(_part(index, level.entering, before, level.num_components, device))
    return [part for part in found if any(part.sizes)]


def _part(
    level: int,
    tables: LevelTables,
    first: Sequence[int],
    last: Sequence[int],
    device: torch.device,
    *,
    is_digits: bool = False,
) -> SectionTables:
    rows = np.array([[a, b - a] for a, b in zip(first, last, strict=True)], np.int32)
    bounds = digit_bounds(tables.cdf) if is_digits else base_bounds(tables.cdf)
    return SectionTables(
        level,
        is_digits,
        tuple(int(size) for size in rows[:, 1]),
        put(rows, device),
        put(padded_thresholds(tables.thresholds), device),
        put(bounds, device),
        None if is_digits else put(base_intervals(tables.cdf), device),
    )


def padded_thresholds(thresholds: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """[group, block, 8]; what is padded is never reached."""
    blocks = max((len(one) for one in thresholds), default=0)
    out = np.full((len(thresholds), max(blocks, 1), symbols.NUM_ACTIVITIES), NEVER, np.int32)
    for index, one in enumerate(thresholds):
        out[index, : len(one), : one.shape[1]] = one
    return out


def base_bounds(cdf: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """[8, tables] of `1 - bound` (16 bits) of the 15 inner bounds, two to a word; the last is
    beyond every slot."""
    pairs = np.ascontiguousarray((1 - cdf[:, 1:17].astype(np.int32)).astype("<i2"))
    return np.ascontiguousarray(pairs.view("<i4").astype(np.int32).T)


def base_intervals(cdf: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """[16, tables] of cumulative frequency and, in the upper half, frequency."""
    wide = cdf.astype(np.uint32)
    packed: npt.NDArray[np.uint32] = wide[:, :-1] | (wide[:, 1:] - wide[:, :-1]) << np.uint32(16)
    return np.ascontiguousarray(packed.view(np.int32).T)


def digit_bounds(cdf: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """[tables] of the two inner bounds."""
    wide = cdf.astype(np.uint32)
    packed: npt.NDArray[np.uint32] = wide[:, 1] | wide[:, 2] << np.uint32(16)
    return packed.view(np.int32)


@dataclass(frozen=True)
class Pairs:
    """Of each layer [layers, pairs]: the channels of a token's row that make a pair, or -1 where a
    row is padded, and which frequency turns their keys, or -1. Columns of B are in this order:
    first channel, second channel of each pair."""

    first: npt.NDArray[np.int32]
    second: npt.NDArray[np.int32]
    frequency: npt.NDArray[np.int32]
    ropes: tuple[RopeSpec, ...]
    contiguous: bool

    @classmethod
    def of(cls, spec: ModelSpec, num_heads: int, block_columns: int) -> Pairs:
        if spec.head_dim % 2:
            raise UnsupportedError(f"expected an even head size, found {spec.head_dim}")
        ropes = tuple(dict.fromkeys(rope for rope in spec.ropes if rope is not None))
        starts = np.cumsum([0, *(len(rope.inv_freq) for rope in ropes)])
        width = num_heads * spec.head_dim
        shape = (spec.num_layers, -(-width // block_columns) * block_columns // 2)
        first, second, turns = (np.full(shape, -1, np.int32) for _ in range(3))
        exact = width % block_columns == 0 and None not in spec.ropes
        for layer, rope in enumerate(spec.ropes):
            a, b, turn = _head_pairs(rope, spec.head_dim)
            if rope is not None:
                turn = np.where(turn >= 0, turn + starts[ropes.index(rope)], -1)
                whole = rope.rotary_dim == spec.head_dim and len(rope.inv_freq) % 8 == 0
                exact &= whole and not rope.interleaved
            heads = np.arange(num_heads)[:, None] * spec.head_dim
            first[layer, : width // 2] = (heads + a).ravel()
            second[layer, : width // 2] = (heads + b).ravel()
            turns[layer, : width // 2] = np.tile(turn, num_heads)
        return cls(first, second, turns, ropes, exact)

    @property
    def num_frequencies(self) -> int:
        return sum(len(rope.inv_freq) for rope in self.ropes)


def _head_pairs(
    rope: RopeSpec | None, head_dim: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Channels and frequencies of one head's pairs: those that turn, then the rest in halves."""
    count = len(rope.inv_freq) if rope else 0
    own = np.arange(count)
    a, b = (2 * own, 2 * own + 1) if rope and rope.interleaved else (own, own + count)
    rest = 2 * count + np.arange((head_dim - 2 * count) // 2)
    first, second = np.concatenate([a, rest]), np.concatenate([b, rest + len(rest)])
    return first, second, np.concatenate([own, np.full(len(rest), -1)])


@dataclass(frozen=True)
class Synthesis:
    """`matrix` B [columns, k] with k = latents | components; `scale`, `bias` [columns]; `source`
    [columns]: the profile's column, or -1; `tiles` [tile, 4]: group, layer, is_value, first pair,
    of which `tiles_before` [group] come before a group's; `row_factor` [group, row] and
    `latent_factor` [rank] go into A."""

    matrix: Tensor
    scale: Tensor
    bias: Tensor
    source: Tensor
    tiles: Tensor
    tiles_before: tuple[int, ...]
    row_factor: Tensor
    latent_factor: Tensor
    pairs: Pairs
    num_latents: int
    block_columns: int

    @classmethod
    def of(
        cls, spec: ModelSpec, profile: Profile, device: torch.device, heads: range, num_rows: int,
        stages: Stages | None = None,
    ) -> Synthesis:  # fmt: skip
        """`stages`: of a profile that has groups of two."""
        assert stages is not None or not profile.has_two_stages
        width = len(heads) * spec.head_dim
        block_columns = next((b for b in (256, 128, 64) if width % b == 0), 64)
        pairs = Pairs.of(spec, len(heads), block_columns)
        tiles, source, before = _tiles(spec, profile.groups, heads, pairs, block_columns)
        rank = profile.tensors["predict.mix"].shape[1]
        num_latents = -(-rank // BLOCK_K) * BLOCK_K
        columns = put(source, device)
        builder = _Builder(profile, columns, num_latents, num_rows, device, stages)
        row_factor = builder.fill(before, block_columns)
        return cls(
            builder.matrix, builder.scale, builder.bias, columns, put(tiles, device), before,
            row_factor, builder.latent_factor, pairs, num_latents, block_columns,
        )  # fmt: skip


def _tiles(
    spec: ModelSpec, groups: Sequence[Group], heads: range, pairs: Pairs, block_columns: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], tuple[int, ...]]:
    """Tiles, every column's place in the profile, and how many tiles come before each group."""
    whole = spec.num_kv_heads * spec.head_dim
    tiles, source, before = [], [], [0]
    for index, group in enumerate(groups):
        (first, last), begin = group.layers, group.columns.start + heads.start * spec.head_dim
        for is_value in range(2):
            for layer in range(first, last):
                row = begin + (is_value * (last - first) + layer - first) * whole
                both = np.stack([pairs.first[layer], pairs.second[layer]], 1).ravel()
                source.append(np.where(both >= 0, both.astype(np.int64) + row, -1))
                step = block_columns // 2
                for pair in range(0, pairs.first.shape[1], step):
                    tiles.append((index, layer, is_value, pair))
        before.append(len(tiles))
    return np.array(tiles, np.int32), np.concatenate(source), tuple(before)


class _Builder:
    """Fills B group by group, on the device."""

    def __init__(
        self, profile: Profile, source: Tensor, num_latents: int, num_rows: int,
        device: torch.device, stages: Stages | None,
    ) -> None:  # fmt: skip
        self._profile, self._source, self._device = profile, source, device
        self._num_latents, self._num_rows, self._stages = num_latents, num_rows, stages
        own_width = num_rows if stages is None else stages.own_width
        shape = (len(source), num_latents + own_width)
        self.matrix = torch.zeros(shape, dtype=torch.float16, device=device)
        self.scale = torch.zeros(len(source), device=device)
        bias = put(profile.tensors["predict.bias"], device)
        self.bias = torch.where(source >= 0, bias[source.clamp(min=0)], 0.0)
        fine = put(profile.tensors["predict.fine"], device).float()
        rest = put(profile.tensors["predict.out"], device).float()
        rest *= put(profile.tensors["predict.out_scale"], device)
        self._latent_rows = torch.cat([fine, rest])
        self._weight = torch.cat([put(g.weight, device) for g in profile.groups])
        self.latent_factor = torch.ones(len(self._latent_rows), device=device)

    def fill(self, before: tuple[int, ...], block_columns: int) -> Tensor:
        profile, groups = self._profile, self._profile.groups
        scales = torch.ones(len(groups), device=self._device)
        factors = torch.ones((len(groups), self._num_rows), device=self._device)
        for index, group in enumerate(groups):
            middle = float(np.median(group.basis_scale)) if len(group.basis_scale) else 1.0
            # A power of two: dividing by it is exact.
            scales[index] = 2.0 ** np.floor(np.log2(middle))
            fine, rest = len(group.fine), len(group.scale)
            factors[index, fine:rest] = put(group.basis_scale, self._device) / scales[index]
        of_group = torch.cat([
            scales[i].expand(g.columns.stop - g.columns.start) for i, g in enumerate(groups)
        ])  # fmt: skip
        column_scale = of_group * profile.finest_step / self._weight
        self._fill_latents(column_scale)
        for index in range(len(groups)):
            rows = slice(before[index] * block_columns, before[index + 1] * block_columns)
            self._fill_group(index, rows, float(scales[index]))
        return factors

    def _fill_latents(self, column_scale: Tensor) -> None:
        known = self._source >= 0
        chosen = self._source.clamp(min=0)
        self.scale.copy_(torch.where(known, column_scale[chosen], 0.0))
        scaled = torch.where(known, (self._latent_rows / column_scale)[:, chosen], 0.0)
        most = scaled.abs().amax(dim=1).clamp(min=1e-30)
        self.latent_factor = torch.exp2(torch.floor(torch.log2(most / 1024)))
        self.matrix[:, : len(scaled)] = (scaled / self.latent_factor[:, None]).T

    def _fill_group(self, index: int, rows: slice, scale: float) -> None:
        group, own, begin = self._profile.groups[index], self._source[rows], self._num_latents
        known, chosen = own >= 0, (own - group.columns.start).clamp(min=0)
        if self._stages is not None and group.leading:
            columns = torch.where(known, chosen, -1)
            self._stages.fill(self.matrix[rows, begin:], group, index, columns, scale)
            return
        fine = put(group.fine, self._device).float() / scale
        both = torch.cat([fine, put(group.basis, self._device).float()])
        self.matrix[rows, begin : begin + len(both)] = torch.where(known, both[:, chosen], 0.0).T


def put(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
