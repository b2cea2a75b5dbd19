"""A spec read from files equals that of the loaded model, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.engines.transformers import spec_of
from kdn.errors import FormatError, ModelUnavailableError, UnsupportedError
from tests.engines import family_models

WINDOW = 16
MIXED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": WINDOW}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": WINDOW}),
    "gemma3": ("gemma3_text", {"head_dim": 32, **MIXED}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": None}),
    "llama MHA": ("llama", {"num_key_value_heads": 4}),
    "glm": ("glm", {"head_dim": 16}),
    "cohere": ("cohere", {}),
    "smollm3": ("smollm3", {}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "granite": ("granite", {"residual_multiplier": 0.5}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_loaded_model(family: str, tiny_model: Any, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    model = tiny_model(name, **settings)
    model.save_pretrained(tmp_path)
    assert spec_of_checkpoint(tmp_path) == spec_of(model)


def test_another_setting_is_another_model(tiny_model: Any, tmp_path: Path) -> None:
    found = set()
    for clip in (None, 1.0, 2.0):
        tiny_model("olmo", clip_qkv=clip).save_pretrained(tmp_path)
        found.add(spec_of_checkpoint(tmp_path).fingerprint)
    assert len(found) == 3


def test_weights_are_read_once(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdn.engines import checkpoint, remembered

    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "SETTLED_S", -1.0)
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    first = spec_of_checkpoint(tmp_path / "model")
    monkeypatch.setattr(checkpoint, "fingerprint", lambda *_: pytest.fail("read again"))
    assert spec_of_checkpoint(tmp_path / "model") == first == spec_of(model)
    # What else decides is not forgotten over it: the rounding, a setting, the files.
    for dtype, changed in ((torch.float16, None), (torch.float32, {"rms_norm_eps": 0.1})):
        config = type(model.config)(**{**model.config.to_dict(), **(changed or {})})
        with pytest.raises(pytest.fail.Exception, match="read again"):
            spec_of_checkpoint(tmp_path / "model", dtype, config)
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(pytest.fail.Exception, match="read again"):
        spec_of_checkpoint(tmp_path / "model")


@pytest.mark.model
def test_equals_the_real_model(smollm2: tuple[Any, Any]) -> None:
    from kdn.engines.models import smollm2_folder

    assert spec_of_checkpoint(smollm2_folder()) == spec_of(smollm2[0])


def test_shards_and_a_tied_weight_that_is_stored_twice(tiny_model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert spec_of_checkpoint(tmp_path / "shards") == spec_of(model)
    model.save_pretrained(tmp_path / "twice")
    path = tmp_path / "twice" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert spec_of_checkpoint(tmp_path / "twice") == spec_of(model)


def test_another_weight_is_another_model(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    before = spec_of_checkpoint(tmp_path).fingerprint
    model.model.layers[2].mlp.up_proj.weight.data *= 1.01
    model.save_pretrained(tmp_path)
    assert spec_of_checkpoint(tmp_path).fingerprint != before


def test_rounding_on_loading_counts(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
        assert spec_of_checkpoint(tmp_path, dtype) == spec_of(loaded)


def test_a_form_of_its_own_has_a_name_of_its_own(
    tiny_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {f"packed.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    assert spec_of_checkpoint(tmp_path).fingerprint != spec_of(model).fingerprint
    assert "not shared" in caplog.text


def test_what_is_missing_or_broken_is_named(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="configuration"):
        spec_of_checkpoint(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FormatError, match="safetensors"):
        spec_of_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(ModelUnavailableError, match="no safetensors"):
        spec_of_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("no JSON", "[]", '{"weight_map": [3]}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        with pytest.raises(FormatError, match="files of weights"):
            spec_of_checkpoint(tmp_path)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelUnavailableError, match="gone"):
        spec_of_checkpoint(tmp_path)


def test_refused_before_anything_is_read(tiny_model: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny_model("llama", rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="dynamic NTK"):
        spec_of_checkpoint(tmp_path)
    family_models.build("qwen3_next").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="'linear_attention' are not supported"):
        spec_of_checkpoint(tmp_path)


def test_a_model_that_must_run_to_tell_its_shape(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model("gpt2", n_embd=64, n_layer=4, n_head=4, n_positions=256).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel"):
        spec_of_checkpoint(tmp_path)
