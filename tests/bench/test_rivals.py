"""Every rival on a tiny model: real bytes, stated error bounds, and the sizes their formats say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kdn.bench.rivals import NAMES, open_rivals
from kdn.bench.rivals.base import ExactContext
from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.bench.rivals.ours import Layered, cachegen, exact
from kdn.bench.rivals.plain import Drop, Half, Int8
from kdn.bench.rivals.shipped import Shipped
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.exact import ExactCodec
from kdn.engines.transformers import from_dynamic_cache, spec_of
from kdn.errors import UnsupportedError

NUM_TOKENS = 320


@pytest.fixture(scope="module")
def setting(tiny_model: Callable[..., Any]) -> tuple[ModelSpec, ExactContext]:
    model = tiny_model("llama")
    tokens = np.random.default_rng(0).integers(3, 128, NUM_TOKENS).astype(np.uint32)
    with torch.no_grad():
        past = model(torch.tensor(tokens.astype(np.int64))[None], use_cache=True).past_key_values
    return spec_of(model), ExactContext(tokens, from_dynamic_cache(past))


def stacked(cache: KVCache) -> torch.Tensor:
    return torch.stack((cache.keys, cache.values))


def test_half_precision(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, context = setting
    (outcome,) = Half(spec).run(context)
    assert outcome.size_bytes == 2 * spec.values_per_token * NUM_TOKENS
    assert torch.equal(stacked(outcome.cache), stacked(context.cache).half().float())


def test_eight_bits_err_by_half_a_step(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, context = setting
    (outcome,) = Int8(spec).run(context)
    scales = 2 * spec.num_layers * NUM_TOKENS
    assert outcome.size_bytes == spec.values_per_token * NUM_TOKENS + 2 * scales
    whole = stacked(context.cache)
    steps = whole.abs().amax((3, 4), keepdim=True) / 127
    assert ((stacked(outcome.cache) - whole).abs() <= 0.56 * steps).all()


def test_eight_bits_of_zeros() -> None:
    spec = ModelSpec(1, 1, 2, 10, (None,), (None,), bytes(16))
    context = ExactContext(np.zeros(3, np.uint32), KVCache.empty(1, 3, 1, 2))
    (outcome,) = Int8(spec).run(context)
    assert not stacked(outcome.cache).any()


def test_dropping_keeps_both_ends(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, context = setting
    (outcome,) = Drop(spec).run(context)
    assert outcome.size_bytes == 2 * spec.values_per_token * 260
    assert outcome.kept is not None
    assert np.flatnonzero(~outcome.kept).tolist() == list(range(4, NUM_TOKENS - 256))
    kept = torch.from_numpy(outcome.kept)
    expected = stacked(context.cache)[:, :, kept].half().float()
    assert torch.equal(stacked(outcome.cache)[:, :, kept], expected)


def test_shipped_cachegen_errs_by_half_a_bin(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, context = setting
    whole = stacked(context.cache)
    peaks = whole.abs().amax((3, 4), keepdim=True)
    rival = Shipped(spec)
    sizes = []
    for outcome, label in zip(rival.run(context), rival.labels, strict=True):
        fine, coarse = map(int, label.split("/"))
        error = (stacked(outcome.cache) - whole).abs() / peaks
        # This model has 4 layers: all of K and the first 2 layers of V have the finer bins.
        assert error[0].max() <= 0.501 / (fine // 2 - 1)
        assert error[1, 2:].max() <= 0.501 / (coarse // 2 - 1)
        assert error[1, 2:].max() > 0.4 / (coarse // 2 - 1)
        streams = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        tables = 2 * streams * (2 * (fine + 1) + 4)  # two chunks, bounds and a length each
        scales = 2 * 2 * spec.num_layers * NUM_TOKENS
        payload = outcome.size_bytes - tables - scales
        symbols = spec.values_per_token * NUM_TOKENS
        assert 0.1 < 8 * payload / symbols < np.log2(fine) + 0.3
        sizes.append(outcome.size_bytes)
    assert sizes == sorted(sizes)


def test_lossless_codec_in_half_precision(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, context = setting
    (outcome,) = exact(ExactCodec(spec)).run(context)
    assert torch.equal(stacked(outcome.cache), stacked(context.cache).half())


def test_cachegen_levels_are_fetched_apart(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, context = setting
    codec = CacheGenCodec(spec, CacheGenProfile.fit(spec, [context.cache]))
    apart, together = (list(r.run(context)) for r in (cachegen(codec), Layered(codec)))
    assert len(apart) == len(together) == codec.num_levels
    whole = stacked(context.cache)
    errors = []
    for a, t in zip(apart, together, strict=True):
        assert torch.equal(stacked(a.cache), stacked(t.cache))
        errors.append(float((stacked(a.cache) - whole).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert apart[1].size_bytes == together[1].size_bytes  # anchors and the first deltas
    assert apart[-1].size_bytes < together[-1].size_bytes


def test_names_are_checked(setting: tuple[ModelSpec, ExactContext]) -> None:
    spec, _ = setting
    opened = open_rivals(["fp16", "drop"], spec, None)  # type: ignore[arg-type]
    assert [rival.name for rival in opened] == ["fp16", "drop"]
    assert {"klt", "kvtc", "kvtc-nowindow", "cachegen", "cachegen-shipped"} < set(NAMES)
    with pytest.raises(UnsupportedError, match="found 'gzip'"):
        open_rivals(["fp16", "gzip"], spec, None)  # type: ignore[arg-type]
