"""Calibration end to end on tiny models of many families, and the codec with what it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.calibrate.run import CalibrationOptions, calibrate
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.profiles import codec_with
from kdn.engines.quality import QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.conftest import LATENTS

OPTIONS = CalibrationOptions(
    context=384,
    group_layers=3,
    embedding_dims=24,
    predictor_rank=8,
    metric_rank=4,
    components=400,
    fine_components=16,
    second_pass_windows=2,
    table_windows=4,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4},
    "qwen3": {"head_dim": 24},
    "phi": {"partial_rotary_factor": 0.5},
    "gemma3_text": {"head_dim": 16, "sliding_window": 1024, "layer_types": None},
    "gemma3_text-mixed": {
        "head_dim": 16,
        "sliding_window": 300,
        "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
    },
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024},
    "deepseek_v3": {
        **LATENTS,
        "first_k_dense_replace": 4,
    },
}


def make(tiny_model: Callable[..., Any], name: str) -> Any:
    settings = {k: v for k, v in FAMILIES[name].items() if v is not None}
    return tiny_model(name.split("-")[0], **settings)


def windows(count: int, length: int = OPTIONS.window, seed: int = 0) -> list[np.ndarray]:
    """Text-like: common tokens are common, and phrases come back."""
    rng = np.random.default_rng(seed)
    return [np.minimum(rng.geometric(0.05, length), 127) for _ in range(count)]


@pytest.fixture(scope="module", autouse=True)
def _hasty() -> Iterator[None]:
    """Tiny models need no fit to the last digit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.importance.STEPS", 150)
        yield


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    """By family: each is calibrated once."""
    return {}


def profile_of(profiles: dict[str, Profile], name: str, model: Any) -> Profile:
    if name not in profiles:
        profiles[name] = calibrate(model, windows(10), OPTIONS)
    return profiles[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_levels_approach_the_model(
    tiny_model: Callable[..., Any], profiles: dict[str, Profile], name: str
) -> None:
    model = make(tiny_model, name)
    profile = profile_of(profiles, name, model)
    codec = codec_with(spec_of(model), profile)
    probe = QualityProbe(model, windows(1, seed=9)[0], OPTIONS.context)
    chunks = cut(probe.tokens[: OPTIONS.context].numpy(), Namespace(codec.spec.fingerprint, b""))
    streams = [Bitstream.parse(codec.encode(c, probe.cache.slice(c.start, c.end))) for c in chunks]
    klds = []
    for levels in range(1, codec.num_levels + 1):
        parts = [codec.decode(s, c, levels=levels) for s, c in zip(streams, chunks, strict=True)]
        keys = torch.cat([p.keys for p in parts], dim=1)
        values = torch.cat([p.values for p in parts], dim=1)
        klds.append(probe.measure(type(probe.cache)(keys, values)).kld)
        if not isinstance(codec, KltCodec):
            continue
        simulated = codec.simulate(chunks[1], probe.cache.slice(256, 384), levels)
        torch.testing.assert_close(simulated.keys, parts[1].keys, rtol=1e-4, atol=1e-4)
    assert klds == sorted(klds, reverse=True)
    assert klds[-1] < 0.002
    assert klds[-1] < klds[0] / 3
    if "gemma3" in name:  # layers with windows have groups of their own, after the others
        mixed = "mixed" in name
        assert profile.meta["groups"] == ([[0, 1], [1, 4]] if mixed else [[0, 2], [2, 4]])
        assert profile.windowed_from == (1 if mixed else 0)


def test_is_deterministic_and_resumes(
    tiny_model: Callable[..., Any], profiles: dict[str, Profile], tmp_path: Path
) -> None:
    model, texts = make(tiny_model, "llama"), windows(10)
    expected = profile_of(profiles, "llama", model)
    path = tmp_path / "profile.partial"

    class Interrupted(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "reading" and done == 4:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.first_pass.CHECKPOINT_S", 0.0)
        patch.setattr("kdn.calibrate.first_pass.CHECKPOINT_SHARE", 1e9)
        with pytest.raises(Interrupted):
            calibrate(model, texts, OPTIONS, checkpoint=path, progress=stop)
    assert path.exists()
    read: list[int] = []

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "reading":
            read.append(done)

    resumed = calibrate(model, texts, OPTIONS, checkpoint=path, progress=watch)
    assert read[0] == 4
    assert not path.exists()
    assert resumed.profile_id == expected.profile_id


def test_values_are_restored_in_the_middle_or_beyond(
    tiny_model: Callable[..., Any], profiles: dict[str, Profile]
) -> None:
    """Never nearer to zero as a whole: what shrinks together adds up in the model."""
    *coarse, finest, last = profile_of(profiles, "llama", make(tiny_model, "llama")).levels
    assert not finest.centroids.any()
    assert not last.centroids.any()
    for level in coarse:
        assert level.centroids.sum() > 0
        assert np.abs(level.centroids).max() <= 0.15


def test_too_little_text_is_refused(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="windows"):
        calibrate(make(tiny_model, "llama"), windows(5), OPTIONS)


@pytest.mark.parametrize("window", [100, 300])
def test_windows_shorter_than_the_context(tiny_model: Callable[..., Any], window: int) -> None:
    """Shorter and longer than a chunk; every sixth layer of Gemma 3 reads everything."""
    model = tiny_model(
        "gemma3_text", head_dim=16, sliding_window=window, num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )  # fmt: skip
    profile = calibrate(model, windows(8), OPTIONS)
    klds = [level["kld"] for level in profile.meta["expected"]]
    assert klds == sorted(klds, reverse=True)
    assert klds[-1] < 0.002


def test_a_profile_is_for_one_model(
    tiny_model: Callable[..., Any], profiles: dict[str, Profile]
) -> None:
    profile = profile_of(profiles, "llama", make(tiny_model, "llama"))
    assert Profile.from_bytes(profile.to_bytes()).profile_id == profile.profile_id
    with pytest.raises(Exception, match="another model"):
        KltCodec(spec_of(make(tiny_model, "qwen3")), profile)
