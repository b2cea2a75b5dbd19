"""A cache of 8 bit is told by what vLLM made, not by what its settings say alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kdn.engines.vllm.checks import holds_bytes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, False),
        (torch.float32, False),
        (torch.uint8, True),
        (torch.float8_e4m3fn, True),
    ],
)
def test_which_caches_are_of_bytes(dtype: torch.dtype, expected: bool) -> None:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(dtype=dtype))
    assert holds_bytes(SimpleNamespace(kv_cache_groups=[group])) is expected
