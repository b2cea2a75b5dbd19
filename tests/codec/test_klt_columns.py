"""The fused kernels against the plain way: rope.py, a transposition, and sums one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.klt.columns import Restored, RopeTables, read_columns, slabs, write_columns
from tests.codec.test_rope import MIXED

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
    return sides.permute(0, 1, 3, 4, 2).reshape(-1, cache.num_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_undoes_rope(dtype: torch.dtype) -> None:
    cache = random_cache(dtype)
    tables = RopeTables.of(MIXED, START, TOKENS, forward=False)
    found = read_columns(cache, MIXED, LAYERS, tables)
    torch.testing.assert_close(found, plain_columns(cache), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_error", [False, True])
def test_writing_sums_up_and_turns(dtype: torch.dtype, with_error: bool) -> None:
    rng = np.random.default_rng(1)
    width = 2 * 4 * 48
    coarse = rng.integers(-3, 4, (width, TOKENS)).astype(np.int32)
    error = rng.integers(-2, 3, (width, TOKENS)).astype(np.int32)
    bias, by_column, by_column_2 = rng.uniform(0.1, 1, (3, width)).astype(np.float32)
    by_token, by_token_2 = rng.uniform(0.1, 1, (2, TOKENS)).astype(np.float32)
    source = random_cache()
    wanted = plain_columns(source).numpy()
    total = bias[:, None] + coarse * (by_column[:, None] * by_token)
    if with_error:
        total = total + error * (by_column_2[:, None] * by_token_2)
    base = torch.from_numpy(wanted - total)
    out = random_cache(dtype)
    out.keys.fill_(torch.nan)
    out.values.fill_(torch.nan)
    tables = RopeTables.of(MIXED, START, TOKENS, forward=True)
    parts = []
    for slab in slabs(MIXED, LAYERS):
        rows = slab.rows
        restored = Restored(
            base[rows], bias[rows], torch.from_numpy(coarse)[rows], by_column[rows], by_token,
            error[rows] if with_error else None, by_column_2[rows], by_token_2,
        )  # fmt: skip
        parts.append((slab, restored))
    write_columns(parts, tables, out)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for found, expected in ((out.keys, source.keys), (out.values, source.values)):
        inside = slice(*LAYERS)
        torch.testing.assert_close(found[inside].float(), expected[inside], rtol=0, atol=tolerance)
        assert found[0].isnan().all(), "another group's layers were touched"
        assert found[5].isnan().all()
