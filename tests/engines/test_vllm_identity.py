"""Names: whatever changes a cache's values changes its chunks' keys, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kdn.cache.keys import Namespace
from kdn.engines.vllm.checks import (
    cache_dtype,
    check_blocks,
    check_config,
    check_weights,
)
from kdn.engines.vllm.identity import Identity, spec_of_model
from kdn.engines.vllm.settings import Settings
from kdn.errors import UnsupportedError


def request(**more: Any) -> Any:
    plain = {
        "mm_features": [], "prompt_embeds": None, "prompt_token_ids": [1], "cache_salt": None,
        "lora_request": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **more})


def adapter(folder: Path, value: float, name: str | None = None, number: int = 1) -> Any:
    folder.mkdir(exist_ok=True)
    save_file({"w": torch.full((4,), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4}')
    return lora(folder, name or folder.name, number)


def lora(folder: Path, name: str, number: int) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(folder), lora_int_id=number)


def test_salt_and_adapter(tmp_path: Path) -> None:
    identity = Identity(Namespace(b"m", b"p"))
    plain = identity.of(request()).root
    assert plain == Namespace(b"m", b"p").root
    assert identity.of(request(cache_salt="x")).root not in (plain, identity.of(request()))
    adapters = [
        adapter(tmp_path / "one", 1.0, number=1),
        adapter(tmp_path / "same", 1.0, number=2),
        adapter(tmp_path / "other", 2.0, number=3),
    ]
    one, same, other = (identity.of(request(lora_request=each)).root for each in adapters)
    assert one == same
    assert len({plain, one, other}) == 3
    assert identity.of(request(lora_request=adapters[0])).root == one


def test_an_adapter_trained_on_in_its_place_is_refused_for_good(tmp_path: Path) -> None:
    """vLLM keeps the weights that it loaded first, or those that it was told to load again: the
    files do not say which."""
    identity = Identity(Namespace(b"m", b"p"))
    first = adapter(tmp_path / "a", 1.0)
    before = (tmp_path / "a" / "adapter_model.safetensors").stat()
    named = identity.of(request(lora_request=first)).root
    again = adapter(tmp_path / "a", 2.0)
    # As a tool that copies times leaves it.
    os.utime(
        tmp_path / "a" / "adapter_model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns)
    )
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="a \\(1\\)"):
            identity.of(request(lora_request=again))
        adapter(tmp_path / "a", 1.0)  # the old values again, perhaps too late
    # vLLM's own prefix cache goes by the name, and so does an id that it knows.
    with pytest.raises(UnsupportedError):
        identity.of(request(lora_request=adapter(tmp_path / "a", 3.0, "a", number=2)))
    with pytest.raises(UnsupportedError):
        identity.of(request(lora_request=adapter(tmp_path / "b", 3.0, "b", number=1)))
    fresh = identity.of(request(lora_request=adapter(tmp_path / "c", 1.0, "c", number=3))).root
    assert fresh == named


def test_an_id_that_gets_another_adapter_is_refused(tmp_path: Path) -> None:
    """As long as vLLM has an id loaded, it does not look at the path."""
    identity = Identity(Namespace(b"m", b"p"))
    identity.of(request(lora_request=adapter(tmp_path / "a", 1.0, number=1)))
    with pytest.raises(UnsupportedError):
        identity.of(request(lora_request=adapter(tmp_path / "b", 2.0, number=1)))
    with pytest.raises(UnsupportedError):
        identity.of(request(lora_request=lora(tmp_path / "a", "a", 1)))


def test_an_adapter_whose_files_were_not_there_at_first(tmp_path: Path) -> None:
    """vLLM may have loaded others before."""
    identity = Identity(Namespace(b"m", b"p"))
    with pytest.raises(UnsupportedError):
        identity.of(request(lora_request=lora(tmp_path / "a", "a", 1)))
    with pytest.raises(UnsupportedError):
        identity.of(request(lora_request=adapter(tmp_path / "a", 1.0)))


def test_values_on_top_of_an_fp8_cache_have_names_of_their_own() -> None:
    """And those of an ordinary cache have the names they always had."""
    space = Namespace(b"m", b"p")
    assert Identity(space).of(request()) == space
    apart = Identity(space, is_fp8=True).of(request())
    assert apart.root != space.root
    assert apart.root == Identity(space, is_fp8=True).of(request()).root
    salted = Identity(space, is_fp8=True).of(request(cache_salt="s"))
    assert salted.root not in (apart.root, space.with_salt(b"s").root)


def test_what_has_no_name_is_refused(tmp_path: Path) -> None:
    identity = Identity(Namespace(b"m", b"p"))
    nowhere = lora(tmp_path / "nowhere", "a", 1)
    for odd in (
        request(mm_features=[object()]),
        request(prompt_embeds=object()),
        request(prompt_token_ids=None),
        request(lora_request=nowhere),
    ):
        with pytest.raises(UnsupportedError):
            identity.of(odd)


def config(**more: Any) -> Any:
    parallel = {"tensor_parallel_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **more.get("parallel", {})}),
        cache_config=SimpleNamespace(
            cache_dtype=more.get("cache_dtype", "auto"),
            calculate_kv_scales=more.get("calculate_kv_scales", False),
        ),
        speculative_config=more.get("speculative"),
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context"),
        ({"cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"cache_dtype": "fp8_per_token_head"}, "fp8_per_token_head"),
        ({"cache_dtype": "int8_per_token_head"}, "int8"),
        ({"cache_dtype": "nvfp4"}, "nvfp4"),
        ({"cache_dtype": "fp8", "calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"parallel": {"tensor_parallel_size": 2}}, "folder"),
    ],
)
def test_settings_of_vllm_that_are_refused(given: dict[str, Any], reason: str) -> None:
    settings = Settings.parse({"url": "/folder"})
    check_config(config(), settings)
    with pytest.raises(UnsupportedError, match=reason):
        check_config(config(**given), settings)


@pytest.mark.parametrize(
    "given", [{"cache_dtype": "fp8"}, {"cache_dtype": "fp8_e4m3"}, {"speculative": object()}]
)
def test_settings_of_vllm_that_are_served(given: dict[str, Any]) -> None:
    check_config(config(**given), Settings.parse({"url": "/folder"}))


def test_ranks_may_share_a_node() -> None:
    several = config(parallel={"tensor_parallel_size": 2})
    check_config(several, Settings.parse({"url": "http://node"}))


def weights(load_format: str = "auto", quantization: str | None = None, **stored: Any) -> Any:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(
            quantization=quantization, hf_config=SimpleNamespace(**stored), dtype=torch.float16
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


@pytest.mark.parametrize("load_format", ["tensorizer", "mistral", "pt", "npcache", "somebody's"])
def test_loaders_of_other_files_are_refused(load_format: str) -> None:
    with pytest.raises(UnsupportedError, match="load-format"):
        check_weights(weights(load_format))


def test_configurations_from_elsewhere_are_refused() -> None:
    for setting in ({"hf_config_path": "/elsewhere"}, {"config_format": "mistral"}):
        config = weights()
        vars(config.model_config).update(setting)
        with pytest.raises(UnsupportedError, match="config"):
            check_weights(config)


def test_a_second_copy_of_the_weights_is_refused(tmp_path: Path) -> None:
    """vLLM would load that one, whatever the others are."""
    (tmp_path / "consolidated.safetensors").touch()
    model = SimpleNamespace(model=str(tmp_path), hf_overrides=None, dtype=torch.float16)
    for load_format in ("auto", "safetensors"):
        load = SimpleNamespace(load_format=load_format, download_dir=None)
        with pytest.raises(UnsupportedError, match="consolidated"):
            spec_of_model(model, load)


def test_weights_must_be_those_of_the_checkpoint() -> None:
    check_weights(weights())
    check_weights(weights(quantization="awq", quantization_config={}))
    with pytest.raises(UnsupportedError, match="dummy"):
        check_weights(weights("dummy"))
    with pytest.raises(UnsupportedError, match="fp8"):
        check_weights(weights(quantization="fp8"))


def test_the_dtype_of_the_cache() -> None:
    config = weights()
    assert cache_dtype(config) == torch.float16
    config.cache_config.cache_dtype = "bfloat16"
    assert cache_dtype(config) == torch.bfloat16
    for eight_bit in ("fp8", "fp8_e4m3"):
        config.cache_config.cache_dtype = eight_bit
        assert cache_dtype(config) == torch.float16  # in which values are exchanged
    config.cache_config.cache_dtype = "fp8_e5m2"
    with pytest.raises(UnsupportedError, match="fp8_e5m2"):
        cache_dtype(config)


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


def test_blocks_must_hold_all_tokens() -> None:
    def managed(*specs: Any) -> Any:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return SimpleNamespace(kv_cache_groups=groups)

    check_blocks(managed(FullAttentionSpec()))
    drafts = {"model.layers.0.x": FullAttentionSpec(), "model.layers.1.x": FullAttentionSpec()}
    check_blocks(managed(SimpleNamespace(kv_cache_specs=drafts)))
    mixed = SimpleNamespace(kv_cache_specs={**drafts, "model.layers.2.x": SlidingWindowSpec()})
    with pytest.raises(UnsupportedError, match="SlidingWindowSpec"):
        check_blocks(managed(mixed))
    for specs in [(SlidingWindowSpec(),), (FullAttentionSpec(), SlidingWindowSpec())]:
        with pytest.raises(UnsupportedError, match="SlidingWindowSpec"):
            check_blocks(managed(*specs))
