"""The last level on a GPU: what components leave of every value, over the kernels of
`symbols_triton.py` and `transform_triton.py`.

Errors of all columns are as large as the cache. So they are decoded for a few groups at a time,
just before these groups' values are written, and once before without being kept: a chunk that turns
out to be damaged must not be written in part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kdn.cache.keys import CHUNK_TOKENS
from kdn.codec.klt.gpu_input import Slab
from kdn.codec.klt.gpu_tables import WIDE_ROWS, Coding, Tensor, put
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.symbols_triton import decode_entering
from kdn.codec.klt.transform_triton import find_largest

MAX_BYTES = 256 << 20
"""For errors. More sections at a time would be faster: each is a chain of as many steps as a group
has columns."""


@dataclass(frozen=True)
class Errors:
    """Of some groups: two planes [chunk, group, row, token] of bytes, each column's row there and
    its step, and each token's."""

    low: Tensor
    high: Tensor
    row_of: Tensor
    column_step: Tensor
    token_step: Tensor

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """As `restore` takes them."""
        planes = self.low.view(torch.int8), self.high.view(torch.int8)
        return *planes, self.row_of, self.column_step, self.token_step, *self.low.shape[1:3]


class Correction:
    """The last level of one profile, on one device. `source` [columns of B] is the profile's
    column, or -1."""

    def __init__(
        self, profile: Profile, coding: Coding, source: Tensor, device: torch.device
    ) -> None:
        self._part, self._scales, self._coding = coding.correction, coding.fix_scales, coding
        self.num_fine = put(np.array([len(g.fine) for g in profile.groups], np.int32), device)
        starts = [np.full(g.columns.stop - g.columns.start, g.columns.start, np.int32)
                  for g in profile.groups]  # fmt: skip
        known, chosen = source >= 0, source.clamp(min=0)
        rows = torch.where(known, chosen - put(np.concatenate(starts), device)[chosen], 0)
        steps = put(profile.tensors["fix.step"], device)[chosen]
        self._row_of, self._column_step = rows.int(), torch.where(known, steps, 0.0)

    def groups_at_once(self, num_chunks: int) -> int:
        per_group = 2 * num_chunks * self._scales.shape[1] * CHUNK_TOKENS
        return max(1, MAX_BYTES // per_group)

    def largest(
        self, slab: Slab, planes: tuple[Tensor, Tensor], row_factor: Tensor, classes: Tensor
    ) -> Tensor:
        """Of each chunk, group and token: the largest component that is rounded to a byte."""
        coding, groups = self._coding, len(self.num_fine)
        shape = (slab.num_chunks, groups, CHUNK_TOKENS)
        found = torch.empty(shape, dtype=torch.float32, device=classes.device)
        find_largest[(CHUNK_TOKENS // 128, slab.num_chunks * groups)](
            *(plane.view(torch.int8) for plane in planes), coding.scales, row_factor,
            coding.centroids[-1], classes, coding.counts[-1], self.num_fine, found,
            coding.num_rows, coding.num_rows, WIDE_ROWS, BR=32, BT=128,
        )  # fmt: skip
        return found

    def check(self, slab: Slab, status: Tensor) -> None:
        """Marks the chunks whose errors cannot be decoded."""
        nothing = status[:1]
        self._decode(slab, (0, len(self.num_fine)), (nothing, nothing), status, keep=False)

    def decode(self, slab: Slab, batch: tuple[int, int], classes: Tensor, status: Tensor) -> Errors:
        """Of a batch of groups."""
        shape = (slab.num_chunks, batch[1] - batch[0], self._scales.shape[1], CHUNK_TOKENS // 4)
        low = torch.empty(shape, dtype=torch.int32, device=classes.device)
        planes = low, torch.empty_like(low)
        self._decode(slab, batch, planes, status, keep=True)
        steps = self._coding.class_factor[classes.int()].view(slab.num_chunks, CHUNK_TOKENS)
        own = torch.arange(CHUNK_TOKENS, device=classes.device) >= slab.skipped[:, None]
        return Errors(*planes, self._row_of, self._column_step, torch.where(own, steps, 0.0))

    def _decode(
        self, slab: Slab, batch: tuple[int, int], planes: tuple[Tensor, Tensor], status: Tensor,
        *, keep: bool,
    ) -> None:  # fmt: skip
        part, own, columns = self._part, slice(*batch), self._scales.shape[1]
        assert part.intervals is not None
        # Errors of a rounding are as large as its step, whatever the token's class: the middle one.
        middle = torch.full((slab.num_tokens,), 2, dtype=torch.uint8, device=status.device)
        # Copies, which are aligned: kernels are compiled anew for what is not.
        places, rows_of = slab.places[-1, :, own].clone(), part.rows_of[own].clone()
        run_rows = self._coding.run_rows
        decode_entering[(batch[1] - batch[0], slab.num_chunks, part.num_runs(run_rows))](
            slab.words, places, rows_of, slab.tokens_of, middle, self._scales[own].clone(),
            part.thresholds[own].clone(), part.bounds, part.intervals, *planes, status, columns,
            columns, part.thresholds.shape[1], columns, STEPS=CHUNK_TOKENS // 32,
            FULL=slab.is_full, ASM=status.is_cuda, RUN_ROWS=run_rows, KEEP=keep, num_warps=1,
        )  # fmt: skip
