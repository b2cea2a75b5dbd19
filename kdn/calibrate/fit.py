"""From the sums of pass one to predictor, error metric and basis (see codec/klt/transform.py).

All of it is closed form: ridge regression cut to a rank, leading eigenvectors of the normalised
Fisher information, and those of the residuals' covariance in that metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from kdn.calibrate.eigen import leading
from kdn.calibrate.moments import NUM_SINKS, Moments

RIDGE = 3e-4
"""Relative to the mean variance of the predictor's inputs."""
PRECISE_LATENTS = 16
SHRINKAGE = 0.1
"""Part of the Fisher information's off-diagonal that is taken for sampling noise."""


@dataclass(frozen=True)
class Metric:
    """W = (1 + V diag(gain) V') diag(weight) of one group."""

    weight: torch.Tensor
    directions: torch.Tensor
    gain: torch.Tensor

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows W'"""
        scaled = rows * self.weight
        return scaled + ((scaled @ self.directions) * self.gain) @ self.directions.T

    def unapply_gain(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (1 + V diag(gain) V')^-1"""
        gain = 1 / (1 + self.gain) - 1
        return rows + ((rows @ self.directions) * gain) @ self.directions.T


@dataclass(frozen=True)
class Basis:
    """What components [n, columns] add to the weighted values, and their standard deviations. They
    are orthonormal in the metric."""

    rows: torch.Tensor
    deviation: torch.Tensor


def fit_metric(fisher: torch.Tensor, num_tokens: int, rank: int) -> Metric:
    """Keeps the diagonal, and the `rank` directions that stand out from it."""
    diagonal = fisher.diagonal() / num_tokens
    floor = diagonal.mean() * 1e-6
    deviation = (diagonal + floor).sqrt()
    normalised = fisher / num_tokens / deviation[:, None] / deviation
    normalised = (normalised + normalised.T) / 2 / (1 + SHRINKAGE)
    normalised.diagonal().fill_(1.0)
    rank = min(rank, len(normalised) - 1)
    values, directions = leading(normalised, rank)
    # The mean of all other eigenvalues: together they are the trace.
    rest = ((len(normalised) - values.sum()) / (len(normalised) - rank)).clamp(min=1e-6)
    gain = (values / rest).clamp(min=1e-6).sqrt() - 1
    # Rounded as the profile stores them, so that everything fitted later sees what readers see.
    return Metric(
        (deviation * rest.sqrt()).float().double(),
        directions.half().double(),
        gain.float().double(),
    )


@dataclass(frozen=True)
class Regression:
    """x ~ (inputs @ mix) @ out + bias; `mix` lacks the constant's row. It is what the profile
    stores: 8 bits `mix_codes` [inputs, rank] times `mix_scale` [rank], divided by the inputs' own
    scale."""

    mix_codes: torch.Tensor
    mix_scale: torch.Tensor
    mix: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        """The same as one matrix [inputs and constant, columns]."""
        return torch.cat([self.mix @ self.out, self.bias[None]])


def fit_regression(
    moments: Moments, metrics: list[Metric], slices: list[slice], rank: int, scale: torch.Tensor
) -> Regression:
    """Ridge regression, then its best approximation of a rank in the error metric. `scale` [inputs]
    is what the inputs' integers were multiplied by."""
    count = moments.num_tokens
    mean_in = moments.features[-1, :-1] / count
    mean_out = moments.cross[-1] / count
    inputs = moments.features[:-1, :-1] / count - torch.outer(mean_in, mean_in)
    cross = moments.cross[:-1] / count - torch.outer(mean_in, mean_out)
    eye = torch.eye(len(inputs), dtype=torch.float64, device=inputs.device)
    inputs = inputs + RIDGE * inputs.diagonal().mean() * eye
    root = torch.linalg.cholesky(inputs)
    whitened = torch.linalg.solve_triangular(root, cross, upper=False)
    seen = torch.cat([m.apply(whitened[:, s]) for m, s in zip(metrics, slices, strict=True)], dim=1)
    # Left singular vectors of `seen`, from the smaller of the two Gram matrices.
    _, left = leading(seen @ seen.T, rank)
    codes, unit = to_bytes(torch.linalg.solve_triangular(root.T, left, upper=True) * scale[:, None])
    mix = codes.double() * unit / scale[:, None]
    # The best `out` for the rounded `mix`.
    gram = mix.T @ inputs @ mix
    out = torch.linalg.solve(gram, mix.T @ cross)
    bias = (mean_out - mean_in @ (mix @ out)).float().double()
    return Regression(codes, unit, mix, out, bias)


def to_bytes(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded to 8 bits, and what a column's integers are to be multiplied by."""
    unit = matrix.abs().amax(dim=0).clamp(min=1e-30).float().double() / 127
    return torch.round(matrix / unit).to(torch.int8), unit


def predictor_tensors(regression: Regression) -> dict[str, npt.NDArray[Any]]:
    """As the profile stores them: latent variables come by how much they explain, and those that
    are not precise are scaled to explain alike, so that rounding costs each of them the same."""
    fine, rest = regression.out[:PRECISE_LATENTS], regression.out[PRECISE_LATENTS:]
    gain = rest.square().mean(dim=1).sqrt()
    codes, unit = torch.zeros_like(rest, dtype=torch.int8), torch.ones(rest.shape[1])
    if len(rest):
        codes, unit = to_bytes(rest / gain[:, None])
    scale = regression.mix_scale * torch.cat([torch.ones_like(fine[:, 0]), gain])
    return {
        "predict.mix": regression.mix_codes.cpu().numpy(),
        "predict.mix_scale": scale.float().cpu().numpy(),
        "predict.fine": fine.half().cpu().numpy(),
        "predict.out": codes.cpu().numpy(),
        "predict.out_scale": unit.float().cpu().numpy(),
        "predict.bias": regression.bias.float().cpu().numpy(),
    }


def residual_covariance(
    moments: Moments, regression: Regression, index: int, part: slice
) -> torch.Tensor:
    weights = regression.weights[:, part]
    cross = weights.T @ moments.cross[:, part]
    explained = weights.T @ moments.features @ weights
    total = moments.values[index] - cross - cross.T + explained
    return (total + total.T) / 2 / moments.num_tokens


def fit_basis(covariance: torch.Tensor, metric: Metric, count: int) -> Basis:
    seen = metric.apply(metric.apply(covariance).T)
    values, vectors = leading((seen + seen.T) / 2, count)
    return Basis(metric.unapply_gain(vectors.T), values.clamp(min=0).sqrt())


def fit_sinks(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [sinks, columns] and standard deviation [columns] of the first tokens' values."""
    mean = (moments.sinks / moments.num_windows).half().double()
    variance = moments.sinks_squared / moments.num_windows - mean * mean
    assert len(mean) == NUM_SINKS
    return mean, variance.clamp(min=0).mean(dim=0).sqrt()
