"""Groups of two stages: they decode to what their product as one matrix says, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.columns import Scaled
from kdn.codec.klt.device import EVERY
from kdn.codec.klt.duals import dense_rows, dual_rows
from kdn.codec.klt.stages import TwoStageTransform
from kdn.codec.klt.transform import PackedComponents
from kdn.errors import FormatError
from tests.codec import klt_reference
from tests.codec.klt_profile import LEVELS, make_profile, parts, without_coarse

LEADING = 24  # of 32 columns that a layer of the tiny model has
COUNTS = [LEADING, LEADING - 1]  # of the two layers of each group


@pytest.fixture(scope="module")
def codec(tiny: Any) -> KltCodec:
    return KltCodec(tiny.spec, make_profile(tiny.spec, leading=LEADING))


def case(codec: KltCodec, tiny: Any, index: int = 0) -> tuple[Chunk, KVCache]:
    chunk = tiny.chunk(codec.profile_id, 48, index)
    return chunk, tiny.cache(chunk, torch.float32)


def coded(codec: KltCodec, tiny: Any, index: int = 0) -> tuple[Bitstream, Chunk, KVCache]:
    chunk, cache = case(codec, tiny, index)
    return Bitstream.parse(codec.encode(chunk, cache)), chunk, cache


@pytest.mark.parametrize("index", [0, 1])
def test_decoding_is_that_of_both_stages_as_one_matrix(
    codec: KltCodec, tiny: Any, index: int
) -> None:
    """The reference multiplies in float64 and rounds nothing to bytes, neither components nor
    what is between the stages: together 1 % of values that are hundreds of steps large."""
    stream, chunk, _ = coded(codec, tiny, index)
    for levels in range(1, LEVELS):
        found = codec.decode(stream, chunk, levels=levels)
        wanted = klt_reference.decode(codec, stream, chunk, levels)
        error = torch.stack([found.keys - wanted.keys, found.values - wanted.values])
        size = torch.stack([wanted.keys, wanted.values]).square().mean().sqrt()
        assert error.square().mean().sqrt() < 0.015 * size


def test_the_last_level_keeps_its_bound(codec: KltCodec, tiny: Any) -> None:
    for index in (0, 1):
        stream, chunk, cache = coded(codec, tiny, index)
        found = codec.decode(stream, chunk)
        worst = max(
            (found.keys - cache.keys).abs().max(), (found.values - cache.values).abs().max()
        )
        assert worst <= 0.5 * max(2 * 0.01, 0.02) * 1.01
        # What was rounded between the stages is what writer and reader both have.
        wanted = klt_reference.decode(codec, stream, chunk, LEVELS)
        torch.testing.assert_close(found.keys.double(), wanted.keys, rtol=0, atol=2e-3)


def test_a_basis_may_have_precise_components_alone(tiny: Any) -> None:
    kept = without_coarse(*parts(tiny.spec, leading=LEADING))
    codec = KltCodec(tiny.spec, Profile.build(*kept))
    stream, chunk, cache = coded(codec, tiny)
    for levels in range(1, LEVELS + 1):
        found = codec.decode(stream, chunk, levels=levels)
        wanted = klt_reference.decode(codec, stream, chunk, levels)
        torch.testing.assert_close(found.keys.double(), wanted.keys, rtol=0, atol=0.05)
    assert (found.values - cache.values).abs().max() <= 0.5 * 0.02 * 1.01


def test_a_simulation_is_what_the_stream_decodes_to(codec: KltCodec, tiny: Any) -> None:
    stream, chunk, cache = coded(codec, tiny, 1)
    for levels in range(1, LEVELS + 1):
        found = codec.simulate(chunk, cache, levels)
        wanted = codec.decode(stream, chunk, levels=levels)
        assert torch.equal(found.keys, wanted.keys)
        assert torch.equal(found.values, wanted.values)


def test_some_heads_are_as_among_all(codec: KltCodec, tiny: Any) -> None:
    stream, chunk, _ = coded(codec, tiny)
    for levels in (2, LEVELS):
        whole = codec.decode(stream, chunk, levels=levels)
        for heads in (range(1), range(1, 2)):
            own = codec.decode_heads(stream, chunk, heads, levels=levels, dtype=torch.float32)
            assert torch.equal(own.keys, whole.keys[:, :, heads.start : heads.stop])
            assert torch.equal(own.values, whole.values[:, :, heads.start : heads.stop])


def test_analysis_is_the_dual_of_the_product(codec: KltCodec) -> None:
    for group in codec.profile.groups:
        rows = dense_rows(group.basis_tensors, torch.device("cpu"), group.leading)
        dual = dual_rows(group, torch.device("cpu"))
        torch.testing.assert_close(dual @ rows.T, torch.eye(len(rows)), rtol=0, atol=2e-3)


def test_the_product_sums_layer_by_layer(codec: KltCodec) -> None:
    """Written out: what each component adds to each column of each layer."""
    group = codec.profile.groups[1]
    assert group.rows is not None
    assert group.rows_scale is not None
    rows = dense_rows(group.basis_tensors, torch.device("cpu"), group.leading).numpy()
    count, width = len(group.leading), group.rows.shape[1] // 2
    for component, column in ((0, 0), (3, 17), (20, 40), (43, 63)):
        side, layer, place = column // (count * width), column // width % count, column % width
        places = slice(*((0, LEADING), (LEADING, 2 * LEADING - 1))[layer])
        inner = group.basis[component, places].astype(np.float64)
        own = group.rows[places, side * width + place] * group.rows_scale[places].astype(float)
        expected = inner @ own * group.basis_scale[component]
        assert rows[len(group.fine) + component, column] == pytest.approx(expected, rel=1e-4)


def sums(transform: TwoStageTransform, packed: PackedComponents) -> npt.NDArray[np.float64]:
    def value(part: Scaled) -> npt.NDArray[np.float64]:
        scale = part.token_scale[:, None].astype(np.float64) * part.column_scale
        return part.whole * scale

    coarse = transform.coarse(packed)
    return np.concatenate([value(coarse(own)) for own in transform.at_once], axis=1)


def test_rounding_between_the_stages_errs_by_half_a_unit(codec: KltCodec) -> None:
    transform = codec._transforms[0]
    assert isinstance(transform, TwoStageTransform)
    group, rng = transform.group, np.random.default_rng(0)
    assert group.rows is not None
    codes = rng.integers(-127, 128, (len(group.basis), 20)).astype(np.int8)
    scale = rng.uniform(0.5, 2, 20).astype(np.float32)
    packed = PackedComponents(np.zeros((0, 20), np.float32), codes, scale)
    leading = codes.T.astype(np.float64) @ group.basis * scale[:, None]
    exact = klt_reference.second_stage(group, leading) / group.weight
    rounded = klt_reference.second_stage(group, leading, rounded=True) / group.weight
    found = sums(transform, packed)
    # A tie may fall the other way.
    assert np.abs(found - rounded).mean() < 1e-4 * np.abs(exact).mean()
    assert 0 < np.abs(found - exact).mean() < 0.01 * np.abs(exact).mean()


def test_no_components_are_no_sum(codec: KltCodec) -> None:
    transform = codec._transforms[0]
    assert isinstance(transform, TwoStageTransform)
    nothing = PackedComponents(
        np.zeros((0, 5), np.float32), np.zeros((0, 5), np.int8), np.ones(5, np.float32)
    )
    assert not sums(transform, nothing).any()


def test_one_stage_is_written_as_before(tiny: Any) -> None:
    profile = make_profile(tiny.spec)
    assert profile.meta["version"] == 3
    assert all(group.rows is None for group in profile.groups)


def test_stages_may_differ_between_groups(tiny: Any) -> None:
    """One group of two stages beside one of one."""
    meta, tensors = parts(tiny.spec, leading=LEADING)
    plain = parts(tiny.spec)[1]
    for name in ("basis", "basis_scale"):
        tensors[f"g0.{name}"] = plain[f"g0.{name}"]
    for name in ("rows", "rows_scale"):
        del tensors[f"g0.{name}"]
    codec = KltCodec(tiny.spec, Profile.build(meta | {"leading": [[], COUNTS]}, tensors))
    stream, chunk, cache = coded(codec, tiny)
    assert (codec.decode(stream, chunk).keys - cache.keys).abs().max() < 0.0101


def test_kernels_leave_the_last_level_and_encoding_to_cores(
    tiny: Any, codec: KltCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not round between the stages, and the last level corrects what is rounded there."""
    monkeypatch.setattr("kdn.codec.klt.gpu_encoding.find_spec", lambda name: object())
    chunk, cache = case(codec, tiny)
    on_gpu = KVCache(OnGpu(cache.keys), OnGpu(cache.values))  # type: ignore[arg-type]
    one_stage = KltCodec(tiny.spec, make_profile(tiny.spec))
    for own, suits in ((one_stage, True), (codec, False)):
        assert own._gpu._can(chunk, EVERY, LEVELS - 1)
        assert own._gpu._can(chunk, EVERY, LEVELS) is suits
        assert own._gpu_encoding.suits(chunk, on_gpu) is suits


