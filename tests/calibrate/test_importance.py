"""Importance is learned as far as it helps tokens that it was not fitted on."""

from __future__ import annotations

import pytest
import torch

from kdn.calibrate import importance
from kdn.calibrate.importance import fit_importance


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Gains found on tokens kept out, one after the other."""
    found: list[float] = []
    measure = importance._gain

    def noted(*told: torch.Tensor) -> float:
        found.append(measure(*told))
        return found[-1]

    monkeypatch.setattr(importance, "_gain", noted)
    return found


def test_what_values_tell_is_learned(checks: list[float]) -> None:
    columns = torch.randn((4000, 16), generator=torch.Generator().manual_seed(0))
    found = fit_importance(columns, torch.exp(columns[:, 0]))
    assert found.gain == max(checks) > 1.05
    assert int(found.weight.abs().argmax()) == 0
    assert found.weight[0] > 0.05 * importance.TRUSTED


def test_what_is_learned_by_heart_is_not_kept(checks: list[float]) -> None:
    """Fewer tokens than columns, and nothing to learn: it ends long before the last step."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn((300, 600), generator=generator)
    found = fit_importance(columns, torch.exp(torch.randn(300, generator=generator)))
    assert found.gain == max(1.0, *checks)
    assert len(checks) < importance.STEPS // importance.CHECKED_EVERY // 2
    assert checks[-1] < found.gain
