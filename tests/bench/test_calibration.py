"""Rivals are fitted once: a second run reads back what the first one kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.bench.calibration import KVTC_RATIOS, Calibration
from kdn.cache.keys import TokenIds
from kdn.calibrate.corpus import Text
from kdn.engines.transformers import spec_of
from kdn.errors import FormatError


@pytest.fixture
def make(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Calibration, list[int]]]:
    """Calibrations of a tiny model, each with the lengths of the windows it really read."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path))
    model = tiny_model("llama")
    spec = spec_of(model)

    def build(seed: int = 0, num_tokens: int = 400) -> tuple[Calibration, list[int]]:
        tokens = np.random.default_rng(seed).integers(3, 128, 1_000).astype(np.uint32)
        read: list[int] = []

        def track(windows: Sequence[TokenIds]) -> Iterator[TokenIds]:
            for window in windows:
                read.append(len(window))
                yield window

        made = Calibration.of(
            model, spec, [(Text("t", ""), tokens)], window_tokens=200, num_tokens=num_tokens,
            seed=0, track=track,
        )  # fmt: skip
        return made, read

    return build


def test_fits_once_and_keeps_it(make: Any, tmp_path: Path) -> None:
    first, read = make()
    kvtc, cachegen = first.kvtc(), first.cachegen()
    assert read == [200, 200, 200, 200]
    assert kvtc.ratios == KVTC_RATIOS
    again, read = make()
    assert again.kvtc().keys.plans == kvtc.keys.plans
    assert again.cachegen().profile_id == cachegen.profile_id
    assert read == []
    assert len(list((tmp_path / "bench").iterdir())) == 2


@pytest.mark.parametrize("other", [{"seed": 1}, {"num_tokens": 600}])
def test_other_text_or_amount_is_fitted_anew(make: Any, other: dict[str, int]) -> None:
    first, _ = make()
    first.cachegen()
    second, read = make(**other)
    second.cachegen()
    assert read
    assert first.num_tokens == 400


def test_no_text_is_refused(make: Any) -> None:
    first, _ = make()
    with pytest.raises(FormatError, match="expected calibration text"):
        Calibration.of(
            first.model, first.spec, [(Text("e", ""), np.zeros(0, np.uint32))],
            window_tokens=200, num_tokens=400, seed=0,
        )  # fmt: skip
