"""The fused kernels against the plain way: rope.py, copies, and sums one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.klt import columns
from kdn.codec.klt.columns import (
    Restored,
    RopeTables,
    Scaled,
    bands,
    read_columns,
    write_band,
)
from tests.codec.rotations import MIXED

LAYERS = (1, 5)  # plain, none, partial and interleaved rotations
START, TOKENS = 40, 21


def random_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    """A view into a longer context, as decoding writes into one."""
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 6, 60, 3, 16, generator=generator).to(dtype)
    return KVCache(keys, values, START - 10).slice(START, START + TOKENS)


def plain_columns(cache: KVCache) -> torch.Tensor:
    keys = rope.undo(cache.keys, MIXED, cache.start)
    sides = torch.stack([keys[slice(*LAYERS)], cache.values[slice(*LAYERS)].float()])
    return sides.permute(2, 0, 1, 3, 4).reshape(cache.num_tokens, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_undoes_rope(dtype: torch.dtype) -> None:
    cache = random_cache(dtype)
    tables = RopeTables.of(MIXED, START, TOKENS, forward=False)
    found = read_columns(cache, MIXED, LAYERS, tables)
    torch.testing.assert_close(found, plain_columns(cache), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_error", [False, True])
@pytest.mark.parametrize("band_columns", [1, 96, 3072])
def test_writing_sums_up_and_turns(
    dtype: torch.dtype, with_error: bool, band_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "BAND_COLUMNS", band_columns)
    rng = np.random.default_rng(1)
    width = 2 * 4 * 48
    parts = [
        Scaled(
            rng.integers(-3, 4, (TOKENS, width)).astype(np.int32),
            rng.uniform(0.1, 1, TOKENS).astype(np.float32),
            rng.uniform(0.1, 1, width).astype(np.float32),
        )
        for _ in range(3)
    ]
    bias = rng.uniform(0.1, 1, width).astype(np.float32)
    source = random_cache()
    total = bias + sum(
        p.whole * p.token_scale[:, None] * p.column_scale for p in parts[: 2 + with_error]
    )
    base = (plain_columns(source).numpy() - total).astype(np.float32)
    out = random_cache(dtype)
    out.keys.fill_(torch.nan)
    out.values.fill_(torch.nan)
    tables = RopeTables.of(MIXED, START, TOKENS, forward=True)
    for band in bands(MIXED, LAYERS):
        own = band.columns
        cut = [
            Scaled(np.ascontiguousarray(p.whole[:, own]), p.token_scale, p.column_scale[own])
            for p in parts
        ]
        restored = Restored(
            np.ascontiguousarray(base[:, own]), bias[own], *cut[:2], cut[2] if with_error else None
        )
        write_band(band, restored, tables, out)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for found, expected in ((out.keys, source.keys), (out.values, source.values)):
        inside = slice(*LAYERS)
        torch.testing.assert_close(found[inside].float(), expected[inside], rtol=0, atol=tolerance)
        assert found[0].isnan().all(), "another group's layers were touched"
        assert found[5].isnan().all()


def test_heads_need_not_lie_side_by_side() -> None:
    """Engines keep caches in other orders; a view of one must be read as it is meant."""
    cache = random_cache()
    turned = KVCache(
        cache.keys.transpose(1, 2).contiguous().transpose(1, 2),
        cache.values.transpose(1, 2).contiguous().transpose(1, 2),
        START,
    )
    tables = RopeTables.of(MIXED, START, TOKENS, forward=False)
    found = read_columns(turned, MIXED, LAYERS, tables)
    torch.testing.assert_close(found, plain_columns(cache), rtol=0, atol=1e-5)
