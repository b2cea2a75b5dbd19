"""A fingerprint tells trainings apart and nothing else; its bytes may never change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdn.cache.fingerprint import IGNORED_SETTINGS, PIECE_ELEMENTS, fingerprint
from kdn.errors import MismatchError, UnsupportedError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["full_attention", "sliding_attention"],
}
MATTERING = ["model_type", "rms_norm_eps", "norm_topk_prob", "clip_qkv", "routed_scaling_factor"]
MATTERING += ["key_multiplier", "attn_logit_softcapping", "top_k", "temperature", "of_the_future"]


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
    assert digest() == "7fa9acfbc8340ffaa9888f199c8214e5"


def test_order_does_not_matter() -> None:
    backwards = reversed(list(weights().items()))
    config = dict(reversed(CONFIG.items()))
    assert fingerprint(config, backwards).hex() == digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_does_not_matter(dtype: torch.dtype) -> None:
    named = ((name, tensor.to(dtype)) for name, tensor in weights().items())
    assert fingerprint(CONFIG, named).hex() == digest()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_it_lies_does_not_matter(dtype: torch.dtype) -> None:
    named = ((name, tensor.to("cuda", dtype)) for name, tensor in weights().items())
    assert fingerprint(CONFIG, named).hex() == digest()


def test_memory_layout_does_not_matter() -> None:
    matrix = weights()["a.weight"]
    assert digest(a_weight=matrix.t().contiguous().t()) == digest()
    assert digest(a_weight=torch.nn.Parameter(matrix)) == digest()


def test_how_settings_are_spelled_does_not_matter() -> None:
    theta = {"rope_type": "default", "rope_theta": 10000, "factor": None}
    assert digest({**CONFIG, "rope_parameters": theta}) == digest()
    layers = ("full_attention", "sliding_attention")
    assert digest({**CONFIG, "layer_types": layers}) == digest()


@pytest.mark.parametrize("name", sorted(IGNORED_SETTINGS))
def test_what_cannot_change_values_does_not_matter(name: str) -> None:
    assert digest({**CONFIG, name: "other"}) == digest()
    inner = {**CONFIG["rope_parameters"], name: "other"}
    assert digest({**CONFIG, "rope_parameters": inner}) == digest()


@pytest.mark.parametrize("name", MATTERING)
def test_every_other_setting_matters(name: str) -> None:
    others = [digest({**CONFIG, name: value}) for value in ("other", 0.5, None)]
    assert len({digest(), *others}) == 4


def test_a_small_change_of_the_weights_matters() -> None:
    """As a merged fine-tune makes: a little of everything."""
    matrix = weights()["a.weight"]
    assert digest(a_weight=matrix * 1.01) != digest()
    assert digest(a_weight=matrix.t()) != digest()
    assert digest(b_scale=torch.tensor(2.6)) != digest()
    assert digest(c_weight=matrix) != digest()


def test_every_element_counts() -> None:
    for place in (0, 1, 200, 405, -1):
        matrix = weights()["a.weight"].clone()
        matrix.view(-1)[place] += 1
        assert digest(a_weight=matrix) != digest()


def test_a_few_trained_embeddings_are_another_model() -> None:
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(49152, 64, generator=generator)
    assert embeddings.numel() > PIECE_ELEMENTS
    trained = embeddings.clone()
    trained[1000:1300] *= 1.5
    assert digest(c_weight=trained) != digest(c_weight=embeddings)
    last = embeddings.clone()
    last[-1, -1] += 1
    assert digest(c_weight=last) != digest(c_weight=embeddings)


def test_what_is_tiny_is_zero_in_every_dtype() -> None:
    """Also what bfloat16 rounds to the limit, or float16 away from it."""
    near = 2.0**-16 * (1 + torch.linspace(-0.02, 0.02, 2000))
    small = torch.cat([near, -near, torch.linspace(-1e-4, 1e-4, 3001)])
    assert digest(c_weight=small) == digest(c_weight=small.bfloat16())
    rounded = small.bfloat16()
    assert digest(c_weight=rounded) == digest(c_weight=rounded.half())
    assert digest(c_weight=torch.zeros(3)) == digest(c_weight=-torch.full((3,), 1e-6))


def test_quantised_weights_count_bit_by_bit() -> None:
    packed = torch.full((40,), 0x12345678, dtype=torch.int32)
    other = packed.clone()
    other[7] += 1
    scales = torch.full((8,), 100, dtype=torch.uint8)
    tensors = [packed, other, packed.view(torch.uint8), packed.float()]
    tensors += [scales, scales.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)]
    assert len({digest(c_weight=one) for one in tensors}) == len(tensors)


def test_names_count() -> None:
    swapped = {"x.weight" if k == "a.weight" else k: v for k, v in weights().items()}
    assert fingerprint(CONFIG, swapped.items()).hex() != digest()


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(MismatchError, match="twice"):
        fingerprint(CONFIG, [("a", torch.zeros(2)), ("a", torch.zeros(2))])


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not in memory"):
        fingerprint(CONFIG, [("a", torch.zeros(2, device="meta"))])


def test_no_elements_at_all() -> None:
    assert fingerprint(CONFIG, [("a", torch.zeros(0, 4))]) != fingerprint(CONFIG, [])
