"""Calibration of models with recurrent layers: their attention layers, on top of exact states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.calibrate import moments
from kdn.calibrate.run import CalibrationOptions, calibrate
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.engines.quality import QualityProbe
from kdn.engines.reading import new_cache, read, read_whole, state_after
from kdn.engines.states import freeze_states, repeat
from kdn.engines.transformers import spec_of, to_dynamic_cache
from kdn.errors import MismatchError
from tests.engines.family_models import build

OPTIONS = CalibrationOptions(
    context=384, group_layers=2, embedding_dims=24, predictor_rank=8, metric_rank=4, components=100,
    fine_components=16, second_pass_windows=2, table_windows=4,
)  # fmt: skip
LAYERS = ["linear_attention", "full_attention"] * 2


def windows(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.minimum(rng.geometric(0.05, OPTIONS.window), 127) for _ in range(count)]


def test_levels_approach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdn.calibrate.importance.STEPS", 150)
    model = build("qwen3_next", layer_types=LAYERS)
    profile = calibrate(model, windows(8), OPTIONS)
    codec = KltCodec(spec_of(model), profile)
    probe = QualityProbe(model, windows(9)[-1], OPTIONS.context)
    assert probe.measure(probe.cache).kld == 0
    chunks = cut(probe.tokens[: OPTIONS.context].numpy(), Namespace(b"", codec.profile_id))
    streams = [Bitstream.parse(data) for data in codec.encode_all(chunks, probe.cache)]
    klds = []
    for levels in (1, codec.num_levels):
        decoded = KVCache(*(torch.empty_like(t) for t in (probe.cache.keys, probe.cache.values)))
        codec.decode_all(streams, chunks, decoded, levels=levels)
        klds.append(probe.measure(decoded).kld)
    assert klds[1] < klds[0] / 10
    assert klds[1] < 0.01


def test_a_pass_over_frozen_states_is_the_pass_of_the_model() -> None:
    model = build("qwen3_next", layer_types=LAYERS)
    [window] = windows(1)
    cache = read_whole(model, window[:384])
    with pytest.raises(MismatchError, match="need a state"):
        to_dynamic_cache(cache, model.config)
    past = to_dynamic_cache(cache, model.config, state=state_after(model, window[:384]))
    repeat(past, 2)
    freeze_states(past)
    rows = torch.as_tensor(window[384:420])[None].expand(2, -1)
    found = model(rows, past_key_values=past).logits[:, -1]
    own = read(model, window[:420], new_cache(model))
    assert (found - own).norm() < 1e-4 * own.norm()


def test_gradients_reach_keys_through_recurrent_layers() -> None:
    """Of the first attention layer too, behind which recurrent layers come."""
    model = build("qwen3_next", layer_types=LAYERS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    [window] = windows(1)
    columns = moments.Columns(spec_of(model), ((0, 2),))
    generator = torch.Generator().manual_seed(0)
    cache = read_whole(model, window[:384])
    found = moments.gradient_of(model, cache, torch.as_tensor(window), columns, generator)
    assert torch.isfinite(found).all()
    assert (found.abs().sum(0) > 0).all()
