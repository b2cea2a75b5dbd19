"""Sizes by the stated rule, for shapes that people run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kdn.calibrate.run import CalibrationOptions, calibrate
from kdn.calibrate.sizes import (
    MOST_COLUMNS,
    Shape,
    Sizes,
    chosen_sizes,
    layer_groups,
    profile_bytes,
    shape_of,
    sums_bytes,
)
from kdn.codec.profiles import SHIPPED
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

GB = 10**9
SMOLLM2 = Shape(30, 384, 49_152, 576, 134_515_008, 106_203_456)
LLAMA_8B = Shape(32, 2048, 128_256, 4096, 8_030_261_248, 6_979_588_096)
LLAMA_70B = Shape(80, 2048, 128_256, 8192, 70_553_706_496, 68_452_360_192)
LLAMA_2_7B = Shape(32, 8192, 32_000, 4096, 6_738_415_616, 6_476_271_616)
GEMMA_3_4B = Shape(34, 2048, 262_208, 2560, 3_880_099_328, 3_208_846_848)


def part_of_weights(shape: Shape, sizes: Sizes) -> float:
    return profile_bytes(shape, sizes) / (2 * shape.num_weights)


def test_smollm2_gets_what_is_shipped_for_it() -> None:
    sizes = chosen_sizes(SMOLLM2, 8 * GB)
    assert sizes == Sizes(group_layers=15, components=2200)
    usual = CalibrationOptions()
    assert all(getattr(usual, name) == value for name, value in vars(sizes).items())
    (shipped,) = SHIPPED.glob("8343b7cf*.safetensors")
    assert profile_bytes(SMOLLM2, sizes) == pytest.approx(shipped.stat().st_size, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "layers", "most_bytes"),
    [(LLAMA_8B, 4, 320_000_000), (LLAMA_70B, 4, 700_000_000), (GEMMA_3_4B, 4, 160_000_000)],
)
def test_profiles_stay_small_beside_the_weights(shape: Shape, layers: int, most_bytes: int) -> None:
    sizes = chosen_sizes(shape, 100 * GB)
    assert sizes.group_layers == layers
    assert sizes.group_layers * shape.layer_columns <= MOST_COLUMNS
    assert part_of_weights(shape, sizes) <= 0.02
    assert profile_bytes(shape, sizes) <= most_bytes


def operations_of(shape: Shape, sizes: Sizes) -> float:
    """Multiplications that decoding a value in two stages takes, with all components."""
    coarse = sizes.components - sizes.fine_components
    return sizes.fine_components + sizes.leading * (1 + coarse / shape.layer_columns)


def test_few_operations_are_two_stages_of_more_layers() -> None:
    for shape, num_layers in ((SMOLLM2, 15), (LLAMA_8B, 8), (LLAMA_70B, 8), (GEMMA_3_4B, 7)):
        for operations in (512, 1088):
            sizes = chosen_sizes(shape, 200 * GB, operations)
            if not sizes.leading:  # one stage takes no more
                assert sizes.components <= operations
                continue
            assert sizes.group_layers == num_layers
            is_wide = num_layers * shape.layer_columns > MOST_COLUMNS
            assert sizes.run_rows == (256 if is_wide else 0)
            assert 0.97 * operations < operations_of(shape, sizes) <= operations
            assert sizes.components - 64 == pytest.approx(0.3 * num_layers * sizes.leading, rel=0.1)
            one = chosen_sizes(shape, 200 * GB)
            assert profile_bytes(shape, sizes) < 1.01 * profile_bytes(shape, one)
    assert chosen_sizes(LLAMA_8B, 200 * GB, 1088).leading == 600
    assert chosen_sizes(SMOLLM2, 8 * GB, 2200) == chosen_sizes(SMOLLM2, 8 * GB)


def test_too_few_operations_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="allow more"):
        chosen_sizes(LLAMA_8B, 100 * GB, 65)
    with pytest.raises(UnsupportedError, match="allow more"):
        chosen_sizes(Shape(8, 20_000, 32_000, 4096, 10**10, 10**10), 900 * GB, 500)


def test_a_layer_wider_than_a_group_is_a_group() -> None:
    """With many KV heads 2 % would be too little to code with."""
    sizes = chosen_sizes(LLAMA_2_7B, 200 * GB)
    assert sizes.group_layers == 1
    assert sizes.components == 8192 // 8
    assert part_of_weights(LLAMA_2_7B, sizes) < 0.03


def test_little_memory_makes_narrow_groups_and_then_an_error() -> None:
    wide, narrow = (chosen_sizes(LLAMA_8B, memory) for memory in (100 * GB, 8 * GB))
    assert narrow.group_layers < wide.group_layers
    assert sums_bytes(LLAMA_8B, narrow) <= 4 * GB
    with pytest.raises(UnsupportedError, match=r"at least .* GB of free memory"):
        chosen_sizes(LLAMA_8B, 2 * GB)


def test_decoding_stays_cheaper_than_reading() -> None:
    """A model of few weights and many columns."""
    shape = Shape(12, 2048, 32_000, 512, 60_000_000, 44_000_000)
    sizes = chosen_sizes(shape, 100 * GB)
    assert sizes.components == 44_000_000 // 4 // shape.columns


@pytest.mark.parametrize(("layers", "most"), [(30, 21), (26, 4), (7, 3), (5, 9), (4, 1)])
def test_groups_cover_all_layers_and_are_nearly_equal(layers: int, most: int) -> None:
    groups = layer_groups(layers, most)
    assert [first for first, _ in groups] == [0, *(last for _, last in groups[:-1])]
    assert groups[-1][1] == layers
    widths = [last - first for first, last in groups]
    assert max(widths) <= most
    assert max(widths) - min(widths) <= 1
    assert len(groups) == -(-layers // most)


def test_the_shape_of_a_model(tiny_model: Callable[..., Any]) -> None:
    for tied in (True, False):
        model = tiny_model("llama", tie_word_embeddings=tied)
        shape = shape_of(model, spec_of(model))
        table = 128 * 64
        assert (shape.num_layers, shape.layer_columns) == (4, 64)
        assert (shape.vocab_size, shape.hidden_size) == (128, 64)
        assert shape.num_weights == sum(p.numel() for p in model.parameters())
        assert shape.num_weights - shape.num_used_weights == (table if tied else 2 * table)


def test_only_experts_in_use_count(tiny_model: Callable[..., Any]) -> None:
    settings = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    model = tiny_model("qwen3_moe", **settings, head_dim=16)
    shape = shape_of(model, spec_of(model))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts > 0
    rest = shape.num_weights - experts - 2 * 128 * 64
    assert shape.num_used_weights == pytest.approx(rest + experts / 4, abs=2)


def test_the_stated_size_is_that_of_a_profile(tiny_model: Callable[..., Any]) -> None:
    from tests.calibrate.test_run import OPTIONS, windows

    model = tiny_model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.importance.STEPS", 20)
        profile = calibrate(model, windows(8), OPTIONS)
    sizes = Sizes(
        OPTIONS.group_layers, max(profile.meta["num_components"][-2]), OPTIONS.fine_components,
        OPTIONS.embedding_dims, OPTIONS.predictor_rank, OPTIONS.metric_rank,
    )  # fmt: skip
    # All but what every profile has, whatever its model: tables.
    tables = ("level", "token", "sink.freqs")
    size = sum(t.nbytes for name, t in profile.tensors.items() if not name.startswith(tables))
    assert profile_bytes(shape_of(model, spec_of(model)), sizes) == pytest.approx(size, rel=0.1)


def test_layers_with_windows_have_groups_of_their_own() -> None:
    assert layer_groups(30, 15) == layer_groups(30, 15, 0) == ((0, 15), (15, 30))
    assert layer_groups(12, 5, 10) == ((0, 2), (2, 7), (7, 12))
    assert layer_groups(12, 20, 10) == ((0, 2), (2, 12))
    assert layer_groups(12, 20, 12) == ((0, 12),)
    gemma = Shape(26, 512, 262_144, 1152, 10**9, 7 * 10**8, num_windowed=22)
    plain = Shape(26, 512, 262_144, 1152, 10**9, 7 * 10**8)
    sizes = chosen_sizes(gemma, 64 << 30)
    assert gemma.groups(sizes.group_layers) == ((0, 4), (4, 15), (15, 26))
    assert chosen_sizes(plain, 64 << 30).group_layers == 13
