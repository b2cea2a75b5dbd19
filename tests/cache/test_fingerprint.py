"""A fingerprint tells trainings apart and nothing else; its bytes may never change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdn.cache.fingerprint import CONFIG_FIELDS, fingerprint
from kdn.errors import MismatchError, UnsupportedError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "windows": [None, 128],
}


def weights() -> dict[str, torch.Tensor]:
    """Exact in bfloat16, from large to too small for float16, as checkpoints are."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(37, 11, generator=generator).bfloat16().float()
    tiny = (torch.randn(300, generator=generator) * 1e-6).bfloat16().float()
    return {"a.weight": matrix, "a.bias": tiny, "b.scale": torch.tensor(2.5)}


def digest(config: dict[str, Any] | None = None, **changes: torch.Tensor) -> str:
    named = {**weights(), **{k.replace("_", "."): v for k, v in changes.items()}}
    return fingerprint(config or CONFIG, named.items()).hex()


def test_golden() -> None:
    assert digest() == "14db27f3c14a97765e0bd753728aef46"


def test_order_does_not_matter() -> None:
    backwards = reversed(list(weights().items()))
    config = dict(reversed(CONFIG.items()))
    assert fingerprint(config, backwards).hex() == digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_does_not_matter(dtype: torch.dtype) -> None:
    named = ((name, tensor.to(dtype)) for name, tensor in weights().items())
    assert fingerprint(CONFIG, named).hex() == digest()


def test_memory_layout_does_not_matter() -> None:
    matrix = weights()["a.weight"]
    assert digest(a_weight=matrix.t().contiguous().t()) == digest()
    assert digest(a_weight=torch.nn.Parameter(matrix)) == digest()


def test_unset_and_unrelated_settings_do_not_matter() -> None:
    assert digest({**CONFIG, "sampling": 3, "hidden_act": None}) == digest()
    assert digest({**CONFIG, "windows": (None, 128)}) == digest()
    theta = {"rope_type": "default", "rope_theta": 10000, "factor": None}
    assert digest({**CONFIG, "rope_parameters": theta}) == digest()


def test_a_small_change_of_the_weights_matters() -> None:
    """As a merged fine-tune makes: a little of everything."""
    matrix = weights()["a.weight"]
    assert digest(a_weight=matrix * 1.01) != digest()
    assert digest(a_weight=matrix.t()) != digest()
    assert digest(b_scale=torch.tensor(2.6)) != digest()
    assert digest(c_weight=matrix) != digest()


def test_first_and_last_elements_are_seen() -> None:
    for place in (0, -1):
        matrix = weights()["a.weight"].clone()
        matrix.view(-1)[place] += 1
        assert digest(a_weight=matrix) != digest()


def test_names_count() -> None:
    swapped = {"x.weight" if k == "a.weight" else k: v for k, v in weights().items()}
    assert fingerprint(CONFIG, swapped.items()).hex() != digest()


@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_every_listed_setting_matters(field: str) -> None:
    assert digest({**CONFIG, field: "other"}) != digest()


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(MismatchError, match="twice"):
        fingerprint(CONFIG, [("a", torch.zeros(2)), ("a", torch.zeros(2))])


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not in memory"):
        fingerprint(CONFIG, [("a", torch.zeros(2, device="meta"))])


def test_no_elements_at_all() -> None:
    assert fingerprint(CONFIG, [("a", torch.zeros(0, 4))]) != fingerprint(CONFIG, [])
