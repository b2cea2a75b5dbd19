"""Two stages as GPU kernels see them (`stages.py` says what they are).

Of a group of two stages, the matrix A holds its components, and behind those of all groups the
leading components of its layers, each layer's in whole blocks. A product of 16-bit floats makes
these of those; cuBLAS does it. A tile of columns then sums, after the prediction, the blocks that
hold precise components, and the leading components of its own layer. So a row of B is as long as
these are, not as all components of the group.

Nothing is rounded to bytes between the stages here, as the cores do: what comes of it is nearer to
the values, but the last level corrects what the cores get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kdn.codec.klt.gpu_tables import BLOCK_K, put
from kdn.codec.klt.profile import Group, Profile

Tensor = torch.Tensor

LARGEST_ENTRY = 4096.0
"""Of B, about: leading components are scaled so that their rows are as large. 16-bit floats end at
65504."""


@dataclass(frozen=True)
class Stages:
    """`inner` of each group [rows of a plane, leading components], `factors` [group] that the
    layers' rows in B are multiplied by, and `inner` is divided by; of each layer where in its
    group's part of A its leading components begin (`begins`), and how many blocks they are
    (`blocks`); `fine_blocks` [group] hold precise components. A group of one stage has no `inner`,
    and its layers no blocks. `width` of a group's part of A; `own_width` of a row of B after
    latents."""

    inner: tuple[Tensor | None, ...]
    factors: tuple[float, ...]
    begins: Tensor
    blocks: Tensor
    fine_blocks: tuple[int, ...]
    width: int
    own_width: int

    @classmethod
    def of(cls, profile: Profile, device: torch.device, num_rows: int) -> Stages | None:
        """None where all groups have one stage."""
        if not profile.has_two_stages:
            return None
        begins, blocks, width, own_width = [], [], 0, 0
        for group in profile.groups:
            counts = _blocks_of_layers(group)
            begins += [BLOCK_K * sum(counts[:place]) for place in range(len(counts))]
            blocks += counts
            width = max(width, BLOCK_K * sum(counts))
            staged = BLOCK_K * (_blocks(len(group.fine)) + max(counts))
            own_width = max(own_width, staged if group.leading else num_rows)
        factors = tuple(_factor(group) for group in profile.groups)
        both = zip(profile.groups, factors, strict=True)
        return cls(
            tuple(_inner(group, factor, device, num_rows) for group, factor in both),
            factors,
            put(np.array(begins, np.int32), device),
            put(np.array(blocks, np.int32), device),
            tuple(_blocks(len(group.fine)) for group in profile.groups),
            width,
            own_width,
        )

    def own_blocks(self, coded: Tensor) -> Tensor:
        """Of each group, blocks of components that a tile sums itself, given those that are coded
        at a level."""
        own = [
            fine if inner is not None else blocks
            for inner, fine, blocks in zip(
                self.inner, self.fine_blocks, coded.tolist(), strict=True
            )
        ]
        return torch.tensor(own, dtype=coded.dtype, device=coded.device)

    def arguments(self, leading_from: int) -> tuple[Tensor, Tensor, int, int]:
        """For `transform_triton.restore`, where leading components of a batch begin there in A."""
        return self.begins, self.blocks, leading_from, self.width

    def fill(self, rows: Tensor, group: Group, index: int, columns: Tensor, scale: float) -> None:
        """Rows of B, after latents, of some of a group's columns (-1: none)."""
        device, known = rows.device, columns >= 0
        fine = put(group.fine, device).float() / scale
        rows[:, : len(fine)] = torch.where(known, fine[:, columns.clamp(min=0)], 0.0).T
        assert group.rows is not None
        assert group.rows_scale is not None
        leading = put(group.rows, device).float() * put(group.rows_scale, device)[:, None]
        width, count = leading.shape[1] // 2, len(group.leading)
        side, layer = columns // (width * count), columns // width % count
        first = BLOCK_K * self.fine_blocks[index]
        for place, own in enumerate(group.rows_of_layers):
            chosen = known & (layer == place)
            part = leading[own][:, side[chosen] * width + columns[chosen] % width]
            rows[chosen, first : first + len(part)] = (part.T * self.factors[index]).half()

    def lead(self, packed: Tensor, groups: range, parts: Parts, used: int) -> None:
        """The leading components of groups in A, of the first `used` rows of their components."""
        for place, index in enumerate(groups):
            inner = self.inner[index]
            if inner is None:
                continue
            first = parts.components + place * len(inner)
            begin = parts.leading + place * self.width
            torch.mm(
                packed[:, first : first + used], inner[:used],
                out=packed[:, begin : begin + inner.shape[1]],
            )  # fmt: skip


class Parts(NamedTuple):
    """Columns of A where components begin, and leading components."""

    components: int
    leading: int


def _blocks(count: int) -> int:
    return -(-count // BLOCK_K)


def _blocks_of_layers(group: Group) -> list[int]:
    num_layers = group.layers[1] - group.layers[0]
    return [_blocks(count) for count in group.leading or (0,) * num_layers]


def _factor(group: Group) -> float:
    """A power of two: multiplying by it is exact."""
    if group.rows is None or group.rows_scale is None:
        return 1.0
    largest = float((np.abs(group.rows.astype(np.float32)).max(axis=1) * group.rows_scale).max())
    return float(2.0 ** np.floor(np.log2(LARGEST_ENTRY / max(largest, 1e-30))))


def _inner(group: Group, factor: float, device: torch.device, num_rows: int) -> Tensor | None:
    """The matrix across layers, in whole blocks of each layer and with rows of zeros for the
    precise components."""
    if not group.leading:
        return None
    counts = _blocks_of_layers(group)
    out = torch.zeros((num_rows, BLOCK_K * sum(counts)), device=device)
    basis, begin = put(group.basis, device).float() / factor, 0
    rows = slice(len(group.fine), len(group.fine) + len(basis))
    for own, count in zip(group.rows_of_layers, counts, strict=True):
        out[rows, begin : begin + own.stop - own.start] = basis[:, own]
        begin += BLOCK_K * count
    return out.half()
