"""What kvtc learns offline: a basis and, for each bit budget, how many bits each component gets.

Rebuilt from the description of arXiv 2511.01815. K (RoPE undone) and V apart; all layers and heads
of a token are one row; the mean is removed and a PCA basis fitted. Components, sorted by variance,
are then cut into runs, each with one type of {nothing, int2, int4, fp8}: dynamic programming finds
the cut with the least squared error on calibration rows under the budget. An integer run carries a
16-bit offset and a 16-bit step per token, which the budget pays for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kdn.bench.rivals.plain import SINK_TOKENS
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope

UNIT = 16
"""Runs begin and end at multiples of this many components."""
RUN_UNITS = (1, 2, 4, 8, 16, 32, 64)
BITS = (0, 2, 4, 8)
FP8_PEAK = 448.0
SAMPLE_ROWS = 768
NARROWER = (0.85, 0.7, 0.55)
_COST_BITS = 32  # every possible cost of a run is a multiple of this


@dataclass(frozen=True)
class Run:
    """Components `[start, end)` in one type. `scale` maps a run of fp8 into the type's range."""

    start: int
    end: int
    bits: int
    scale: float = 1.0


@dataclass(frozen=True)
class KvtcSide:
    """Basis [values, components] and mean of K or of V, and a plan for each budget."""

    mean: torch.Tensor
    basis: torch.Tensor
    plans: tuple[tuple[Run, ...], ...]

    def basis_of(self, level: int) -> torch.Tensor:
        """The components that a plan keeps anything of."""
        plan = self.plans[level]
        return self.basis[:, : plan[-1].end if plan else 0]


@dataclass(frozen=True)
class KvtcProfile:
    """`ratios[i]` is the compression, before DEFLATE, that plan i of each side was made for."""

    ratios: tuple[float, ...]
    keys: KvtcSide
    values: KvtcSide

    @classmethod
    def fit(
        cls, spec: ModelSpec, caches: Iterable[KVCache], ratios: Sequence[float]
    ) -> KvtcProfile:
        """From caches of calibration texts, each seen once."""
        moments = _Moments(), _Moments()
        for cache in caches:
            for moment, rows in zip(moments, rows_of(cache, spec), strict=True):
                moment.add(rows[SINK_TOKENS:])
        keys, values = (_fit_side(moment, ratios) for moment in moments)
        return cls(tuple(ratios), keys, values)

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        tensors, plans = {}, {}
        for name, side in (("keys", self.keys), ("values", self.values)):
            kept = max(side.basis_of(level).shape[1] for level in range(len(side.plans)))
            tensors[f"{name}.mean"] = side.mean.float().cpu().contiguous()
            tensors[f"{name}.basis"] = side.basis[:, :kept].half().cpu().contiguous()
            plans[name] = [[[r.start, r.end, r.bits, r.scale] for r in p] for p in side.plans]
        save_file(tensors, path, {"ratios": json.dumps(self.ratios), "plans": json.dumps(plans)})

    @classmethod
    def load(cls, path: Path) -> KvtcProfile:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            meta = file.metadata()
            plans = json.loads(meta["plans"])
            keys, values = (
                KvtcSide(
                    file.get_tensor(f"{name}.mean"),
                    file.get_tensor(f"{name}.basis").float(),
                    tuple(tuple(Run(*run) for run in plan) for plan in plans[name]),
                )
                for name in ("keys", "values")
            )
        return cls(tuple(json.loads(meta["ratios"])), keys, values)


