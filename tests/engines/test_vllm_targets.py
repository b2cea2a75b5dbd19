"""Which layers are the model's: those of drafts are left alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kdn.engines.vllm.layout import Scales
from kdn.engines.vllm.targets import layers_in_order, scales_of
from kdn.errors import UnsupportedError

MODEL = [f"model.layers.{number}.self_attn.attn" for number in range(12)]
DRAFTS = {
    "eagle": ["model.layers.12.self_attn.attn"],
    "mtp": ["model.layers.12.mtp_block.self_attn.attn", "model.layers.13.mtp_block.self_attn.attn"],
    "mtp with a prefix": ["mtp.layers.0.self_attn.attn"],
    "a draft model": [f"draft_model.model.layers.{number}.self_attn.attn" for number in range(20)],
}


def test_layers_are_put_in_order() -> None:
    assert layers_in_order(reversed(MODEL), 12, has_drafts=False) == MODEL
    inner = [f"language_model.{name}" for name in MODEL]
    assert layers_in_order(reversed(inner), 12, has_drafts=False) == inner


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_drafts_are_ignored(drafts: list[str]) -> None:
    assert layers_in_order([*drafts, *reversed(MODEL)], 12, has_drafts=True) == MODEL
    with pytest.raises(UnsupportedError):  # nobody said that there are drafts
        layers_in_order([*drafts, *MODEL], 12, has_drafts=False)


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        MODEL[1:],
        [],
        [*MODEL, "encoder.attn"],
        [*MODEL, "other.layers.0.attn"],
        [*MODEL, "model.layers.0.cross_attn.attn"],
        [f"draft_model.{name}" for name in MODEL],
    ],
)
def test_what_is_no_whole_model_is_refused(names: list[str], has_drafts: bool) -> None:
    if not has_drafts and len(names) == 12:
        return  # a model whose layers are called so
    with pytest.raises(UnsupportedError):
        layers_in_order(names, 12, has_drafts=has_drafts)


def attention(keys: float, values: float, heads: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        _k_scale=torch.full((heads,), keys), _v_scale=torch.full((heads,), values),
        _k_scale_float=keys, _v_scale_float=values,
    )  # fmt: skip


def test_scales_of_an_fp8_cache() -> None:
    layers = [attention(1.0, 2.0), attention(0.5, 0.25)]
    assert scales_of(layers) == Scales((1.0, 0.5), (2.0, 0.25))
    with pytest.raises(UnsupportedError, match="each head"):
        scales_of([attention(1.0, 1.0, heads=4)])
