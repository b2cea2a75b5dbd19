"""CacheGen: error bounds per level, parts fetched apart, escapes, profiles from outside."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from kdn.bench.rivals.cachegen import CacheGenCodec, fetch_bytes
from kdn.bench.rivals.cachegen_profile import LAYER_BINS, LEVEL_FACTORS, CacheGenProfile
from kdn.bench.rivals.cachegen_quantise import (
    GROUP_TOKENS,
    is_delta,
    quantise_anchors,
    restore_anchors,
    spread_anchors,
)
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.rans import normalise
from kdn.errors import FormatError, MismatchError, TruncatedError, UnsupportedError


@pytest.fixture(scope="module")
def profile(tiny: Any) -> CacheGenProfile:
    other = tiny.reseed("calibration")
    caches = [other.cache(other.chunk(bytes(16), 256, index), torch.float32) for index in (0, 1)]
    return CacheGenProfile.fit(tiny.spec, caches)


@pytest.fixture(scope="module")
def codec(tiny: Any, profile: CacheGenProfile) -> CacheGenCodec:
    return CacheGenCodec(tiny.spec, profile)


def error_bounds(codec: CacheGenCodec, cache: KVCache, level: int) -> list[np.ndarray]:
    """Largest error each token may have, [layers, tokens] for K and V."""
    bounds = []
    for kind, tensor in enumerate((cache.keys, cache.values)):
        x = tensor.float().reshape(*tensor.shape[:2], -1).numpy()
        anchor_scale = np.abs(x[:, ::GROUP_TOKENS]).max(axis=2) / 127
        bound = np.repeat(anchor_scale / 2, GROUP_TOKENS, axis=1)[:, : x.shape[1]]
        step = codec.profile.steps[level - 1, kind]
        bound[:, is_delta(x.shape[1])] = step[:, None] / 2
        bounds.append(bound * 1.001 + np.abs(x).max() * 1e-6)
    return bounds


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [16, 48, 256])
def test_error_is_within_half_a_step(
    tiny: Any, codec: CacheGenCodec, level: int, num_tokens: int
) -> None:
    chunk = tiny.chunk(codec.profile_id, num_tokens)
    cache = tiny.cache(chunk, torch.float32)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    stream.verify()
    decoded = codec.decode(stream, chunk, levels=level + 1)
    bounds = error_bounds(codec, cache, level)
    for bound, a, b in zip(
        bounds, (cache.keys, cache.values), (decoded.keys, decoded.values), strict=True
    ):
        assert ((a - b).abs().amax(dim=(2, 3)).numpy() <= bound).all()


def test_steps_follow_the_paper(codec: CacheGenCodec) -> None:
    steps = codec.profile.steps.astype(np.float64)
    for coarse, fine in pairwise(steps):
        assert np.allclose(coarse, 2 * fine)
    rms = steps[1] / np.array([LAYER_BINS[3 * layer // 4] for layer in range(4)])
    assert LEVEL_FACTORS[1] == 1
    assert np.ptp(rms, axis=1).max() < 0.2 * rms.max()  # all layers of this model are alike


def test_anchors_alone_give_each_token_its_anchor(tiny: Any, codec: CacheGenCodec) -> None:
    chunk = tiny.chunk(codec.profile_id)
    cache = tiny.cache(chunk, torch.float32)
    data = codec.encode(chunk, cache)
    end = Bitstream.parse(data).level_end(0)
    decoded = codec.decode(Bitstream.parse(data[:end]), chunk)
    values = cache.values[2].reshape(48, -1).numpy()
    expected = spread_anchors(restore_anchors(*quantise_anchors(values)), 48)
    assert np.array_equal(decoded.values[2].reshape(48, -1).numpy(), expected)
    with pytest.raises(TruncatedError):
        codec.decode(Bitstream.parse(data[: end - 1]), chunk)


def test_every_way_to_the_same_level_gives_the_same_cache(tiny: Any, codec: CacheGenCodec) -> None:
    chunk = tiny.chunk(codec.profile_id)
    data = codec.encode(chunk, tiny.cache(chunk))
    whole = Bitstream.parse(data)
    header = whole.header
    for level in range(codec.num_levels):
        asked = codec.decode(whole, chunk, levels=level + 1)
        prefix = codec.decode(Bitstream.parse(data[: whole.level_end(level)]), chunk)
        parts = {one: data[header.level_start(one) : header.level_end(one)] for one in {0, level}}
        apart = Bitstream.from_levels(data[: header.size_bytes], parts)
        fetched = codec.decode(apart, chunk)
        for other in (prefix, fetched):
            assert torch.equal(asked.keys, other.keys)
            assert torch.equal(asked.values, other.values)
        size = header.size_bytes + sum(len(part) for part in parts.values())
        assert fetch_bytes(header, level) == size


def test_finer_levels_are_better_and_larger(tiny: Any, codec: CacheGenCodec) -> None:
    chunk = tiny.chunk(codec.profile_id, 256)
    cache = tiny.cache(chunk, torch.float32)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    errors, sizes = [], []
    for level in range(codec.num_levels):
        decoded = codec.decode(stream, chunk, levels=level + 1)
        errors.append(float((decoded.keys - cache.keys).pow(2).mean()))
        sizes.append(fetch_bytes(stream.header, level))
    assert errors == sorted(errors, reverse=True)
    assert sizes == sorted(sizes)
    assert errors[-1] < errors[0] / 100


def test_any_finite_input_round_trips(tiny: Any, codec: CacheGenCodec) -> None:
    """Far beyond what the profile has seen: escapes carry the values."""
    chunk = tiny.chunk(codec.profile_id)
    for dtype, scale in (
        (torch.float32, 1e36),
        (torch.float32, 3e-41),
        (torch.float16, 200.0),
        (torch.bfloat16, 1e36),
    ):
        cache = tiny.cache(chunk, dtype, scale=scale)
        cache.keys[1, 3, 0, 0] = torch.finfo(dtype).max
        cache.keys[2, 10] = torch.finfo(dtype).min
        cache.values[0, 5] = 0
        assert cache.keys.isfinite().all()
        stream = Bitstream.parse(codec.encode(chunk, cache))
        decoded = codec.decode(stream, chunk, dtype=dtype)
        assert decoded.dtype == dtype
        assert decoded.keys.isfinite().all()
        bounds = error_bounds(codec, cache, codec.num_levels - 1)
        error = (decoded.keys.double() - cache.keys.double()).abs().amax(dim=(2, 3)).numpy()
        rounding = torch.finfo(dtype).eps * cache.keys.double().abs().amax().item()
        assert (error <= bounds[0] + rounding).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_refused(tiny: Any, codec: CacheGenCodec, bad: float) -> None:
    chunk = tiny.chunk(codec.profile_id)
    cache = tiny.cache(chunk)
    cache.values[3, 47, 1, 7] = bad
    with pytest.raises(UnsupportedError, match="finite"):
        codec.encode(chunk, cache)
    with pytest.raises(UnsupportedError, match="finite"):
        CacheGenProfile.fit(tiny.spec, [cache])


def test_absent_tokens(tiny: Any, codec: CacheGenCodec) -> None:
    chunk = tiny.chunk(codec.profile_id, index=1)
    cache = tiny.cache(chunk, torch.float32, absences=(0, 13, 48, 47))
    stream = Bitstream.parse(codec.encode(chunk, cache))
    out = KVCache(torch.full_like(cache.keys, 3), torch.full_like(cache.keys, 3), chunk.start)
    decoded = codec.decode(stream, chunk, out=out)
    assert decoded.valid_from == cache.valid_from
    assert decoded.keys is out.keys
    for layer, absent in enumerate((0, 13, 48, 47)):
        assert not decoded.keys[layer, :absent].any()
    assert float((decoded.keys - cache.keys).abs().max()) < 0.2


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_any_number_of_layers(tiny: Any, layers: int) -> None:
    small = type(tiny).with_layers(layers)
    calibration = small.cache(small.chunk(bytes(16)))
    codec = CacheGenCodec(small.spec, CacheGenProfile.fit(small.spec, [calibration]))
    chunk = small.chunk(codec.profile_id)
    cache = small.cache(chunk, torch.float32)
    decoded = codec.decode(Bitstream.parse(codec.encode(chunk, cache)), chunk)
    assert float((decoded.values - cache.values).abs().max()) < 0.2


def test_what_decoding_refuses(tiny: Any, codec: CacheGenCodec) -> None:
    chunk = tiny.chunk(codec.profile_id)
    stream = Bitstream.parse(codec.encode(chunk, tiny.cache(chunk)))
    with pytest.raises(MismatchError, match="at least 1 level"):
        codec.decode(stream, chunk, levels=0)
    with pytest.raises(MismatchError, match="found a cache of"):
        codec.decode(stream, chunk, out=KVCache.empty(4, 32, 2, 8))
    other = CacheGenProfile.fit(tiny.spec, [tiny.cache(chunk)])
    with pytest.raises(MismatchError, match="profile"):
        CacheGenCodec(tiny.spec, other).decode(stream, chunk)


def test_profile_round_trip(tiny: Any, profile: CacheGenProfile) -> None:
    again = CacheGenProfile.from_bytes(profile.to_bytes())
    assert again.profile_id == profile.profile_id
    assert np.array_equal(again.steps, profile.steps)
    again.check_for(tiny.spec)
    with pytest.raises(MismatchError, match="model"):
        again.check_for(replace(tiny.spec, fingerprint=bytes(16)))
    with pytest.raises(MismatchError, match="shape"):
        again.check_for(replace(tiny.spec, num_layers=3))


def test_tables_beat_a_single_one(tiny: Any, profile: CacheGenProfile) -> None:
    """Tables fitted on other text code this model's symbols well: per-channel models pay off."""
    chunk = tiny.chunk(profile.profile_id, 256)
    cache = tiny.cache(chunk, torch.float32)
    pooled = _arrays(profile)
    for name in [n for n in pooled if "freqs" in n]:
        table = normalise(pooled[name].astype(np.int64).sum(axis=(0, 1, 2)))
        pooled[name] = np.broadcast_to(table, pooled[name].shape).copy()
    single = CacheGenProfile.from_bytes(save(pooled))
    sizes = [
        len(CacheGenCodec(tiny.spec, p).encode(tiny.chunk(p.profile_id, 256), cache))
        for p in (profile, single)
    ]
    assert sizes[0] < sizes[1]


