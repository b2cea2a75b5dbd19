"""Tables of means (`means.py`) on a device: of one level, for decoding and for encoding. Plain
torch: tested anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kdn.codec.klt.gpu_tables import NEVER, SectionTables, Tensor, base_bounds, base_intervals, put
from kdn.codec.klt.profile import MEAN_LANES, Profile


@dataclass(frozen=True)
class MeanTables:
    """`part`: sections whose rows are MEAN_LANES means each; `scales` [group, row]; `spans`
    [group, 2]: the first component that has a mean, and where they end; `step` of a mean, times the
    root of the number of tokens, in finest steps."""

    part: SectionTables
    scales: Tensor
    spans: Tensor
    step: float

    @classmethod
    def of(cls, profile: Profile, level: int, device: torch.device) -> MeanTables | None:
        """None where the level has no means."""
        counts = [profile.num_means(level, group) for group in range(len(profile.groups))]
        if not any(counts):
            return None
        sizes = [-(-count // MEAN_LANES) for count in counts]
        scales = np.zeros((len(sizes), max(sizes)), np.uint8)
        for group, size in enumerate(sizes):
            if size:
                scales[group, :size] = profile.tensors[f"level{level}.g{group}.means.scale"]
        ends = [len(group.scale) for group in profile.groups]
        spans = [[end - count, end] for count, end in zip(counts, ends, strict=True)]
        intervals = put(base_intervals(profile.mean_cdf), device)
        # No activity reaches these thresholds: all means share one class.
        blocks = torch.full((1, -(-max(sizes) // 8), 8), NEVER, dtype=torch.int32, device=device)
        part = SectionTables(
            level,
            False,
            tuple(sizes),
            put(np.array([[0, size] for size in sizes], np.int32), device),
            blocks,
            put(base_bounds(profile.mean_cdf), device),
            intervals,
        )
        return cls(
            part,
            put(scales, device),
            put(np.array(spans, np.int32), device),
            3.0 ** (profile.num_levels - 2 - level),
        )
