"""A profile as tensors on a device, arranged for encoding there. Plain torch.

Products are of 16-bit floats with float32 sums; what must be more precise is split into a rounded
number and what the rounding left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.spec import ModelSpec
from kdn.codec.klt.duals import dual_rows
from kdn.codec.klt.gpu_means import MeanTables
from kdn.codec.klt.gpu_tables import (
    NEVER,
    Coding,
    Pairs,
    SectionTables,
    Tensor,
    base_intervals,
    put,
)
from kdn.codec.klt.profile import Group, Profile


@dataclass(frozen=True)
class GroupMatrices:
    """Of one group: `analysis` [columns, components] from residuals to finest steps; back from the
    large components twice [2 * fine, columns] (numbers and what their rounding left) and from the
    others [coarse, columns], whose scales are `row_scale`."""

    analysis: Tensor
    fine: Tensor
    coarse: Tensor
    row_scale: Tensor
    scales: Tensor
    column_scale: Tensor
    fix_step: Tensor

    @classmethod
    def of(cls, group: Group, profile: Profile, device: torch.device) -> GroupMatrices:
        weight, step = put(group.weight, device), profile.finest_step
        analysis = dual_rows(group, device) * weight / step
        fine = put(group.fine, device).half()
        return cls(
            analysis.half().T.contiguous(),
            torch.cat([fine, fine]),
            put(group.basis, device).half(),
            put(group.basis_scale, device),
            put(group.scale, device),
            step / weight,
            put(profile.tensors["fix.step"][group.columns], device),
        )

    @property
    def num_fine(self) -> int:
        return len(self.fine) // 2

    @property
    def count(self) -> int:
        return len(self.scales)


class Prediction:
    """The predictor from token ids to all columns, without the bias."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        t = profile.tensors
        rows = put(t["predict.out"], device).float() * put(t["predict.out_scale"], device)
        rows = torch.cat([put(t["predict.fine"], device).float(), rows])
        self._scale = rows.abs().amax(dim=1).clamp(min=1e-30) / 1024
        upper, lower = split(rows / self._scale[:, None])
        self._rows = torch.cat([upper, upper, lower])
        self.bias = put(t["predict.bias"], device)

    def prepare(self, latents: Tensor) -> Tensor:
        upper, lower = split(latents * self._scale)
        return torch.cat([upper, lower, upper], 1)

    def of(self, prepared: Tensor, columns: slice) -> Tensor:
        return product(prepared, self._rows[:, columns])


class SinkTables:
    """The first tokens of a context: see `sinks.py`."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        t, widths = profile.tensors, [g.columns.stop - g.columns.start for g in profile.groups]
        scales = np.zeros((len(widths), max(widths)), np.uint8)
        for index, group in enumerate(profile.groups):
            scales[index, : widths[index]] = t["sink.scale"][group.columns]
        self.scales = put(scales, device)
        self.mean = put(t["sink.mean"], device).float()
        self.step = put(t["sink.step"], device)
        rows = np.array([[0, width] for width in widths], np.int32)
        # No activity reaches these thresholds: all sinks share one class.
        blocks = torch.full((1, -(-max(widths) // 8), 8), NEVER, dtype=torch.int32, device=device)
        intervals = put(base_intervals(profile.sink_cdf), device)
        self.part = SectionTables(
            0, False, tuple(widths), put(rows, device), blocks, intervals, intervals
        )


class EncoderTables:
    """All of it, for a model and its profile."""

    def __init__(self, spec: ModelSpec, profile: Profile, device: torch.device) -> None:
        self.coding = Coding.of(profile, device)
        self.groups = [GroupMatrices.of(group, profile, device) for group in profile.groups]
        self.prediction = Prediction(profile, device)
        self.sinks = SinkTables(profile, device)
        means = [MeanTables.of(profile, level, device) for level in range(profile.num_levels)]
        self.means = [one for one in means if one is not None]
        self.importance = put(profile.tensors["importance"], device)
        self.importance_bias = float(profile.meta["importance_bias"])
        freqs = profile.tensors["token.freqs"]
        cdf = np.concatenate([np.zeros((1, 1)), np.cumsum(freqs, axis=1)], axis=1)
        self.class_intervals = put(base_intervals(cdf.astype(np.uint16)), device)
        digits = [level.digits for level in profile.levels]
        self.digit_intervals = [
            None if one is None else put(base_intervals(one.cdf), device) for one in digits
        ]
        self.pairs = Pairs.of(spec, spec.num_kv_heads, 2)
        columns = [self.pairs.first, self.pairs.second, self.pairs.frequency]
        self.pair_tables = [put(one, device) for one in columns]
        self.begins = put(_begins(spec, profile), device)
        turns = [f for rope in self.pairs.ropes for f in rope.inv_freq]
        sizes = [1.0 / rope.amplitude for rope in self.pairs.ropes for _ in rope.inv_freq]
        self._turns = torch.tensor([turns, sizes], dtype=torch.float64, device=device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, frequencies] that turn keys back; computed in float64."""
        angles = positions.double()[:, None] * self._turns[0]
        return (angles.cos() * self._turns[1]).float(), (angles.sin() * self._turns[1]).float()

    def intervals(self, part: SectionTables) -> Tensor:
        found = self.digit_intervals[part.level] if part.is_digits else part.intervals
        assert found is not None
        return found


def _begins(spec: ModelSpec, profile: Profile) -> npt.NDArray[np.int32]:
    """[keys or values, layer]: where a layer's columns begin."""
    width = spec.num_kv_heads * spec.head_dim
    out = np.zeros((2, spec.num_layers), np.int32)
    for group in profile.groups:
        first, last = group.layers
        for side in range(2):
            own = (side * (last - first) + np.arange(last - first)) * width
            out[side, first:last] = group.columns.start + own
    return out


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    upper = values.half()
    return upper, (values - upper).half()


def product(left: Tensor, right: Tensor) -> Tensor:
    if not left.shape[1]:
        return torch.zeros((len(left), right.shape[1]), device=left.device)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