def rows_of(cache: KVCache, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """K without RoPE, and V, as [tokens, layers * heads * head_dim] in float32."""
    keys = rope.undo(cache.keys, spec, cache.start)
    keys, values = (t.float().transpose(0, 1).flatten(1) for t in (keys, cache.values))
    return keys, values


def quantise(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, offsets and steps of a run of components, [tokens, components].

    The description leaves the range open. Each token gets the one with the least squared error
    among its extremes and a few narrower ones, which the decoder need not know: 7 to 9 % smaller
    at equal quality than the extremes alone.
    """
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    middle, reach = (high + low) / 2, (high - low) / 2
    best = _quantise_within(rows, middle - reach, middle + reach, bits)
    for part in NARROWER:
        other = _quantise_within(rows, middle - part * reach, middle + part * reach, bits)
        better = other[3] < best[3]
        best = tuple(torch.where(better, o, b) for o, b in zip(other, best, strict=True))
    codes, offset, step, _ = best
    return codes.to(torch.uint8), offset, step


def _quantise_within(
    rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int
) -> tuple[torch.Tensor, ...]:
    """Codes, offsets, steps and each token's squared error."""
    offset, step = low.half(), ((high - low) / (2**bits - 1)).half()
    codes = ((rows - offset.float()) / step.float().clamp_min(1e-7)).round_()
    codes.clamp_(0, 2**bits - 1)
    error = (rows - dequantise(codes, offset, step)).square_().sum(1, keepdim=True)
    return codes, offset, step, error


def dequantise(codes: torch.Tensor, offset: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return codes.float() * step.float() + offset.float()


def to_fp8(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """fp8 (e4m3) as bytes, saturating."""
    scaled = (rows * scale).clamp(-FP8_PEAK, FP8_PEAK)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(codes: torch.Tensor, scale: float) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float() / scale


class _Moments:
    """Running sums of rows, and a thin sample of the rows themselves."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = torch.zeros(())
        self.squares = torch.zeros(())
        self.sample: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        self.count += len(rows)
        self.sum = self.sum.to(rows.device) + rows.sum(0, dtype=torch.float64)
        self.squares = self.squares.to(rows.device) + rows.T @ rows
        self.sample.append(rows[:: max(1, len(rows) // 96)].half())

    def sampled(self) -> torch.Tensor:
        rows = torch.cat(self.sample)
        return rows[:: max(1, len(rows) // SAMPLE_ROWS)].float()


def _fit_side(moment: _Moments, ratios: Sequence[float]) -> KvtcSide:
    mean = (moment.sum / moment.count).float()
    covariance = moment.squares / moment.count - torch.outer(mean, mean)
    basis = torch.linalg.eigh(covariance)[1].flip(1)  # by falling variance
    projected = (moment.sampled() - mean) @ basis
    budgets = [int(16 * len(mean) / ratio) for ratio in ratios]
    return KvtcSide(mean, basis, allocate(projected, budgets))


def allocate(rows: torch.Tensor, budgets_bits: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    """For each budget (bits per token) the runs with the least squared error on these rows.

    `least[u][c]` is the least error of the first u units at cost c; one table serves all budgets.
    """
    num_units = rows.shape[1] // UNIT
    costs = max(budgets_bits) // _COST_BITS + 1
    least = np.full((num_units + 1, costs), np.inf)
    least[0, 0] = 0.0
    choice = np.zeros((num_units + 1, costs, 2), np.int64)  # units of the last run, its bits
    for end in range(1, num_units + 1):
        for units in RUN_UNITS:
            # Long runs begin on a coarser grid: there are fewer of them to try.
            if units > end or (end - units) % max(1, units // 4):
                continue
            part = rows[:, (end - units) * UNIT : end * UNIT]
            for bits in BITS:
                cost = _cost_bits(units * UNIT, bits) // _COST_BITS
                if cost >= costs:
                    continue
                error = least[end - units, : costs - cost] + _error(part, bits)
                target = least[end, cost:]
                better = error < target
                target[better] = error[better]
                choice[end, cost:][better] = units, bits
    return tuple(_backtrack(rows, least, choice, b // _COST_BITS) for b in budgets_bits)


def _cost_bits(size: int, bits: int) -> int:
    return size * bits + (32 if bits in (2, 4) else 0)


def _error(rows: torch.Tensor, bits: int) -> float:
    if bits == 0:
        return float(rows.square().sum())
    if bits == 8:
        scale = _fp8_scale(rows)
        return float((rows - from_fp8(to_fp8(rows, scale), scale)).square().sum())
    return float((rows - dequantise(*quantise(rows, bits))).square().sum())


def _fp8_scale(rows: torch.Tensor) -> float:
    """A power of two that leaves room for values four times those seen."""
    peak = max(float(rows.abs().max()), 1e-6)
    return float(2.0 ** np.floor(np.log2(FP8_PEAK / 4 / peak)))


def _backtrack(
    rows: torch.Tensor,
    least: npt.NDArray[np.float64],
    choice: npt.NDArray[np.int64],
    budget: int,
) -> tuple[Run, ...]:
    runs: list[Run] = []
    end, cost = len(least) - 1, int(np.argmin(least[-1, : budget + 1]))
    while end:
        units, bits = (int(v) for v in choice[end, cost])
        first, last = (end - units) * UNIT, end * UNIT
        if bits:
            scale = _fp8_scale(rows[:, first:last]) if bits == 8 else 1.0
            runs.append(Run(first, last, bits, scale))
        end, cost = end - units, cost - _cost_bits(last - first, bits) // _COST_BITS
    return tuple(reversed(runs))
