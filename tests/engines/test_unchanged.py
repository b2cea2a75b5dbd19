"""A model that is not what it was is refused by name, however it was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdn.engines.transformers import fingerprint_of, spec_of
from kdn.engines.unchanged import OnDevice, Unchanged
from kdn.errors import MismatchError, UnsupportedError
from tests.engines.lora import attach

KINDS = ("stand-in", "peft")


def weight_of(model: Any) -> Any:
    return model.model.layers[2].mlp.up_proj.weight


def under_no_grad(model: Any) -> None:
    with torch.no_grad():
        weight_of(model)[3, 5] += 1e-3


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        weight_of(model)[3, 5] += 1e-3


def through_data(model: Any) -> None:
    weight_of(model).data *= 1.01


def one_row_through_data(model: Any) -> None:
    model.model.embed_tokens.weight.data[77] *= 1.01


def one_column_through_data(model: Any) -> None:
    weight_of(model).data[:, 40] *= 1.01


def other_data(model: Any) -> None:
    weight_of(model).data = weight_of(model).data.clone()


def a_norm_through_data(model: Any) -> None:
    model.model.norm.weight.data[9] += 1e-3


def trained(model: Any, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    tokens = torch.arange(9, device=model.device)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


def trained_fused(model: Any) -> None:
    trained(model, fused=True)


def loaded(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


def loaded_in_place_of_the_old(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def another_dtype(model: Any) -> None:
    model.bfloat16()


def another_module(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 96, bias=False).eval()


def one_module_less(model: Any) -> None:
    del model.model.layers[3]


def another_tokenizer(model: Any) -> None:
    model.resize_token_embeddings(130)


def training_mode(model: Any) -> None:
    model.train()


CHANGES: list[Callable[[Any], None]] = [
    under_no_grad,
    in_inference_mode,
    through_data,
    one_row_through_data,
    one_column_through_data,
    other_data,
    a_norm_through_data,
    trained,
    trained_fused,
    loaded,
    loaded_in_place_of_the_old,
    another_dtype,
    another_module,
    one_module_less,
    another_tokenizer,
    training_mode,
]


@pytest.mark.parametrize("change", CHANGES, ids=[one.__name__ for one in CHANGES])
def test_changes_are_seen(change: Callable[[Any], None], tiny_model: Any) -> None:
    model = tiny_model("llama")
    unchanged = Unchanged(model)
    unchanged.check()
    change(model)
    with pytest.raises(MismatchError, match=r"has changed since you connected|training mode"):
        unchanged.check()


def test_forward_hooks_are_refused(tiny_model: Any) -> None:
    """They steer a model, and leave its weights as they are."""
    model = tiny_model("llama")
    unchanged = Unchanged(model)
    hook = model.model.layers[1].register_forward_hook(lambda module, given, out: out)
    with pytest.raises(UnsupportedError, match="forward hook"):
        unchanged.check()
    with pytest.raises(UnsupportedError, match="forward hook"):
        Unchanged(model)
    hook.remove()
    unchanged.check()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_use_is_no_change(family: str, dtype: torch.dtype, tiny_model: Any) -> None:
    model = tiny_model(family).to(dtype)
    unchanged = Unchanged(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(torch.arange(3, 40)[None])
        unchanged.check()
    model.train()
    model.eval()
    unchanged.check()
    hook = model.register_forward_pre_hook(lambda *_: None)
    hook.remove()
    unchanged.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", [through_data, trained_fused, loaded, another_dtype])
def test_changes_on_a_gpu_are_seen(change: Callable[[Any], None], tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = fingerprint_of(model)
    model.to("cuda")
    assert fingerprint_of(model) == before
    unchanged = Unchanged(model)
    unchanged.check()
    change(model)
    with pytest.raises(MismatchError, match="has changed since you connected"):
        unchanged.check()


def test_what_a_gpu_compares_is_what_is_there_now() -> None:
    """The same comparison, of samples that happen to lie in main memory."""
    weights = torch.arange(12, dtype=torch.int16)
    samples = OnDevice([weights[::5], weights[3:4]])
    assert not samples.differ()()
    weights[1] = 99  # between the samples
    asked = samples.differ()
    assert not asked()
    weights[5] = 99
    assert samples.differ()()
    assert not asked()  # it tells of when it was asked


def test_weights_that_are_no_numbers_are_not_always_new(tiny_model: Any) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data[:] = float("nan")
    Unchanged(model).check()


def test_a_model_made_in_inference_mode_and_rows_that_lie_apart(tiny_model: Any) -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    unchanged = Unchanged(model)
    unchanged.check()
    layer.weight.data *= 1.01
    with pytest.raises(MismatchError, match="other values"):
        unchanged.check()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_refused_by_name(kind: str, tiny_model: Any) -> None:
    model = tiny_model("llama")
    unchanged = Unchanged(model)
    adapters = attach(kind, model)
    for named in (lambda: spec_of(adapters.model), lambda: Unchanged(adapters.model)):
        with pytest.raises(UnsupportedError, match="merge_and_unload"):
            named()
    for switch in (lambda: None, lambda: adapters.set_adapter("two"), adapters.disable):
        switch()
        with pytest.raises(UnsupportedError, match="has an adapter"):
            unchanged.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_is_another_model(kind: str, tiny_model: Any) -> None:
    """All modules and tensors are back in their places, and torch has counted no change."""
    model = tiny_model("llama")
    unchanged, before = Unchanged(model), spec_of(model)
    merged = attach(kind, model).merge_and_unload()
    assert merged is model
    with pytest.raises(MismatchError, match="other values"):
        unchanged.check()
    assert fingerprint_of(merged) != before.fingerprint
    Unchanged(merged).check()


def test_prompts_that_were_learned_are_refused(tiny_model: Any) -> None:
    """They change no module of the model: its cache begins with tokens of their own."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedError, match="PeftModel"):
        spec_of(peft.get_peft_model(tiny_model("llama"), config))


def test_adapters_that_transformers_attaches(tiny_model: Any) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = tiny_model("llama")
    unchanged = Unchanged(model)
    model.add_adapter(peft.LoraConfig(target_modules=["k_proj"]), adapter_name="one")
    with pytest.raises(UnsupportedError, match="has an adapter"):
        unchanged.check()
    model.disable_adapters()
    with pytest.raises(UnsupportedError, match="has an adapter"):
        spec_of(model)
