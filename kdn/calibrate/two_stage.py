"""The basis of a group in two stages (see codec/klt/stages.py), in closed form.

1. The largest components of the whole group have rows of their own, as with one stage.
2. Of what they leave, each layer's leading components: those of the layer's own block of the
   covariance, in its own block of the metric. All layers share a number of them: a layer gets those
   that are among the largest of all.
3. Across layers, the principal components within what all layers' leading ones span, in the
   group's metric, and orthogonal to the largest. They are found for rows as the profile stores
   them: what rounding does to rows, the components make up for.

A layer's leading components are turned by a fixed random rotation, which changes nothing of what
they span. Without it, the first of them are large and the others small, and so are the entries of
the matrix across layers: 8 bits would go to a few. Turned, all are about as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from kdn.calibrate import eigen
from kdn.calibrate.fit import Basis, Metric, fit_basis
from kdn.errors import UnsupportedError

RUN = 8
"""Leading components that a layer gets at a time: products are fastest of whole runs."""
LEAST_RUNS = 4
"""Per layer: with fewer, one component at a time."""
MOST_OF_AVERAGE = 2
"""A layer has at most so many times the components of the average layer."""


@dataclass(frozen=True)
class StoredBasis:
    """As the profile stores it, under the names that a group's tensors have there, and the standard
    deviations of all components."""

    tensors: dict[str, npt.NDArray[Any]]
    deviation: torch.Tensor
    leading: tuple[int, ...] = ()
    """Components of each layer, in two stages."""


def fit_stages(
    covariance: torch.Tensor,
    metric: Metric,
    *,
    num_layers: int,
    leading: int,
    components: int,
    fine_components: int,
) -> StoredBasis:
    """From a group's residual covariance: `components` in all, `fine_components` of them precise;
    the others in one stage, or through the `leading` ones that a layer has on average."""
    if not leading:
        return _one_stage(fit_basis(covariance, metric, components), fine_components)
    most = len(covariance) // num_layers
    if not 0 < leading <= most:
        raise UnsupportedError(
            f"expected 0 to {most} leading components, a layer's columns, found {leading}"
        )
    fine = fit_basis(covariance, metric, max(1, min(fine_components, components)))
    left = _without(
        metric.apply(metric.apply(covariance).T), _gained(fine.rows, metric), fine.deviation
    )
    found = _layers_rows(left, metric, num_layers, leading)
    counts = tuple(len(rows) for rows in found)
    codes, scale = _rounded(torch.cat(found))
    count = max(0, min(components, sum(counts)) - len(fine.rows))
    rows, largest = torch.split(codes * scale[:, None], list(counts)), _gained(fine.rows, metric)
    across, deviation = _across(left, metric, rows, largest, count)
    basis, basis_scale = _rounded(across)
    return StoredBasis(
        {
            "fine": fine.rows.half().cpu().numpy(),
            "basis": basis.to(torch.int8).cpu().numpy(),
            "basis_scale": basis_scale.float().cpu().numpy(),
            "rows": codes.to(torch.int8).cpu().numpy(),
            "rows_scale": scale.float().cpu().numpy(),
        },
        torch.cat([fine.deviation, deviation]),
        counts,
    )


def _one_stage(basis: Basis, fine_components: int) -> StoredBasis:
    fine, coarse = basis.rows[:fine_components], basis.rows[fine_components:]
    codes, scale = _rounded(coarse)
    return StoredBasis(
        {
            "fine": fine.half().cpu().numpy(),
            "basis": codes.to(torch.int8).cpu().numpy(),
            "basis_scale": scale.float().cpu().numpy(),
        },
        basis.deviation,
    )


def layer_columns(num_layers: int, num_columns: int) -> torch.Tensor:
    """Where each layer's keys, then values, are among a group's columns: [layers, columns]."""
    return torch.arange(num_columns).view(2, num_layers, -1).transpose(0, 1).reshape(num_layers, -1)


def _gained(rows: torch.Tensor, metric: Metric) -> torch.Tensor:
    """rows (1 + V diag(gain) V')"""
    return rows + ((rows @ metric.directions) * metric.gain) @ metric.directions.T


def _without(seen: torch.Tensor, directions: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """A covariance without some of its principal components."""
    left = seen - (directions.T * deviation.square()) @ directions
    return (left + left.T) / 2


def _layers_rows(
    left: torch.Tensor, metric: Metric, num_layers: int, leading: int
) -> list[torch.Tensor]:
    """Rows of each layer [components, columns], of as many as `leading` on average, from the
    covariance of weighted values in the metric."""
    weighted = metric.unapply_gain(metric.unapply_gain(left).T)
    gain = 2 * metric.gain + metric.gain.square()
    variances, every = [], []
    for own in layer_columns(num_layers, len(left)).to(left.device):
        directions = metric.directions[own]
        block = (directions * gain) @ directions.T
        block.diagonal().add_(1.0)
        values, vectors = torch.linalg.eigh(block)
        root = values.clamp(min=1e-9).sqrt()
        inside = vectors.T @ weighted[own][:, own] @ vectors
        most = min(len(own), -(-MOST_OF_AVERAGE * leading // RUN) * RUN)
        variance, principal = eigen.leading(_symmetric(root[:, None] * inside * root), most)
        variances.append(variance)
        every.append((principal.T / root) @ vectors.T)
    counts = shares(torch.stack(variances), num_layers * leading)
    both = zip(every, counts, strict=True)
    return [_rotation(count, left) @ rows[:count] for rows, count in both]


def shares(variances: torch.Tensor, total: int) -> list[int]:
    """How many components of each layer are among the `total` largest, from all layers' variances
    [layers, components], largest first. Each layer has at least its first; where there are many,
    whole runs are chosen by their means."""
    num_layers, most = variances.shape
    run = RUN if total >= LEAST_RUNS * RUN * num_layers and most % RUN == 0 else 1
    means = variances.view(num_layers, -1, run).mean(dim=2).cpu()
    means[:, 0] = float("inf")
    chosen = means.flatten().argsort(descending=True, stable=True)[: total // run]
    counts = torch.bincount(chosen // means.shape[1], minlength=num_layers) * run
    return [int(count) for count in counts]


def _across(
    left: torch.Tensor,
    metric: Metric,
    rows: Sequence[torch.Tensor],
    fine: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first principal components within the span of all layers' rows [leading, columns], and
    orthogonal to fine ones: each as a sum of these rows, and their deviations, largest first."""
    parts = []
    for place, own in zip(layer_columns(len(rows), len(left)).to(left.device), rows, strict=True):
        wide = torch.zeros((len(own), len(left)), dtype=left.dtype, device=left.device)
        wide[:, place] = own
        parts.append(wide)
    spanned = _gained(torch.cat(parts), metric)
    root = torch.linalg.cholesky(_symmetric(spanned @ spanned.T))
    orthonormal = torch.linalg.solve_triangular(root, spanned, upper=False)
    taken = torch.linalg.qr(orthonormal @ fine.T)[0]
    inside = orthonormal @ left @ orthonormal.T
    inside -= taken @ (taken.T @ inside)
    inside -= (inside @ taken) @ taken.T
    # Below all others, also where those are nearly nothing.
    inside -= 1e-4 * inside.diagonal().max() * (taken @ taken.T)
    values, vectors = eigen.leading(_symmetric(inside), count)
    across = torch.linalg.solve_triangular(root.T, vectors, upper=True).T
    return across, values.clamp(min=0).sqrt()


def _rotation(size: int, like: torch.Tensor) -> torch.Tensor:
    normal = torch.randn((size, size), generator=torch.Generator().manual_seed(0)).double()
    turn: torch.Tensor = torch.linalg.qr(normal)[0].to(like)
    return turn


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix + matrix.T) / 2


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To whole numbers of 8 bits, and what each row's are multiplied by, as it is stored."""
    scale = (rows.abs().amax(dim=1).clamp(min=1e-30) / 127).float().double()
    return torch.round(rows / scale[:, None]), scale
