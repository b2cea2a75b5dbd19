"""Leading eigenvectors of large symmetric matrices, no more of them than are kept.

A full solution costs about 9 n^3 operations, whatever is kept of it. Subspace iteration costs 2 n^2
per vector and round: a random subspace, somewhat larger than asked for, is multiplied by the matrix
and made orthonormal again until what it captures of the trace no longer grows. Vectors near the cut
may then still be mixtures of those just inside and just outside of it. These have nearly equal
eigenvalues, so a codec loses nothing by that.
"""

from __future__ import annotations

import torch

SMALL = 2048
"""Up to this size everything is solved for: it takes a second or two."""
MOST_KEPT = 0.3
"""And where more than this part is kept: there a full solution is as fast."""
SPARE = 0.1
LEAST_SPARE = 32
MOST_ROUNDS = 24
ENOUGH = 2e-5
"""Growth of what is captured, relative to the trace, after which more rounds are no use."""


def leading(matrix: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues of a symmetric matrix without large negative ones, largest
    first, and their vectors in columns. In float32, which is several times faster; errors of that
    size only turn components of equal variance into each other."""
    size, count = len(matrix), min(count, len(matrix))
    if size <= SMALL or count > MOST_KEPT * size:
        values, vectors = torch.linalg.eigh(matrix.float())
        values, vectors = values[size - count :].flip(0), vectors[:, size - count :].flip(1)
    else:
        values, vectors = by_subspace(matrix.float(), count)
    return values.double(), vectors.double()


def by_subspace(matrix: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal for equal matrices: the first subspace is drawn with a seed."""
    size = len(matrix)
    width = min(size, count + max(LEAST_SPARE, int(SPARE * count)))
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(size, width, generator=generator).to(matrix)
    basis = torch.linalg.qr(matrix @ basis).Q
    trace, captured = matrix.diagonal().double().sum().clamp(min=1e-30), 0.0
    for _ in range(MOST_ROUNDS):
        image = matrix @ basis
        found = float((image * basis).sum(dtype=torch.float64) / trace)
        if found - captured < ENOUGH:
            break
        captured = found
        basis = torch.linalg.qr(image).Q
    values, turn = torch.linalg.eigh(basis.T @ (matrix @ basis))
    return values[width - count :].flip(0), basis @ turn[:, width - count :].flip(1)
