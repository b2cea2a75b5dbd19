"""Means of what a level leaves out: coded, restored, and told by the profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.calibrate import tables
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile, gpu_encoding
from kdn.codec.klt.kinds import KIND_MEANS
from kdn.codec.klt.means import in_rows
from kdn.codec.klt.profile import MEAN_LANES, VERSION_OF_MEANS
from kdn.errors import FormatError
from tests.codec import klt_reference
from tests.codec.klt_profile import LEVELS, make_profile, parts
from tests.codec.targets import windowed

MADE: dict[str, dict[str, Any]] = {
    "one stage": {},
    "two stages": {"leading": 24},
    "in runs": {"leading": 24, "run_rows": 16},
    "of what no level codes": {"beyond": 8},
    "of what no level codes, two stages": {"leading": 24, "beyond": 8},
}
"""How profiles are made."""


@pytest.fixture(scope="module", params=MADE)
def codec(tiny: Any, request: pytest.FixtureRequest) -> KltCodec:
    return KltCodec(tiny.spec, make_profile(tiny.spec, means=True, **MADE[request.param]))


def coded(codec: KltCodec, tiny: Any, index: int = 0) -> tuple[Bitstream, Chunk, KVCache]:
    chunk = tiny.chunk(codec.profile_id, 48, index)
    cache = tiny.cache(chunk, torch.float32)
    return Bitstream.parse(codec.encode(chunk, cache)), chunk, cache


def test_a_level_has_the_means_of_what_it_leaves_out(codec: KltCodec, tiny: Any) -> None:
    stream, _, _ = coded(codec, tiny)
    found = {(e.level, e.group) for e in stream.header.entries if e.kind == KIND_MEANS}
    with_means = range(3 if has_more(codec) else 2)
    assert found == set(codec.means.parts()) == {(level, g) for level in with_means for g in (0, 1)}
    for level, index in found:
        left = len(codec.profile.groups[index].scale)
        left -= codec.profile.levels[level].num_components[index]
        data = stream.section(level, index, KIND_MEANS)
        assert len(codec.means.decode(level, index, data)) == left > 0


def has_more(codec: KltCodec) -> bool:
    """Whether there are components that no level codes."""
    return codec.profile.num_means(LEVELS - 2, 0) > 0


@pytest.mark.parametrize("levels", range(1, LEVELS + 1))
def test_a_simulation_is_what_the_stream_decodes_to(
    codec: KltCodec, tiny: Any, levels: int
) -> None:
    stream, chunk, cache = coded(codec, tiny)
    simulated = codec.simulate(chunk, cache, levels)
    found = codec.decode(stream, chunk, levels=levels)
    torch.testing.assert_close(simulated.keys, found.keys)
    torch.testing.assert_close(simulated.values, found.values)


def moved_by_means(codec: KltCodec, stream: Bitstream, chunk: Chunk, levels: int) -> torch.Tensor:
    """How far each value is from where it were without means [layer, token, channel]."""
    plain = KltCodec(codec.spec, codec.profile)
    plain.means.count = lambda level, group: 0  # type: ignore[method-assign]
    with_means, without = (c.decode(stream, chunk, levels=levels).values for c in (codec, plain))
    return (with_means - without).flatten(2)


@pytest.mark.parametrize("levels", range(1, LEVELS + 1))
@pytest.mark.parametrize("index", [0, 1])
def test_all_tokens_but_the_first_are_moved_alike(
    codec: KltCodec, tiny: Any, index: int, levels: int
) -> None:
    stream, chunk, _ = coded(codec, tiny, index)
    moved = moved_by_means(codec, stream, chunk, levels)
    first = codec.profile.num_sinks_of(chunk)
    assert bool(first) == (index == 0)
    assert not first or moved[:, :first].abs().max() < 1e-5  # but for rounding
    expected = torch.zeros(moved.shape[0], moved.shape[2])
    for group, found in enumerate(codec.profile.groups):
        if codec.profile.num_means(levels - 1, group):
            means = klt_reference.means(codec, stream, group, levels, chunk.num_tokens)
            values = means.reshape(2, -1, moved.shape[2])[1]
            expected[slice(*found.layers)] = torch.from_numpy(values).float()
    assert expected.any() == (levels <= (3 if has_more(codec) else 2))
    every = expected[:, None].expand_as(moved[:, first:])
    torch.testing.assert_close(moved[:, first:], every, rtol=1e-4, atol=1e-4)


def test_means_of_errors_are_gone(tiny: Any) -> None:
    """Of values that lie in the span of the components, to within the step of the means."""
    codec = KltCodec(tiny.spec, make_profile(tiny.spec, means=True))
    chunk = tiny.chunk(codec.profile_id, 48, 1)
    spread = tiny.cache(chunk, torch.float32)
    analysis = codec.analyser.analyse(chunk, spread)
    for level, index in codec.means.parts():
        exact = codec.means.exact(level, index, analysis.groups[index].exact, analysis.classes)
        whole = codec.means.round(exact)
        restored = codec.means.restore(level, whole, chunk.num_tokens)
        step = codec.profile.finest_step * 3 ** (LEVELS - 2 - level)
        sizes = 2.0 ** (-(analysis.classes.astype(np.float64) - 2) / 2)
        own = codec.profile.levels[level].num_components[index]
        true = (analysis.groups[index].exact[own:] * sizes).mean(axis=1)
        true *= codec.profile.finest_step
        assert np.abs(restored - true).max() <= 0.501 * step / chunk.num_tokens**0.5
        assert np.abs(whole).max() > 1


def test_some_heads_are_as_among_all(codec: KltCodec, tiny: Any) -> None:
    stream, chunk, _ = coded(codec, tiny, 1)
    for levels in (1, 2):
        whole = codec.decode(stream, chunk, levels=levels)
        for heads in (range(1), range(1, 2)):
            own = codec.decode_heads(stream, chunk, heads, levels=levels, dtype=torch.float32)
            assert torch.equal(own.keys, whole.keys[:, :, heads.start : heads.stop])
            assert torch.equal(own.values, whole.values[:, :, heads.start : heads.stop])


def test_tables_follow_what_is_counted(tiny: Any) -> None:
    meta, tensors = parts(tiny.spec, means=True)
    meta["finest_step"] = 1.0  # otherwise all would be escapes
    codec = KltCodec(tiny.spec, Profile.build(meta, tensors))
    chunks = [tiny.chunk(codec.profile_id, 48, index) for index in range(3)]
    samples = [tables.quantise(codec, c, tiny.cache(c, torch.float32)) for c in chunks]
    found = tables.count_means(codec, samples)
    better = KltCodec(tiny.spec, Profile.build(meta, tensors | found))
    sizes = []
    for one in (codec, better):
        total = 0
        for sample in samples:
            for level, index in one.means.parts():
                exact = one.means.exact(
                    level, index, sample.analysis.groups[index].exact, sample.classes
                )
                whole = one.means.round(exact)
                data = one.means.encode(level, index, whole)
                assert np.array_equal(one.means.decode(level, index, memoryview(data)), whole)
                total += len(data)
        sizes.append(total)
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("leading", [0, 24])
def test_the_last_level_repairs_what_no_level_codes(tiny: Any, leading: int) -> None:
    """Also of components that are summed precisely."""
    meta, tensors = parts(tiny.spec, leading=leading, means=True)
    meta["num_components"] = [[2, 2]] * (LEVELS - 1) + [meta["num_components"][-1]]
    sizes = [len(tensors[f"g{group}.scale"]) for group in range(2)]
    kept = {k: t for k, t in tensors.items() if not k.startswith(("level", "mean", "token"))}
    flat = tables.flat_tables(LEVELS, meta["num_components"]) | tables.flat_means(meta, sizes)
    codec = KltCodec(tiny.spec, Profile.build(meta, flat | kept))
    assert all(codec.profile.num_uncoded)
    assert len(codec.profile.groups[0].fine) > 2
    stream, chunk, cache = coded(codec, tiny)
    found = codec.decode(stream, chunk, levels=LEVELS)
    # Half of a step of 0.01, which a token's class may double; and rounding.
    assert float((found.values - cache.values).abs().max()) < 0.011


@pytest.mark.parametrize(("beyond", "suits"), [(0, True), (8, False)])
def test_a_gpu_leaves_such_profiles_encoding_to_the_cores(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, beyond: int, suits: bool
) -> None:
    monkeypatch.setattr(gpu_encoding, "find_spec", lambda _: True)
    profile = make_profile(tiny.spec, means=True, beyond=beyond)
    cache: Any = SimpleNamespace(keys=SimpleNamespace(is_cuda=True), dtype=torch.float32)
    encoding = gpu_encoding.GpuEncoding(tiny.spec, profile)
    assert encoding.suits(tiny.chunk(profile.profile_id, 48), cache) is suits


def test_a_profile_tells_of_its_means(tiny: Any) -> None:
    profile = make_profile(tiny.spec, means=True)
    assert not any(profile.num_uncoded)
    assert set(make_profile(tiny.spec, means=True, beyond=8).num_uncoded) == {8}
    assert profile.has_means
    assert profile.windowed_from is profile.run_rows is None
    assert not make_profile(tiny.spec, run_rows=16).has_means
    assert [profile.num_means(level, 0) for level in range(LEVELS)][2:] == [0, 0]
    assert Profile.from_bytes(profile.to_bytes()).profile_id == profile.profile_id


def test_means_go_with_runs_and_windows(tiny: Any) -> None:
    spec = windowed(tiny)
    profile = make_profile(spec, in_parts=True, run_rows=16, means=True)
    assert (profile.windowed_from, profile.run_rows) == (1, 16)


@pytest.mark.parametrize(
    "change",
    [{"run_rows": rows} for rows in (0, -16, 12, 16.0, True, "16")]
    + [{"windowed_from": border} for border in (-1, 2, True, "0")]
    + [{"leading": leading} for leading in (None, [], [[0], [1]])]
    + [{"version": version} for version in (VERSION_OF_MEANS + 1, 7.0, "7", True, 2)],
    ids=str,
)
def test_wrong_parameters_are_refused(tiny: Any, change: dict[str, Any]) -> None:
    meta, tensors = parts(tiny.spec, means=True)
    Profile.build(meta, tensors)
    with pytest.raises(FormatError):
        Profile.build(meta | change, tensors)


@pytest.mark.parametrize("name", ["mean.freqs", "level0.g0.means.scale", "level1.g1.means.scale"])
def test_wrong_or_missing_tensors_are_refused(tiny: Any, name: str) -> None:
    meta, tensors = parts(tiny.spec, means=True)
    without = {key: one for key, one in tensors.items() if key != name}
    too_many = tensors | {name: np.concatenate([tensors[name], tensors[name][:1]])}
    other_type = tensors | {name: tensors[name].astype(np.int32)}
    for spoilt in (without, too_many, other_type):
        with pytest.raises(FormatError):
            Profile.build(meta, spoilt)


def test_scale_classes_and_tables_are_within_bounds(tiny: Any) -> None:
    meta, tensors = parts(tiny.spec, means=True)
    beyond = np.full_like(tensors["level0.g0.means.scale"], 64)
    uneven = tensors["mean.freqs"] + np.uint16(1)
    for spoilt in ({"level0.g0.means.scale": beyond}, {"mean.freqs": uneven}):
        with pytest.raises(FormatError):
            Profile.build(meta, tensors | spoilt)


def test_rows_are_filled() -> None:
    assert in_rows(np.arange(9)).tolist() == [list(range(MEAN_LANES)), [8] + [0] * 7]
    assert in_rows(np.arange(0)).shape == (0, MEAN_LANES)
