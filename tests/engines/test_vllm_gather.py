"""Tokens out of vLLM's memory: the kernel against plain torch, and that against the views.

The kernel needs a CUDA device, or Triton's interpreter:
`TRITON_INTERPRET=1 pytest -m gpu tests/engines/test_vllm_gather.py`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from kdn.cache.rows import TokenRows
from kdn.cache.spec import ModelSpec
from kdn.engines.vllm.gather import gather
from kdn.engines.vllm.layout import Heads, Layout, PagedCache, Scales

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or INTERPRETED)),
    reason="needs a CUDA device and Triton",
)
LAYERS, HEADS, DIM, BLOCKS, BLOCK = 3, 3, 16, 9, 16
SPEC = ModelSpec(LAYERS, HEADS, DIM, 100, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)


def memory(dtype: torch.dtype, *, tokens_first: bool, scales: Scales | None = None) -> PagedCache:
    generator = torch.Generator().manual_seed(3)
    layers = []
    for _ in range(LAYERS):
        shape = (BLOCKS, BLOCK, HEADS, 2 * DIM) if tokens_first else (BLOCKS, HEADS, BLOCK, 2 * DIM)
        layer = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        layers.append(layer.transpose(1, 2) if tokens_first else layer)
    own = dtype if scales is None else torch.bfloat16
    return PagedCache(layers, SPEC, Heads(0, HEADS), BLOCK, Layout.HEADS_FIRST, scales, own)


def rows_of(paged: PagedCache) -> TokenRows:
    assert paged.rows is not None
    return paged.rows


def test_what_is_gathered_is_what_is_there() -> None:
    paged = memory(torch.float32, tokens_first=True)
    rows = rows_of(paged)
    slots = paged.slots(3, 40, [7, 2, 5])
    keys, values = gather(rows, slots, torch.float32)
    for token, slot in enumerate(slots):
        for layer in range(LAYERS):
            assert torch.equal(keys[layer, token], rows.keys[layer][slot])
            assert torch.equal(values[layer, token], rows.values[layer][slot])


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float8_e4m3fn, Scales((0.5, 1.0, 0.3), (2.0, 1.0, 0.7))),
    ],
    ids=str,
)
def test_the_kernel_gathers_all_chunks_at_once(
    dtype: torch.dtype, scales: Scales | None, tokens_first: bool
) -> None:
    from kdn.engines.vllm.gather_triton import Gatherer

    paged = memory(dtype, tokens_first=tokens_first, scales=scales)
    rows = rows_of(paged)
    slots = [paged.slots(0, 37, [7, 2, 5]), paged.slots(16, 48, [1, 0, 8])]
    out = [
        torch.full((2, LAYERS, len(one), HEADS, DIM), 9.0, dtype=paged.dtype, device=DEVICE)
        for one in slots
    ]
    Gatherer(rows, paged.dtype).gather(slots, out)
    for one, place in zip(slots, out, strict=True):
        keys, values = gather(rows, one, paged.dtype)
        # The interpreter cuts off where hardware rounds.
        apart = 2**-7 if INTERPRETED and scales is not None else 0.0
        torch.testing.assert_close(place[0], keys, rtol=apart, atol=0.0)
        torch.testing.assert_close(place[1], values, rtol=apart, atol=0.0)
    assert np.unique(np.concatenate(slots)).size == 69
