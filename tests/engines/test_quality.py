"""The probe's figures against the same figures computed the long way, on tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.engines.quality import PASSAGE_STARTS, Quality, QualityProbe
from kdn.engines.transformers import from_dynamic_cache, to_dynamic_cache
from kdn.errors import MismatchError

CONTEXT, FOLLOW, PASSAGE, UNSCORED = 200, 24, 40, 8


def make_probe(model: Any, seed: int = 0) -> tuple[QualityProbe, npt.NDArray[np.int64]]:
    tokens = np.random.default_rng(seed).integers(3, 128, CONTEXT + FOLLOW)
    probe = QualityProbe(model, tokens, CONTEXT, passage_tokens=PASSAGE, unscored_tokens=UNSCORED)
    return probe, tokens


def perturbed(cache: KVCache, scale: float) -> KVCache:
    generator = torch.Generator().manual_seed(5)
    keys, values = (
        t + scale * torch.randn(t.shape, generator=generator) * (t != 0)
        for t in (cache.keys, cache.values)
    )
    return KVCache(keys, values, cache.start, cache.valid_from)


def long_way(model: Any, cache: KVCache, row: npt.NDArray[np.int64]) -> torch.Tensor:
    """Log-probabilities after each token of one row alone, in float64."""
    with torch.no_grad():
        past = to_dynamic_cache(cache, model.config)
        logits = model(torch.tensor(row)[None], past_key_values=past).logits[0]
    return torch.log_softmax(logits.double(), -1)


def kld(p: torch.Tensor, q: torch.Tensor) -> npt.NDArray[np.float64]:
    return (p.exp() * (p - q)).sum(-1).numpy()


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("mistral", {"sliding_window": 64}), ("gemma2", {"sliding_window": 32})],
)
def test_the_exact_cache_scores_zero(
    family: str, settings: dict[str, Any], tiny_model: Callable[..., Any]
) -> None:
    probe, _ = make_probe(tiny_model(family, **settings))
    for quality in (probe.measure(probe.cache), probe.reference):
        assert quality.kld == 0
        assert quality.kld_p99 == 0
        assert quality.recall_kld == 0
        assert quality.top1 == 1
    assert probe.measure(probe.cache).ppl == probe.reference.ppl
    assert probe.prefill_s > 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_figures_match_those_computed_row_by_row(
    family: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model(family)
    probe, tokens = make_probe(model)
    lossy = perturbed(probe.cache, 0.3)
    quality = probe.measure(lossy)

    follow = tokens[CONTEXT:]
    p, q = (long_way(model, cache, follow)[:-1] for cache in (probe.cache, lossy))
    np.testing.assert_allclose(quality.continuation_kld, kld(p, q), rtol=1e-3, atol=1e-6)
    assert quality.top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    nll = -q[torch.arange(FOLLOW - 1), torch.tensor(follow[1:])]
    assert quality.ppl == pytest.approx(float(nll.mean().exp()), rel=1e-4)

    recalled = []
    for part in PASSAGE_STARTS:
        start = int(part * CONTEXT)
        row = tokens[start : start + PASSAGE]
        p, q = (long_way(model, cache, row) for cache in (probe.cache, lossy))
        recalled.append(kld(p, q)[UNSCORED - 1 : -1])  # predicts tokens UNSCORED, ...
    np.testing.assert_allclose(quality.recall_klds, np.concatenate(recalled), rtol=1e-3, atol=1e-6)
    assert quality.recall_kld == pytest.approx(float(np.mean(recalled)), rel=1e-3)


def test_more_noise_is_worse_and_measuring_leaves_no_trace(
    tiny_model: Callable[..., Any],
) -> None:
    probe, _ = make_probe(tiny_model("llama"))
    before = probe.cache.keys.clone()
    klds = [probe.measure(perturbed(probe.cache, scale)).kld for scale in (0.01, 0.1, 0.5)]
    assert 0 < klds[0] < klds[1] < klds[2]
    assert probe.measure(perturbed(probe.cache, 0.1)).kld == klds[1]
    assert torch.equal(probe.cache.keys, before)


def test_dropped_tokens_are_absent_and_positions_stay(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    probe, tokens = make_probe(model)
    kept = np.zeros(CONTEXT, dtype=np.bool_)
    kept[:4] = kept[-50:] = True
    quality = probe.measure(perturbed(probe.cache, 0.0), kept)

    index = torch.from_numpy(kept)
    short = KVCache(probe.cache.keys[:, index], probe.cache.values[:, index])
    with torch.no_grad():
        logits = model(
            torch.tensor(tokens[CONTEXT:])[None],
            past_key_values=to_dynamic_cache(short, model.config),
            position_ids=torch.arange(CONTEXT, CONTEXT + FOLLOW)[None],
        ).logits[0]
    q = torch.log_softmax(logits.double(), -1)[:-1]
    p = long_way(model, probe.cache, tokens[CONTEXT:])[:-1]
    np.testing.assert_allclose(quality.continuation_kld, kld(p, q), rtol=1e-3, atol=1e-6)
    assert quality.kld > 0.001


def test_the_probe_keeps_the_models_own_cache(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    probe, tokens = make_probe(model)
    with torch.no_grad():
        past = model(torch.tensor(tokens[:CONTEXT])[None], use_cache=True).past_key_values
    assert torch.equal(probe.cache.keys, from_dynamic_cache(past).keys)


def test_pooling_weighs_tokens_not_contexts() -> None:
    def quality(klds: list[float]) -> Quality:
        values = np.array(klds)
        return Quality(values, 2 * values, values < 0.5, 3 * values)

    pooled = Quality.pooled([quality([0.0, 1.0, 0.2]), quality([0.8])])
    assert pooled.kld == pytest.approx(0.5)
    assert pooled.recall_kld == pytest.approx(1.0)
    assert pooled.top1 == pytest.approx(0.5)
    assert pooled.ppl == pytest.approx(np.exp(1.5))
    assert pooled.kld_p99 == pytest.approx(0.994)


def test_refuses_what_does_not_fit(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    probe, tokens = make_probe(model)
    with pytest.raises(MismatchError, match=r"\[0, 200\)"):
        probe.measure(probe.cache.slice(0, CONTEXT - 1))
    with pytest.raises(MismatchError, match="at least 2 tokens after"):
        QualityProbe(model, tokens, len(tokens) - 1)
    with pytest.raises(MismatchError, match="too short for recall"):
        QualityProbe(model, tokens, CONTEXT, passage_tokens=150)
