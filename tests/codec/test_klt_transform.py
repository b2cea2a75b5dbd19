"""The transform in 8 bits against the same in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kdn.codec.klt.transform import GroupTransform, int8_product, pack
from tests.codec.klt_profile import make_profile


@pytest.fixture(scope="module")
def transform(tiny: Any) -> GroupTransform:
    profile = make_profile(tiny.spec)
    return GroupTransform(profile.groups[0], profile)


def dense_basis(transform: GroupTransform) -> torch.Tensor:
    """[components, columns] in float64: what one unit of each component adds to the values."""
    g = transform.group
    coarse = g.basis.astype(np.float64) * g.basis_scale[:, None]
    return torch.from_numpy(np.concatenate([g.fine.astype(np.float64), coarse]) / g.weight)


def test_analysis_finds_what_synthesis_made(transform: GroupTransform) -> None:
    basis = dense_basis(transform)
    generator = torch.Generator().manual_seed(2)
    components = torch.randn(len(basis), 40, generator=generator, dtype=torch.float64)
    components[: transform.num_large] *= 50  # as large ones are: they are taken away first
    found, rest = transform.analyse((basis.T @ components).float())
    # The others are found to within the rounding of inputs and rows to 8 bits.
    torch.testing.assert_close(
        found[: transform.num_large].double(), components[: transform.num_large], rtol=0, atol=0.2
    )
    assert (found.double() - components).square().mean().sqrt() < 0.05
    explained = (
        dense_basis(transform)[: transform.num_large].T @ found[: transform.num_large].double()
    )
    torch.testing.assert_close(rest.double(), basis.T @ components - explained, rtol=0, atol=1e-3)


def test_integers_come_back_as_they_are_summed(transform: GroupTransform) -> None:
    basis, num_tokens = dense_basis(transform), 24
    rng = np.random.default_rng(4)
    values = rng.integers(-5, 6, (len(basis), num_tokens)).astype(np.int32)
    scales = rng.integers(0, 64, len(basis)).astype(np.uint8)
    shifts = rng.integers(-4, 5, num_tokens).astype(np.int8)
    centroids = rng.uniform(-0.3, 0.1, (64, 3)).astype(np.float32)
    steps = rng.uniform(0.5, 2, num_tokens).astype(np.float32)
    large = np.empty((transform.num_large, num_tokens), np.float32)
    codes = np.empty((len(basis) - len(large), num_tokens), np.int8)
    unit = np.empty(num_tokens, np.float32)
    pack(values, scales, shifts, centroids, steps, transform.group.basis_scale, large, codes, unit)
    exact = np.zeros(values.shape)
    for (c, t), q in np.ndenumerate(values):
        if q:
            found = np.clip(int(scales[c]) + int(shifts[t]), 0, 63)
            size = abs(q) + centroids[found, min(abs(q), 3) - 1]
            exact[c, t] = np.sign(q) * size * steps[t]
    np.testing.assert_allclose(large, exact[: len(large)], rtol=1e-6)
    # A code is off by at most half its unit.
    back = codes * unit / transform.group.basis_scale[:, None]
    bound = 0.5 * unit / transform.group.basis_scale[:, None] * 1.001
    assert (np.abs(back - exact[len(large) :]) <= bound).all()
    summed = transform.sum_coarse(codes).double().numpy()
    summed *= transform.column_scale[:, None].astype(np.float64) * unit
    expected = basis[len(large) :].numpy().T @ back
    np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-5)


def test_int8_product_is_exact_with_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.integers(-128, 128, (2, 48, 48)).astype(np.int8)
    wanted = left.astype(np.int64) @ right.astype(np.int64)
    given = torch.from_numpy(left), torch.from_numpy(right)
    assert (int8_product(*given).numpy() == wanted).all()
    monkeypatch.delattr(torch, "_int_mm")
    assert (int8_product(*given).numpy() == wanted).all()
