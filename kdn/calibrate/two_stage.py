"""The basis of a group in two stages (see codec/klt/stages.py), in closed form.

1. The largest components of the whole group have rows of their own, as with one stage.
2. Of what they leave, each layer's leading components: those of the layer's own block of the
   covariance, in its own block of the metric.
3. Across layers, the principal components within what all layers' leading ones span, in the
   group's metric, and orthogonal to the largest. They are found for rows as the profile stores
   them: what rounding does to rows, the components make up for.

A layer's leading components are turned by a fixed random rotation, which changes nothing of what
they span. Without it, the first of them are large and the others small, and so are the entries of
the matrix across layers: 8 bits would go to a few. Turned, all are about as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from kdn.calibrate import eigen
from kdn.calibrate.fit import Basis, Metric, fit_basis
from kdn.errors import UnsupportedError


@dataclass(frozen=True)
class StoredBasis:
    """As the profile stores it, under the names that a group's tensors have there, and the standard
    deviations of all components."""

    tensors: dict[str, npt.NDArray[Any]]
    deviation: torch.Tensor


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
    the others in one stage, or through the `leading` ones of each layer."""
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
    codes, scale = _layers_rows(left, metric, num_layers, leading)
    count = max(0, min(components, num_layers * leading) - len(fine.rows))
    rows, largest = codes * scale[:, :, None], _gained(fine.rows, metric)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of each layer [layers, leading, columns] in whole numbers, and their scales, from the
    covariance of weighted values in the metric."""
    weighted = metric.unapply_gain(metric.unapply_gain(left).T)
    gain = 2 * metric.gain + metric.gain.square()
    turn = _rotation(leading, left)
    found = []
    for own in layer_columns(num_layers, len(left)).to(left.device):
        directions = metric.directions[own]
        block = (directions * gain) @ directions.T
        block.diagonal().add_(1.0)
        values, vectors = torch.linalg.eigh(block)
        root = values.clamp(min=1e-9).sqrt()
        inside = vectors.T @ weighted[own][:, own] @ vectors
        _, principal = eigen.leading(_symmetric(root[:, None] * inside * root), leading)
        found.append(turn @ (principal.T / root) @ vectors.T)
    codes, scale = _rounded(torch.cat(found))
    return codes.view(num_layers, leading, -1), scale.view(num_layers, leading)


def _across(
    left: torch.Tensor, metric: Metric, rows: torch.Tensor, fine: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first principal components within the span of all layers' rows [layers, leading,
    columns], and orthogonal to fine ones: each as a sum of these rows [components, layers x
    leading], and their deviations, largest first."""
    num_layers, leading, _ = rows.shape
    spanned = torch.zeros((num_layers, leading, len(left)), dtype=left.dtype, device=left.device)
    for layer, own in enumerate(layer_columns(num_layers, len(left)).to(left.device)):
        spanned[layer][:, own] = rows[layer]
    spanned = _gained(spanned.view(num_layers * leading, -1), metric)
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
