"""The codec as a whole, on a model that never ran (what real ones do is in test_klt_model.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.errors import FormatError, KdnError, MismatchError, UnsupportedError
from tests.codec.klt_profile import LEVELS, make_profile, parts


@pytest.fixture(scope="module")
def codec(tiny: Any) -> KltCodec:
    return KltCodec(tiny.spec, make_profile(tiny.spec))


def case(codec: KltCodec, tiny: Any, index: int = 0, **options: Any) -> tuple[Chunk, KVCache]:
    chunk = tiny.chunk(codec.profile_id, 48, index)
    return chunk, tiny.cache(chunk, torch.float32, **options)


def errors(codec: KltCodec, chunk: Chunk, cache: KVCache, levels: int) -> torch.Tensor:
    stream = Bitstream.parse(codec.encode(chunk, cache))
    decoded = codec.decode(stream, chunk, levels=levels)
    return torch.stack([decoded.keys - cache.keys, decoded.values - cache.values])


@pytest.mark.parametrize("index", [0, 1])
def test_levels_refine_to_a_bound(codec: KltCodec, tiny: Any, index: int) -> None:
    chunk, cache = case(codec, tiny, index)
    sizes = [errors(codec, chunk, cache, k + 1).square().mean().item() for k in range(LEVELS)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 4
    # The last level is within half of its step; a token's class at most doubles that, and the
    # first tokens have a step of their own.
    worst = errors(codec, chunk, cache, LEVELS).abs().max().item()
    assert worst <= 0.5 * max(2 * 0.01, 0.02) * 1.01


def test_prefix_of_bytes_is_prefix_of_levels(codec: KltCodec, tiny: Any) -> None:
    chunk, cache = case(codec, tiny)
    data = codec.encode(chunk, cache)
    whole = Bitstream.parse(data)
    for levels in range(1, LEVELS + 1):
        cut = Bitstream.parse(data[: whole.level_end(levels - 1)])
        a, b = codec.decode(cut, chunk), codec.decode(whole, chunk, levels=levels)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_encoding_is_deterministic(codec: KltCodec, tiny: Any) -> None:
    chunk, cache = case(codec, tiny)
    again = KltCodec(tiny.spec, make_profile(tiny.spec))
    assert codec.encode(chunk, cache) == again.encode(chunk, cache)


def test_all_at_once_is_as_one_by_one(codec: KltCodec, tiny: Any) -> None:
    sizes = (256, 256, 48)
    chunks = [tiny.chunk(codec.profile_id, n, index) for index, n in enumerate(sizes)]
    caches = [tiny.cache(chunk, torch.float32) for chunk in chunks]
    whole = KVCache(
        torch.cat([c.keys for c in caches], dim=1), torch.cat([c.values for c in caches], dim=1)
    )
    data = codec.encode_all(chunks, whole)
    assert data == [codec.encode(*pair) for pair in zip(chunks, caches, strict=True)]
    streams = [Bitstream.parse(part) for part in data]
    out = KVCache(torch.empty_like(whole.keys), torch.empty_like(whole.values))
    codec.decode_all(streams, chunks, out, levels=2)
    for stream, chunk in zip(streams, chunks, strict=True):
        alone, part = codec.decode(stream, chunk, levels=2), out.slice(chunk.start, chunk.end)
        torch.testing.assert_close(part.keys, alone.keys)
        torch.testing.assert_close(part.values, alone.values)


def test_absent_tokens_stay_absent(codec: KltCodec, tiny: Any) -> None:
    absences = (0, 5, 48, 0)
    chunk, cache = case(codec, tiny, 1, absences=absences)
    decoded = codec.decode(Bitstream.parse(codec.encode(chunk, cache)), chunk)
    assert decoded.valid_from == cache.valid_from
    for layer, absent in enumerate(absences):
        assert not decoded.keys[layer, :absent].any()
        assert not decoded.values[layer, :absent].any()
        rest = decoded.values[layer, absent:] - cache.values[layer, absent:]
        assert rest.numel() == 0 or rest.abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decodes_into_what_it_is_given(codec: KltCodec, tiny: Any, dtype: torch.dtype) -> None:
    chunk, cache = case(codec, tiny)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    reference = codec.decode(stream, chunk)
    keys = torch.full(cache.keys.shape, torch.nan, dtype=dtype)
    out = KVCache(keys, keys.clone(), chunk.start)
    codec.decode(stream, chunk, out=out)
    torch.testing.assert_close(out.keys, reference.keys.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_refuses_what_is_not_finite(codec: KltCodec, tiny: Any, bad: float) -> None:
    chunk, cache = case(codec, tiny)
    cache.values[2, 7, 1, 3] = bad
    with pytest.raises(UnsupportedError, match="finite"):
        codec.encode(chunk, cache)


def test_far_values_survive_or_are_refused(codec: KltCodec, tiny: Any) -> None:
    chunk, cache = case(codec, tiny, 1)
    cache.values[1, 9, 0, 2] = 250.0
    assert errors(codec, chunk, cache, LEVELS).abs().max() < 0.05
    cache.values[1, 9, 0, 2] = 1e30
    with pytest.raises(UnsupportedError, match="too far"):
        codec.encode(chunk, cache)


def test_other_tokens_model_or_profile_are_refused(codec: KltCodec, tiny: Any) -> None:
    chunk, cache = case(codec, tiny)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    with pytest.raises(MismatchError):
        codec.decode(stream, tiny.reseed("else").chunk(codec.profile_id, 48))
    other = KltCodec(tiny.spec, make_profile(tiny.spec, seed=1))
    with pytest.raises(MismatchError):
        other.decode(stream, chunk)


def test_token_ids_beyond_the_vocabulary_are_refused(codec: KltCodec, tiny: Any) -> None:
    chunk, cache = case(codec, tiny)
    object.__setattr__(chunk, "tokens", chunk.tokens + np.uint32(tiny.spec.vocab_size))
    with pytest.raises(MismatchError, match="token ids"):
        codec.encode(chunk, cache)


@pytest.mark.parametrize(
    "spoil",
    [
        {"g0.weight": 0.0},
        {"predict.bias": np.nan},
        {"level1.freqs": 1},
        {"g1.scale": 200},
        {"g0.gain": -1.0},
        {"fix.step": -1.0},
    ],
    ids=str,
)
def test_spoilt_profiles_are_refused(tiny: Any, spoil: dict[str, float]) -> None:
    meta, tensors = parts(tiny.spec)
    for name, value in spoil.items():
        tensors[name] = np.full_like(tensors[name], value)
    with pytest.raises(FormatError):
        Profile.build(meta, tensors)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"levels": 1},
        {"levels": "4"},
        {"groups": [[0, 1], [2, 4]]},
        {"groups": [[0.0, 2.0], [2.0, 4.0]]},
        {"num_layers": 4.0},
        {"finest_step": 0},
        {"finest_step": 1e-60},
        {"expected": [1, 2, 3, 4]},
        {"expected": [{"kld": "x"}] * LEVELS},
        {"expected": [{"kld": -1.0}] * LEVELS},
        {"model": "00"},
        {"num_components": [[1, 1]]},
        {"num_kv_heads": 3},
    ],
    ids=str,
)
def test_wrong_meta_data_is_refused(tiny: Any, change: dict[str, Any]) -> None:
    meta, tensors = parts(tiny.spec)
    with pytest.raises(FormatError):
        Profile.build(meta | change, tensors)


def test_components_that_are_not_finite_are_refused(tiny: Any) -> None:
    """Compiled loops index by what they are rounded to."""
    codec = KltCodec(tiny.spec, make_profile(tiny.spec))
    for bad in (np.nan, np.inf):
        with pytest.raises(UnsupportedError, match="finite"):
            codec.analyser.round(np.array([[1.0, bad]], np.float32))


def test_bytes_that_are_no_profile() -> None:
    for data in (b"", b"\0" * 8, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"):
        with pytest.raises(KdnError):
            Profile.from_bytes(data)


def test_profile_bytes_are_stable(tiny: Any) -> None:
    profile = make_profile(tiny.spec)
    again = Profile.from_bytes(profile.to_bytes())
    assert again.profile_id == profile.profile_id