class OnGpu:
    """A tensor that says it is on one."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize(
    "change",
    [
        {"leading": None},
        {"leading": {}},
        {"leading": 24},
        {"leading": [COUNTS]},
        {"leading": [COUNTS, 24]},
        {"leading": [COUNTS, {"0": 24, "1": 23}]},
        {"leading": [COUNTS, [24]]},
        {"leading": [COUNTS, [24, 23, 1]]},
        {"leading": [COUNTS, [47, 0]]},
        {"leading": [COUNTS, [48, -1]]},
        {"leading": [COUNTS, [33, 14]]},
        {"leading": [COUNTS, [24, 23.0]]},
        {"leading": [COUNTS, [46, True]]},
        {"leading": [COUNTS, [24, "23"]]},
        {"leading": [COUNTS, [24, [23]]]},
        {"leading": [COUNTS, [24, 12]]},
        {"leading": [[], COUNTS]},
        {"leading": "24"},
        {"version": 3},
        {"version": 5},
    ],
    ids=str,
)
def test_wrong_numbers_of_leading_components_are_refused(tiny: Any, change: dict[str, Any]) -> None:
    meta, tensors = parts(tiny.spec, leading=LEADING)
    Profile.build(meta, tensors)
    with pytest.raises(FormatError):
        Profile.build(meta | change, tensors)


def test_version_4_says_what_stages_it_has(tiny: Any) -> None:
    meta, tensors = parts(tiny.spec, leading=LEADING)
    del meta["leading"]
    with pytest.raises(FormatError, match="leading"):
        Profile.build(meta, tensors)


@pytest.mark.parametrize("name", ["rows", "rows_scale", "basis"])
def test_wrong_or_missing_tensors_are_refused(tiny: Any, name: str) -> None:
    meta, tensors = parts(tiny.spec, leading=LEADING)
    for spoilt in (tensors[f"g1.{name}"][:-1], tensors[f"g1.{name}"].astype(np.float64)):
        with pytest.raises(FormatError):
            Profile.build(meta, tensors | {f"g1.{name}": spoilt})
    del tensors[f"g1.{name}"]
    with pytest.raises(FormatError):
        Profile.build(meta, tensors)


def test_scales_of_rows_are_finite(tiny: Any) -> None:
    meta, tensors = parts(tiny.spec, leading=LEADING)
    tensors["g0.rows_scale"][3] = np.inf
    with pytest.raises(FormatError, match="finite"):
        Profile.build(meta, tensors)


def test_more_components_than_layers_have_are_refused(tiny: Any) -> None:
    """No reader solves for more than can be told apart, whatever a profile says."""
    meta, tensors = parts(tiny.spec, leading=LEADING)
    few = {
        f"g{g}.{name}": tensors[f"g{g}.{name}"][:20]
        for g in (0, 1)
        for name in ("rows", "rows_scale")
    }
    few |= {f"g{g}.basis": tensors[f"g{g}.basis"][:, :20] for g in (0, 1)}
    with pytest.raises(FormatError, match="at most 20"):
        Profile.build(meta | {"leading": [[10, 10], [10, 10]]}, tensors | few)
