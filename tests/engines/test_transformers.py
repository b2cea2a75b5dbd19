"""Specs of tiny models of each family, refusals by name, and exact round trips of their caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdn.cache.fingerprint import canonical_settings, fingerprint
from kdn.cache.tensors import KVCache
from kdn.engines.transformers import (
    fingerprint_of,
    from_dynamic_cache,
    settings_of,
    spec_of,
    to_dynamic_cache,
)
from kdn.errors import MismatchError, UnsupportedError

WINDOW = 16
MIXED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": WINDOW}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
QWEN2_WINDOWS = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW}

# family: settings, (kv heads, head size), rotary size, pairs are neighbours, windows
ALL = (None,) * 4
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, int], int, bool, tuple[int | None, ...]]]
FAMILIES = {
    "llama": ("llama", {}, (2, 16), 16, False, ALL),
    "llama MHA": ("llama", {"num_key_value_heads": 4}, (4, 16), 16, False, ALL),
    "llama MQA": ("llama", {"num_key_value_heads": 1, "head_dim": 10}, (1, 10), 10, False, ALL),
    "llama yarn": ("llama", {"rope_parameters": YARN}, (2, 16), 16, False, ALL),
    "qwen2": ("qwen2", {}, (2, 16), 16, False, ALL),
    "qwen2 windows": ("qwen2", QWEN2_WINDOWS, (2, 16), 16, False, (None, None, WINDOW, WINDOW)),
    "qwen3": ("qwen3", {"head_dim": 24}, (2, 24), 24, False, ALL),
    "mistral": ("mistral", {"sliding_window": WINDOW}, (2, 16), 16, False, (WINDOW,) * 4),
    "mistral full": ("mistral", {"sliding_window": None}, (2, 16), 16, False, ALL),
    "mixtral": ("mixtral", MOE, (2, 16), 16, False, ALL),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": WINDOW},
        (2, 32),
        32,
        False,
        (WINDOW, None, WINDOW, None),
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, **MIXED},
        (2, 32),
        32,
        False,
        (WINDOW, WINDOW, WINDOW, None),
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5}, (2, 16), 8, False, ALL),
    "phi3": ("phi3", {"sliding_window": None}, (2, 16), 16, False, ALL),
    "gpt_neox": ("gpt_neox", {}, (4, 16), 4, False, ALL),
    "glm": ("glm", {"head_dim": 16}, (2, 16), 8, True, ALL),
    "cohere": ("cohere", {}, (2, 16), 16, True, ALL),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": WINDOW, "rope_parameters": YARN, **MOE},
        (2, 16),
        16,
        False,
        (WINDOW, None, WINDOW, None),
    ),
    "gpt2": ("gpt2", GPT2, (4, 16), 0, False, ALL),
    "gptj": ("gptj", {"rotary_dim": 8, **GPT2}, (4, 16), 8, True, ALL),
    "nanochat": ("nanochat", {}, (2, 16), 16, False, ALL),
    "bloom": ("bloom", {"n_layer": 4, "n_head": 4}, (4, 16), 0, False, ALL),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_spec(family: str, tiny_model: Any) -> None:
    name, settings, shape, rotary_dim, interleaved, windows = FAMILIES[family]
    model = tiny_model(name, **settings)
    spec = spec_of(model)
    assert spec.num_layers == 4
    assert (spec.num_kv_heads, spec.head_dim) == shape
    assert spec.vocab_size == 128
    assert spec.windows == windows
    assert spec.values_per_token == 2 * 4 * shape[0] * shape[1]
    for rope in spec.ropes:
        assert (rope.rotary_dim if rope else 0) == rotary_dim
        assert (rope.interleaved if rope else False) == interleaved
    assert spec_of(model) == spec


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_continues_bit_identically(family: str, tiny_model: Any) -> None:
    """Before, at and beyond the window; then several tokens, one at a time and together."""
    name, settings, *_ = FAMILIES[family]
    model = tiny_model(name, **settings)
    tokens = torch.randint(3, 128, (1, 64), generator=torch.Generator().manual_seed(2))
    for length in (5, WINDOW - 1, WINDOW, WINDOW + 1, 50):
        own = read(model, tokens[:, :length])
        copied = to_dynamic_cache(from_dynamic_cache(own), model.config)
        place = length
        for step in (1, 1, 5, 1):
            part = tokens[:, place : place + step]
            with torch.no_grad():
                expected = model(part, past_key_values=own, use_cache=True).logits
                found = model(part, past_key_values=copied, use_cache=True).logits
            assert torch.equal(found, expected), f"after {place} tokens"
            place += step


def read(model: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(tokens, use_cache=True).past_key_values


def test_ropes_per_layer(tiny_model: Any) -> None:
    gemma3 = spec_of(tiny_model("gemma3_text", head_dim=32, **MIXED)).ropes
    assert gemma3[0] == gemma3[1] == gemma3[2] != gemma3[3]
    no_rope = [rope is None for rope in spec_of(tiny_model("smollm3")).ropes]
    assert no_rope == [False, False, False, True]


def test_amplitude_of_yarn(tiny_model: Any) -> None:
    rope = spec_of(tiny_model("llama", rope_parameters=YARN)).ropes[0]
    assert rope is not None
    assert rope.amplitude == pytest.approx(1.2079, abs=1e-4)  # 0.1 ln 8 + 1


def test_scaling_changes_frequencies_and_fingerprint(tiny_model: Any) -> None:
    kinds = [{"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, YARN]
    specs = [spec_of(tiny_model("llama"))]
    specs += [spec_of(tiny_model("llama", rope_parameters=kind)) for kind in kinds]
    assert len({spec.ropes for spec in specs}) == 3
    assert len({spec.fingerprint for spec in specs}) == 3


def test_dropout_and_training_mode_do_not_disturb(tiny_model: Any) -> None:
    model = tiny_model("gpt2", **GPT2)
    expected = spec_of(model)
    model.train()
    assert spec_of(model) == expected
    assert model.training


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mamba", {}, "keeps no key-value cache"),
        ("recurrent_gemma", {}, "keeps no key-value cache"),
        ("hunyuan_v1_dense", {"head_dim": 16}, "not plain RoPE"),
        (
            "gemma4_text",
            {"head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 128, **MIXED},
            "equal in all layers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(
    family: str, settings: dict[str, Any], reason: str, tiny_model: Any
) -> None:
    if "rope_parameters" in settings:
        rope = {"rope_theta": 10000.0, **settings["rope_parameters"]}
        settings = {**settings, "rope_parameters": rope}
    with pytest.raises(UnsupportedError, match=reason):
        spec_of(tiny_model(family, **settings))


def test_encoder_decoders_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes))
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        spec_of(model)


def test_rounded_frequencies_are_refused(tiny_model: Any) -> None:
    """model.to(dtype) rounds them, loading with dtype=... does not: other keys, same weights."""
    with pytest.raises(UnsupportedError, match="not float32"):
        spec_of(tiny_model("llama").to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere", "gpt_oss"])
def test_spec_does_not_depend_on_the_dtype(
    family: str, dtype: torch.dtype, tiny_model: Any, tmp_path: Any
) -> None:
    name, settings, *_ = FAMILIES[family]
    model = tiny_model(name, **settings)
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.bfloat16())  # as most checkpoints are
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    assert spec_of(loaded) == spec_of(model)


def test_fingerprint_names_tied_weights_once(tiny_model: Any, tmp_path: Any) -> None:
    """So a checkpoint, which stores them once, has the same."""
    from safetensors.torch import load_file

    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    found = fingerprint(settings_of(model.config), stored.items())
    assert found == fingerprint_of(model)


def test_fingerprint_sees_a_fine_tune_and_a_setting(tiny_model: Any) -> None:
    model = tiny_model("mistral", sliding_window=WINDOW)
    before = fingerprint_of(model)
    assert fingerprint_of(tiny_model("mistral", sliding_window=WINDOW + 1)) != before
    assert fingerprint_of(tiny_model("mistral", sliding_window=WINDOW, rms_norm_eps=1e-3)) != before
    model.model.layers[2].mlp.up_proj.weight.data *= 1.01
    assert fingerprint_of(model) != before


# Settings that change keys and values and no weight, each of a family that has it.
VALUES: dict[str, tuple[str, Any]] = {
    "norm_topk_prob": ("qwen3_moe", True),
    "num_experts_per_tok": ("qwen3_moe", 3),
    "clip_qkv": ("olmo", 0.5),
    "routed_scaling_factor": ("glm4_moe", 1.5),
    "key_multiplier": ("falcon_h1", 0.5),
    "attn_logit_softcapping": ("gemma2", None),
    "residual_multiplier": ("granite", 0.3),
    "attention_bias": ("llama", True),
    "unheard_of": ("llama", 1),
}


@pytest.mark.parametrize("name", VALUES)
def test_settings_that_change_values_count(name: str) -> None:
    from transformers import CONFIG_MAPPING

    family, value = VALUES[name]
    config, other = CONFIG_MAPPING[family](), CONFIG_MAPPING[family](**{name: value})
    assert getattr(other, name) == value
    one, two = (canonical_settings(settings_of(one)) for one in (config, other))
    assert one != two


def test_a_setting_of_a_loaded_model_counts(tiny_model: Any) -> None:
    clips = [fingerprint_of(tiny_model("olmo", clip_qkv=clip)) for clip in (None, 0.5, 1.0)]
    assert len(set(clips)) == 3


def test_settings_of_parts_count() -> None:
    from transformers import CONFIG_MAPPING

    def composed(**text: Any) -> bytes:
        return canonical_settings(settings_of(CONFIG_MAPPING["gemma3"](text_config=text)))

    assert composed() == composed(use_cache=False, rms_norm_eps=1e-6)
    assert composed() != composed(rms_norm_eps=1e-3)


def test_settings_that_users_change_do_not_count(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = fingerprint_of(model)
    model.config.use_cache = False
    model.config.pad_token_id = model.config.eos_token_id = 5
    model.config._name_or_path = "elsewhere"
    model.config.dtype = torch.bfloat16
    assert fingerprint_of(model) == before


def test_the_padding_counts_where_positions_begin_after_it() -> None:
    from transformers import CONFIG_MAPPING

    one, two = (settings_of(CONFIG_MAPPING["xglm"](pad_token_id=pad)) for pad in (1, 2))
    assert one != two


def test_layout(tiny_model: Any) -> None:
    past = read(tiny_model("llama"), torch.arange(3, 40)[None])
    cache = from_dynamic_cache(past, start=5)
    assert tuple(cache.keys.shape) == (4, 37, 2, 16)
    assert (cache.start, cache.end) == (5, 42)
    assert cache.is_complete
    assert torch.equal(cache.keys[3, 7, 1], past.layers[3].keys[0, 1, 7])
    assert torch.equal(cache.values[0, 30, 0], past.layers[0].values[0, 0, 30])


def test_a_window_layer_lacks_its_old_tokens(tiny_model: Any) -> None:
    past = read(tiny_model("gemma3_text", head_dim=32, **MIXED), torch.arange(3, 53)[None])
    cache = from_dynamic_cache(past)
    assert cache.valid_from == (35, 35, 35, 0)  # 50 tokens, of which the last 15 are kept
    assert not cache.keys[:3, :35].any()
    assert cache.keys[:3, 35:].any(-1).all()
    assert cache.keys[3].any(-1).all()


def test_a_batch_is_refused(tiny_model: Any) -> None:
    past = read(tiny_model("llama"), torch.arange(3, 23).reshape(2, 10))
    with pytest.raises(UnsupportedError, match="one sequence"):
        from_dynamic_cache(past)


def test_an_empty_or_foreign_cache_is_refused(tiny_model: Any) -> None:
    from transformers import DynamicCache, StaticCache

    config = tiny_model("llama").config
    for past in (DynamicCache(), DynamicCache(config=config), StaticCache(config, 8)):
        with pytest.raises(UnsupportedError):
            from_dynamic_cache(past)


def test_what_the_model_could_not_continue_is_refused(tiny_model: Any) -> None:
    model = tiny_model("gemma3_text", head_dim=32, **MIXED)
    cache = from_dynamic_cache(read(model, torch.arange(3, 53)[None]))
    with pytest.raises(MismatchError, match="start at position 0"):
        to_dynamic_cache(cache.slice(16, 50), model.config)
    with pytest.raises(MismatchError, match="4 layers"):
        to_dynamic_cache(KVCache(cache.keys[:2], cache.values[:2]), model.config)
    # The windows end at token 50; after 40 tokens they would have to reach further back.
    with pytest.raises(MismatchError, match="layer 0 needs the tokens from 25 on"):
        to_dynamic_cache(cache.slice(0, 40), model.config)
    lacking = KVCache(cache.keys, cache.values, 0, (35, 35, 35, 1))
    with pytest.raises(MismatchError, match="layer 3 needs the tokens from 0 on"):
        to_dynamic_cache(lacking, model.config)
