"""The transform in 8 bits against the same in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.codec.klt import Profile
from kdn.codec.klt.duals import Dual
from kdn.codec.klt.transform import GroupTransform, Latent, Predictor, int8_product, pack
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
    found, rest = transform.analyse((components.T @ basis).float(), Dual.of(transform.group))
    # The others are found to within the rounding of inputs and rows to 8 bits.
    torch.testing.assert_close(
        found[: transform.num_large].double(), components[: transform.num_large], rtol=0, atol=0.2
    )
    assert (found.double() - components).square().mean().sqrt() < 0.05
    explained = found[: transform.num_large].double().T @ basis[: transform.num_large]
    torch.testing.assert_close(rest.double(), components.T @ basis - explained, rtol=0, atol=1e-3)


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
    summed *= transform.column_scale.astype(np.float64) * unit[:, None]
    expected = back.T @ basis[len(large) :].numpy()
    np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-5)


def test_int8_product_is_exact_with_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.integers(-128, 128, (2, 48, 48)).astype(np.int8)
    wanted = left.astype(np.int64) @ right.astype(np.int64)
    given = torch.from_numpy(left), torch.from_numpy(right)
    assert (int8_product(*given).numpy() == wanted).all()
    monkeypatch.delattr(torch, "_int_mm")
    assert (int8_product(*given).numpy() == wanted).all()


def test_prediction_is_the_same_in_one_product_and_in_two(tiny: Any) -> None:
    """Readers sum what is precise of it together with large components, and the rest apart."""
    profile = make_profile(tiny.spec)
    transform, latent = GroupTransform(profile.groups[1], profile), sample_latent(profile)
    no_components = np.zeros((0, latent.fine.shape[1]), np.float32)
    columns = slice(3, 40)
    summed = transform.sum_large(latent, no_components, columns).numpy() + transform.bias[columns]
    rest = transform.sum_latent(latent, columns).numpy()
    summed += rest * latent.unit[:, None] * transform.latent_scale[columns]
    np.testing.assert_allclose(
        summed, transform.predict(latent).numpy()[:, columns], rtol=1e-4, atol=1e-4
    )


def test_latent_variables_follow_from_a_token_and_the_two_before(tiny: Any) -> None:
    profile = make_profile(tiny.spec)
    t = profile.tensors
    ids = np.arange(5, 21)
    table, mix = t["embed.codes"].astype(np.float64), t["predict.mix"].astype(np.float64)
    zero = np.zeros(table.shape[1])
    inputs = [
        np.concatenate([table[ids[i - back]] if i >= back else zero for back in range(3)])
        for i in range(len(ids))
    ]
    wanted = (np.array(inputs) @ mix * t["predict.mix_scale"]).T
    found = sample_latent(profile, ids)
    np.testing.assert_allclose(found.fine, wanted[: len(found.fine)], rtol=1e-5)
    error = np.abs(found.codes.numpy() * found.unit - wanted[len(found.fine) :])
    assert (error <= 0.5001 * found.unit).all()
    assert (found.unit > 0).all()


def sample_latent(profile: Profile, ids: npt.NDArray[np.int64] | None = None) -> Latent:
    ids = np.arange(16) if ids is None else ids
    namespace = Namespace(bytes.fromhex(profile.meta["model"]), profile.profile_id)
    return Predictor(profile)(cut(ids, namespace)[0])


@pytest.mark.parametrize("sizes", [(1, 3, 288), (1, 40, 2), (1, 257, 1), (7, 40, 1), (5, 1, 9)])
def test_products_of_single_rows_and_columns(sizes: tuple[int, int, int]) -> None:
    """Their strides may be anything: torch takes some for another matrix."""
    rows, inner, columns = sizes
    rng = torch.Generator().manual_seed(0)
    left = torch.randint(-128, 128, (rows, inner), generator=rng).to(torch.int8)
    right = torch.randint(-128, 128, (inner, columns), generator=rng).to(torch.int8)
    expected = (left.double() @ right.double()).to(torch.int32)
    lefts, rights = ([one, one.T.clone().T, odd(one)] for one in (left, right))
    for a in lefts:
        for b in rights:
            assert torch.equal(int8_product(a, b), expected), (a.stride(), b.stride())


def odd(matrix: torch.Tensor) -> torch.Tensor:
    """The same with strides of 1 where a size is 1."""
    flat = matrix.contiguous().flatten()
    strides = (1 if matrix.shape[0] == 1 else matrix.shape[1], 1)
    return flat.as_strided(matrix.shape, strides)
