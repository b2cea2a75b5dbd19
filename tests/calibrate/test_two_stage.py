"""The fit of two stages against that of one, and calibration with it from end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kdn.calibrate.fit import Metric, fit_basis
from kdn.calibrate.run import calibrate
from kdn.calibrate.two_stage import StoredBasis, fit_stages, layer_columns, shares
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.duals import dense_rows
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.calibrate.test_run import OPTIONS, windows

LAYERS, PER_LAYER, SHARED = 4, 24, 12
COLUMNS = LAYERS * PER_LAYER


def shared_covariance() -> torch.Tensor:
    """Layers that are read off `SHARED` common variables, and noise of their own."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(1, -1, SHARED, dtype=torch.float64)
    mix = torch.randn((SHARED, COLUMNS), generator=generator).double() * sizes[:, None]
    return mix.T @ mix + 0.01 * torch.eye(COLUMNS, dtype=torch.float64)


def some_metric() -> Metric:
    generator = torch.Generator().manual_seed(1)
    directions = torch.linalg.qr(torch.randn((COLUMNS, 5), generator=generator).double())[0]
    weight = torch.rand(COLUMNS, generator=generator).double() + 0.5
    gain = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    return Metric(weight, directions, gain)


def fitted(leading: int, components: int = 40, fine: int = 4) -> StoredBasis:
    return fit_stages(
        shared_covariance(), some_metric(), num_layers=LAYERS, leading=leading,
        components=components, fine_components=fine,
    )  # fmt: skip


def measured(found: StoredBasis) -> torch.Tensor:
    """Rows in the metric: those of an exact fit are orthonormal."""
    rows = dense_rows(found.tensors, torch.device("cpu"), found.leading).double()
    metric = some_metric()
    return rows + ((rows @ metric.directions) * metric.gain) @ metric.directions.T


def captured(found: StoredBasis) -> float:
    """Part of the variance, in the metric, that the span of all rows has."""
    metric = some_metric()
    seen = metric.apply(metric.apply(shared_covariance()).T)
    basis = torch.linalg.qr(measured(found).T)[0]
    return float((basis.T @ seen @ basis).trace() / seen.trace())


def test_components_are_orthonormal_in_the_metric() -> None:
    rows = measured(fitted(16, components=60))
    gram = rows @ rows.T
    torch.testing.assert_close(gram, torch.eye(len(rows), dtype=torch.float64), rtol=0, atol=0.05)


def test_deviations_are_those_of_what_was_found() -> None:
    metric, found = some_metric(), fitted(16)
    seen = metric.apply(metric.apply(shared_covariance()).T)
    rows = measured(found)
    variance = (rows @ seen @ rows.T).diagonal()[:4]
    torch.testing.assert_close(found.deviation[:4], variance.sqrt(), rtol=0.02, atol=0)
    assert (found.deviation[4:].diff() <= 1e-6).all()


def test_leading_components_of_all_columns_lose_nothing() -> None:
    """With as many as a layer has columns, both stages span what one does."""
    metric = some_metric()
    one = fit_basis(shared_covariance(), metric, 40)
    two = fitted(PER_LAYER)
    torch.testing.assert_close(two.deviation[:16], one.deviation[:16], rtol=0.02, atol=1e-3)
    assert captured(two) > captured(fitted(0)) - 1e-3


def test_fewer_leading_components_lose_more() -> None:
    lost = [1 - captured(fitted(k, components=20)) for k in (PER_LAYER, 8, 5)]
    assert lost == sorted(lost)
    assert lost[-1] > 1.5 * lost[0]


def test_layers_that_vary_more_have_more_leading_components() -> None:
    few, many = [8.0, 1, 0.1, 0.1, 0.1, 0.1], [7.0, 6, 5, 4, 3, 0.2]
    assert shares(torch.tensor([few, many]), 6) == [1, 5]
    assert shares(torch.tensor([few, many]), 8) == [2, 6]
    assert shares(torch.tensor([few, [0.0] * 6]), 4) == [3, 1]  # none is left without
    assert sum(shares(torch.rand(5, 64).sort(descending=True)[0], 5 * 32)) == 5 * 32


def test_many_leading_components_come_in_whole_runs() -> None:
    falling = torch.logspace(0, -4, 64)
    found = shares(torch.stack([falling, falling * 3, falling * 10]), 3 * 40)
    assert sum(found) == 3 * 40
    assert all(count % 8 == 0 for count in found)
    assert found[0] < found[1] < found[2]


def test_layers_find_their_own_columns() -> None:
    """As profiles order them: keys of all layers, then values of all."""
    found = layer_columns(3, 12)
    assert found.tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_more_leading_components_than_columns_are_refused() -> None:
    for leading in (-1, PER_LAYER + 1):
        with pytest.raises(UnsupportedError, match="leading"):
            fitted(leading)


@pytest.fixture(scope="module", autouse=True)
def _hasty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.importance.STEPS", 150)
        yield


def test_steps_are_not_made_finer_than_the_basis_is_worth(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights need nearly all components: with fewer, no step comes to the divergence."""
    monkeypatch.setattr("kdn.calibrate.steps.Steps.count", stop)
    with pytest.raises(Stopped) as stopped:
        calibrate(tiny_model("llama"), windows(8), replace(OPTIONS, group_layers=4, leading=48))
    assert stopped.value.args[0] > 1e-3


class Stopped(Exception):
    """With the step that was found."""


def stop(_: object, meta: dict[str, Any], *__: object) -> None:
    raise Stopped(meta["finest_step"])


def test_a_model_is_calibrated_in_two_stages(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    found = calibrate(model, windows(9), replace(OPTIONS, group_layers=4, leading=64))
    assert found.meta["version"] == 7
    assert len(found.meta["leading"][0]) == 4
    assert sum(found.meta["leading"][0]) == 4 * 64
    KltCodec(spec_of(model), Profile.from_bytes(found.to_bytes()))
    klds = [level["kld"] for level in found.meta["expected"]]
    assert klds == sorted(klds, reverse=True)
    assert OPTIONS.middle_kld / 2 < klds[-3] < 2 * OPTIONS.middle_kld
    assert klds[-2] < OPTIONS.middle_kld
    assert klds[-1] < 2 * OPTIONS.finest_kld


def test_components_beyond_those_that_are_coded_have_means(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    options = replace(OPTIONS, group_layers=4, leading=64, components=40, mean_components=60)
    found = calibrate(model, windows(9), options)
    coded = [row[0] for row in found.meta["num_components"][:-1]]
    assert max(coded) <= 40 < len(found.groups[0].scale) <= 100
    every = len(found.groups[0].scale)
    means = [found.num_means(level, 0) for level in range(found.num_levels)]
    assert means == [*(every - own for own in coded), 0]
    klds = [level["kld"] for level in found.meta["expected"]]
    assert klds == sorted(klds, reverse=True)