def _arrays(profile: CacheGenProfile) -> dict[str, np.ndarray]:
    deltas = {f"delta_freqs_{i}": freqs for i, freqs in enumerate(profile.delta_freqs)}
    model = np.frombuffer(profile.model, np.uint8)
    fixed = {"model": model, "steps": profile.steps, "anchor_freqs": profile.anchor_freqs}
    return {name: array.copy() for name, array in {**fixed, **deltas}.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model", lambda a: a[:15]),
        ("steps", lambda a: a * np.float32(np.nan)),
        ("steps", lambda a: a * np.float32(0)),
        ("steps", lambda a: -a),
        ("steps", lambda a: a[:0]),
        ("steps", lambda a: a[:3]),
        ("steps", lambda a: np.repeat(a, 5, axis=0)),
        ("steps", lambda a: a[:, :, :3]),
        ("steps", lambda a: a.astype(np.float64)),
        ("anchor_freqs", lambda a: a[..., :254]),
        ("anchor_freqs", lambda a: a[:1]),
        ("anchor_freqs", lambda a: a + 1),
        ("anchor_freqs", lambda a: a.astype(np.float32)),
        ("anchor_freqs", lambda a: np.where(a == a.max(), 0, a).astype(np.uint16)),
        ("delta_freqs_0", lambda a: a[..., :-1]),
        ("delta_freqs_0", lambda a: a[:, :1]),
        ("delta_freqs_0", lambda a: a[0]),
        ("delta_freqs_3", lambda a: np.zeros_like(a)),
        ("delta_freqs_3", lambda a: None),
        ("surplus", lambda a: np.zeros(3, np.uint8)),
        ("surplus", lambda a: np.zeros(3, np.float16)),
    ],
)
def test_wrong_profiles_are_refused(profile: CacheGenProfile, name: str, change: Any) -> None:
    arrays = _arrays(profile)
    changed = change(arrays.pop(name, None))
    if changed is not None:
        arrays[name] = np.ascontiguousarray(changed)
    with pytest.raises(FormatError):
        CacheGenProfile.from_bytes(save(arrays))


def test_bytes_that_are_no_profile() -> None:
    for data in (b"", b"\0" * 8, b"\xff" * 100, b"{}"):
        with pytest.raises(FormatError):
            CacheGenProfile.from_bytes(data)


def test_nothing_to_profile(tiny: Any) -> None:
    with pytest.raises(MismatchError):
        CacheGenProfile.fit(tiny.spec, [])
