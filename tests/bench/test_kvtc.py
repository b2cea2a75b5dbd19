"""kvtc rebuilt: the allocation is the best there is, and bytes decode to what was quantised."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.bench.rivals import kvtc_profile
from kdn.bench.rivals.base import ExactContext
from kdn.bench.rivals.kvtc import WINDOW_TOKENS, Kvtc
from kdn.bench.rivals.kvtc_profile import (
    NARROWER,
    UNIT,
    KvtcProfile,
    Run,
    allocate,
    dequantise,
    from_fp8,
    quantise,
    rows_of,
    to_fp8,
)
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.transformers import from_dynamic_cache, spec_of

NUM_TOKENS = 256
RATIOS = (32.0, 8.0, 3.0)


@pytest.fixture(scope="module")
def setting(tiny_model: Callable[..., Any]) -> tuple[ModelSpec, list[ExactContext], KvtcProfile]:
    model = tiny_model("llama")
    contexts = []
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(3, 128, NUM_TOKENS).astype(np.uint32)
        ids = torch.tensor(tokens.astype(np.int64))[None]
        with torch.no_grad():
            past = model(ids, use_cache=True).past_key_values
        contexts.append(ExactContext(tokens, from_dynamic_cache(past)))
    spec = spec_of(model)
    return spec, contexts, KvtcProfile.fit(spec, (c.cache for c in contexts[1:]), RATIOS)


def cost_of(runs: tuple[Run, ...]) -> int:
    return sum((r.end - r.start) * r.bits + (32 if r.bits < 8 else 0) for r in runs)


def error_of(rows: torch.Tensor, runs: tuple[Run, ...]) -> float:
    restored = torch.zeros_like(rows)
    for run in runs:
        part = rows[:, run.start : run.end]
        if run.bits == 8:
            restored[:, run.start : run.end] = from_fp8(to_fp8(part, run.scale), run.scale)
        else:
            restored[:, run.start : run.end] = dequantise(*quantise(part, run.bits))
    return float((rows - restored).square().sum())


def test_allocation_is_as_good_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtc_profile, "RUN_UNITS", (1,))
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([8.0, 3.0, 1.0, 0.2]).repeat_interleave(UNIT)
    rows = torch.randn(50, 4 * UNIT, generator=generator) * scales
    budgets = [0, 64, 200, 512]
    plans = allocate(rows, budgets)
    for budget, plan in zip(budgets, plans, strict=True):
        assert cost_of(plan) <= budget
        best = min(
            error_of(rows, runs)
            for choice in product((0, 2, 4, 8), repeat=4)
            if cost_of(
                runs := tuple(
                    Run(i * UNIT, (i + 1) * UNIT, bits, kvtc_profile._fp8_scale(
                        rows[:, i * UNIT : (i + 1) * UNIT]))
                    for i, bits in enumerate(choice)
                    if bits
                )
            )
            <= budget
        )  # fmt: skip
        assert error_of(rows, plan) == pytest.approx(best)
    assert plans[0] == ()


def test_long_runs_save_parameters() -> None:
    rows = torch.randn(64, 8 * UNIT, generator=torch.Generator().manual_seed(1))
    (plan,) = allocate(rows, [8 * UNIT * 2 + 32])  # two bits each, if one run carries them all
    assert plan == (Run(0, 8 * UNIT, 2),)


@pytest.mark.parametrize("bits", [2, 4])
def test_no_range_is_better_than_the_one_chosen(bits: int) -> None:
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(2)) * 7
    codes, offset, step = quantise(rows, bits)
    assert codes.max() == 2**bits - 1
    found = (dequantise(codes, offset, step) - rows).square().sum(1)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    middle, reach = (high + low) / 2, (high - low) / 2
    for part in (1.0, *NARROWER):
        steps = 2 * part * reach / (2**bits - 1)
        spread = ((rows - middle + part * reach) / steps).round().clamp(0, 2**bits - 1)
        error = (spread * steps + middle - part * reach - rows).square().sum(1)
        assert (found <= error * 1.01).all()


def test_fp8_saturates_and_keeps_three_bits() -> None:
    rows = torch.tensor([[1.0, -3.3, 1e6, 0.0]])
    restored = from_fp8(to_fp8(rows, 4.0), 4.0)
    assert restored[0, 2] == 448 / 4
    assert restored[0, 1] == pytest.approx(-3.3, rel=1 / 16)


@pytest.mark.parametrize("window", [True, False])
def test_bytes_decode_to_what_was_quantised(
    setting: tuple[ModelSpec, list[ExactContext], KvtcProfile], window: bool
) -> None:
    spec, contexts, profile = setting
    context = contexts[0]
    end = NUM_TOKENS - (WINDOW_TOKENS if window else 0)
    rows = rows_of(context.cache.slice(4, end), spec)
    for outcome in Kvtc(spec, profile, window=window).run(context):
        found = rows_of(outcome.cache.slice(4, end), spec)
        for side, row, got in zip((profile.keys, profile.values), rows, found, strict=True):
            projected = (row - side.mean) @ side.basis
            runs = side.plans[outcome.level]
            kept = torch.zeros_like(projected)
            for run in runs:
                part = projected[:, run.start : run.end]
                kept[:, run.start : run.end] = (
                    from_fp8(to_fp8(part, run.scale), run.scale)
                    if run.bits == 8
                    else dequantise(*quantise(part, run.bits))
                )
            expected = kept @ side.basis.T + side.mean
            # A code on the edge of two may fall either way.
            assert float((got - expected).abs().quantile(0.99)) < 1e-3 * float(row.std())
        for raw in ((0, 4), (end, NUM_TOKENS)):
            for name in ("keys", "values"):
                was = getattr(context.cache.slice(*raw), name)
                assert torch.equal(getattr(outcome.cache.slice(*raw), name), was.half().float())


def test_budgets_hold_and_more_bits_err_less(
    setting: tuple[ModelSpec, list[ExactContext], KvtcProfile],
) -> None:
    spec, contexts, profile = setting
    values = spec.values_per_token // 2
    whole = contexts[0].cache
    errors = []
    for outcome, ratio in zip(
        Kvtc(spec, profile, window=False).run(contexts[0]), RATIOS, strict=True
    ):
        for side in (profile.keys, profile.values):
            assert cost_of(side.plans[outcome.level]) <= 16 * values / ratio
        raw_bytes = 4 * 2 * 2 * values
        packed = outcome.size_bytes - raw_bytes
        assert packed <= 1.05 * (NUM_TOKENS - 4) * 2 * 2 * values / ratio + 64
        errors.append(float((outcome.cache.values - whole.values).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05 * float(whole.values.var())


def test_a_saved_profile_decodes_alike(
    setting: tuple[ModelSpec, list[ExactContext], KvtcProfile], tmp_path: Path
) -> None:
    spec, contexts, profile = setting
    profile.save(tmp_path / "kvtc.safetensors")
    loaded = KvtcProfile.load(tmp_path / "kvtc.safetensors")
    assert loaded.ratios == RATIOS
    assert (loaded.keys.plans, loaded.values.plans) == (profile.keys.plans, profile.values.plans)
    before, after = (
        list(Kvtc(spec, p, window=False).run(contexts[0]))[-1].cache for p in (profile, loaded)
    )
    spread = float(before.values.std())
    assert float((before.values - after.values).abs().mean()) < 0.01 * spread


def test_sinks_do_not_shape_the_basis(
    setting: tuple[ModelSpec, list[ExactContext], KvtcProfile],
) -> None:
    spec, contexts, profile = setting

    def with_wild_sinks(cache: KVCache) -> KVCache:
        keys, values = cache.keys.clone(), cache.values.clone()
        values[:, :4] = 1e4
        return KVCache(keys, values)

    wild = KvtcProfile.fit(spec, (with_wild_sinks(c.cache) for c in contexts[1:]), RATIOS)
    assert torch.equal(wild.values.mean, profile.values.mean)
