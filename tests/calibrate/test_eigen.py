"""Subspace iteration beside the full solution; sums in blocks beside plain products."""

from __future__ import annotations

import pytest
import torch

from kdn.calibrate import eigen, moments
from kdn.calibrate.eigen import by_subspace, leading

SIZE, COUNT = 700, 90


def covariance(kind: str) -> torch.Tensor:
    """Spectra as they occur: of residuals, which fall by powers, and of the Fisher information, a
    few directions above a floor."""
    generator = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)).Q
    index = torch.arange(1, SIZE + 1, dtype=torch.float64)
    values = 1e4 * index**-1.5 if kind == "residuals" else 0.7 + 40 * torch.exp(-index / 30)
    return turn * values @ turn.T


@pytest.mark.parametrize("kind", ["residuals", "fisher"])
def test_captures_what_the_full_solution_does(kind: str) -> None:
    matrix = covariance(kind)
    values, vectors = by_subspace(matrix.float(), COUNT)
    full = torch.linalg.eigvalsh(matrix).flip(0)[:COUNT]
    vectors = vectors.double()
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(COUNT).double(), atol=1e-5, rtol=0)
    captured = (vectors * (matrix @ vectors)).sum()
    assert captured > 0.9995 * full.sum()
    assert captured < 1.00001 * full.sum()
    torch.testing.assert_close(values.double()[: COUNT // 2], full[: COUNT // 2], rtol=2e-3, atol=0)
    assert (values[:-1] >= values[1:]).all()


def test_small_matrices_are_solved_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = covariance("residuals")
    values, vectors = leading(matrix, COUNT)
    torch.testing.assert_close(matrix @ vectors, vectors * values, atol=0.05, rtol=0)
    full = torch.linalg.eigvalsh(matrix).flip(0)[:COUNT]
    torch.testing.assert_close(values, full, rtol=1e-3, atol=0)
    monkeypatch.setattr(eigen, "SMALL", 100)
    assert not torch.equal(leading(matrix, COUNT)[0], values)
    torch.testing.assert_close(leading(matrix, COUNT)[0][:40], full[:40], rtol=2e-3, atol=0)
    assert len(leading(matrix, SIZE)[0]) == SIZE  # nearly all: in full as well
    assert [len(one) for one in leading(matrix, 0)] == [0, SIZE]


def test_equal_matrices_have_equal_solutions() -> None:
    matrix = covariance("fisher").float()
    for one, same in zip(by_subspace(matrix, 20), by_subspace(matrix, 20), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("block", [7, 16, 64])
def test_products_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(moments, "BLOCK_COLUMNS", block)
    rows = torch.randn(30, 37)
    total = torch.ones(37, 37, dtype=torch.float64)
    moments.add_products(total, rows)
    moments.add_products(total, rows)
    expected = 1 + 2 * (rows.double().T @ rows.double())
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
