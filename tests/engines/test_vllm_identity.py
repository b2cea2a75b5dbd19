"""Names: whatever changes a cache's values changes its chunks' keys, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kdn.cache.keys import Namespace
from kdn.engines.vllm.checks import check_config, layers_in_order
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.settings import Settings
from kdn.errors import UnsupportedError


def request(**more: Any) -> Any:
    plain = {
        "mm_features": [], "prompt_embeds": None, "prompt_token_ids": [1], "cache_salt": None,
        "lora_request": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **more})


def adapter(folder: Path, value: float, name: str = "a") -> Any:
    folder.mkdir(exist_ok=True)
    save_file({"w": torch.full((4,), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4}')
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def test_salt_and_adapter(tmp_path: Path) -> None:
    identity = Identity(Namespace(b"m", b"p"))
    plain = identity.of(request()).root
    assert plain == Namespace(b"m", b"p").root
    assert identity.of(request(cache_salt="x")).root not in (plain, identity.of(request()))
    one = identity.of(request(lora_request=adapter(tmp_path / "one", 1.0))).root
    same = identity.of(request(lora_request=adapter(tmp_path / "same", 1.0, "other name"))).root
    other = identity.of(request(lora_request=adapter(tmp_path / "other", 2.0))).root
    assert one == same
    assert len({plain, one, other}) == 3


def test_what_has_no_name_is_refused(tmp_path: Path) -> None:
    identity = Identity(Namespace(b"m", b"p"))
    nowhere = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "nowhere"))
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
        cache_config=SimpleNamespace(cache_dtype=more.get("cache_dtype", "auto")),
        speculative_config=more.get("speculative"),
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context"),
        ({"cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"speculative": object()}, "speculative"),
        ({"parallel": {"tensor_parallel_size": 2}}, "folder"),
    ],
)
def test_settings_of_vllm_that_are_refused(given: dict[str, Any], reason: str) -> None:
    settings = Settings.parse({"url": "/folder"})
    check_config(config(), settings)
    with pytest.raises(UnsupportedError, match=reason):
        check_config(config(**given), settings)


def test_ranks_may_share_a_node() -> None:
    several = config(parallel={"tensor_parallel_size": 2})
    check_config(several, Settings.parse({"url": "http://node"}))


def test_layers_are_put_in_order() -> None:
    tensors = [torch.full((1,), float(i)) for i in range(12)]
    caches = {f"model.layers.{i}.self_attn.attn": tensors[i] for i in reversed(range(12))}
    assert layers_in_order(caches) == tensors
    for wrong in (
        {"model.layers.1.attn": tensors[0]},
        {"encoder.attn": tensors[0]},
        {"a.layers.0.x": tensors[0], "b.layers.0.x": tensors[1]},
    ):
        with pytest.raises(UnsupportedError):
            layers_in_order(wrong)
