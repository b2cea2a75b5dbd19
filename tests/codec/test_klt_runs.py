"""Sections in runs: each is a section of its own, and bytes without runs are as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile, runs, symbols, symbols_numba
from kdn.codec.klt.profile import VERSION_OF_RUNS
from kdn.codec.klt.runs import runs_of
from kdn.codec.klt.symbols import BLOCK, NUM_ACTIVITIES, Model
from kdn.errors import FormatError, KdnError
from tests.codec.klt_profile import make_profile, parts
from tests.codec.targets import windowed


def model_of(rows: int, tokens: int, *, digits: bool, seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    tables = symbols.DIGIT_TABLES if digits else symbols.BASE_TABLES
    alphabet = symbols.DIGIT_ALPHABET if digits else symbols.BASE_ALPHABET
    freqs = np.full((tables, alphabet), 16384 // alphabet, np.uint16)
    freqs[:, 0] += 16384 % alphabet
    cuts = np.sort(rng.integers(0, 200, (-(-rows // BLOCK), NUM_ACTIVITIES - 1)), axis=1)
    return Model(
        rng.integers(20, 60, rows).astype(np.uint8),
        rng.integers(-4, 5, tokens).astype(np.int8),
        cuts.astype(np.int32),
        np.concatenate([np.zeros((tables, 1)), np.cumsum(freqs, axis=1)], 1).astype(np.uint16),
    )


def values_of(rows: int, tokens: int, *, digits: bool) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    values = np.rint(rng.normal(scale=3, size=(rows, tokens))).astype(np.int32)
    values[0, 0] = 700  # an escape
    return values, np.floor_divide(values + 1, 3).astype(np.int32) if digits else None


def test_rows_of_runs() -> None:
    assert runs_of(0, 16) == [slice(0, 0)]
    assert runs_of(16, 16) == runs_of(16, None) == [slice(0, 16)]
    assert runs_of(40, 16) == [slice(0, 16), slice(16, 32), slice(32, 40)]


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 45, 160])
@pytest.mark.parametrize("tokens", [1, 31, 70])
def test_they_come_back(digits: bool, rows: int, tokens: int) -> None:
    model = model_of(rows, tokens, digits=digits)
    values, coarse = values_of(rows, tokens, digits=digits)
    data = runs.encode(model, values, coarse, 16)
    assert np.array_equal(runs.decode(model, memoryview(data), coarse, 16), values)
    whole = symbols_numba.encode(model, values, coarse)
    assert (data == whole) == (rows <= 16)
    assert runs.encode(model, values, coarse, None) == whole


def test_each_is_a_section_of_its_own() -> None:
    """As the readable reference codes it, with no activity before its first row."""
    model = model_of(40, 20, digits=False)
    values, _ = values_of(40, 20, digits=False)
    data = runs.encode(model, values, None, 16)
    sizes = np.frombuffer(data[:12], "<u4").tolist()
    at = 12
    for run, size in zip(runs_of(40, 16), sizes, strict=True):
        blocks = slice(run.start // BLOCK, -(-run.stop // BLOCK))
        own = replace(model, scales=model.scales[run], thresholds=model.thresholds[blocks])
        assert data[at : at + 2 * size] == symbols.encode(own, values[run], None)
        at += 2 * size
    assert at == len(data)


def test_what_is_damaged_is_refused() -> None:
    model = model_of(40, 20, digits=False)
    values, _ = values_of(40, 20, digits=False)
    data = runs.encode(model, values, None, 16)
    for size in (0, 3, 11, 12, len(data) - 2):
        with pytest.raises(KdnError):
            runs.decode(model, memoryview(data[:size]), None, 16)
    for sizes in ((1, 0, 0), (2**32 - 1,) * 3, (0, 0, (len(data) - 12) // 2)):
        spoilt = np.array(sizes, "<u4").tobytes() + data[12:]
        with pytest.raises(KdnError):
            runs.decode(model, memoryview(spoilt), None, 16)
    with pytest.raises(KdnError):
        runs.decode(model, memoryview(data + b"\0\0"), None, 16)


@pytest.mark.parametrize("leading", [0, 24])
def test_a_stream_in_runs_decodes_to_the_same_values(tiny: Any, leading: int) -> None:
    plain = KltCodec(tiny.spec, make_profile(tiny.spec, leading=leading))
    codec = KltCodec(tiny.spec, make_profile(tiny.spec, leading=leading, run_rows=16))
    sizes = []
    found = []
    for one in (plain, codec):
        chunk = tiny.chunk(one.profile_id, 96)
        data = one.encode(chunk, tiny.cache(chunk))
        sizes.append(len(data))
        stream = Bitstream.parse(data)
        found.append([one.decode(stream, chunk, levels=n) for n in (1, 2, 3, 4)])
    assert sizes[0] < sizes[1] < 1.3 * sizes[0]  # runs of 16 rows are absurdly short
    for before, after in zip(*found, strict=True):
        assert (before.keys == after.keys).all()
        assert (before.values == after.values).all()


def test_runs_and_windows_go_together(tiny: Any) -> None:
    spec = windowed(tiny)
    profile = make_profile(spec, in_parts=True, run_rows=16)
    assert profile.meta["version"] == VERSION_OF_RUNS
    assert profile.windowed_from == 1
    assert make_profile(tiny.spec, run_rows=16).windowed_from is None


@pytest.mark.parametrize(
    "change",
    [{"run_rows": rows} for rows in (0, -16, 12, 16.0, True, None, "16")]
    + [{"windowed_from": border} for border in (-1, 2, True, "0")],
    ids=str,
)
def test_wrong_runs_are_refused(tiny: Any, change: dict[str, Any]) -> None:
    meta, tensors = parts(tiny.spec, run_rows=16)
    Profile.build(meta, tensors)
    with pytest.raises(FormatError):
        Profile.build(meta | change, tensors)


def test_too_many_runs_are_refused(tiny: Any) -> None:
    """A GPU finds at most so many, and no section has more rows than its group has columns."""
    per_layer = 2 * tiny.spec.num_kv_heads * tiny.spec.head_dim
    wide = replace(tiny.spec, num_kv_heads=tiny.spec.num_kv_heads * (1 + 64 * BLOCK // per_layer))
    meta, tensors = parts(wide, run_rows=3 * BLOCK)
    Profile.build(meta, tensors)
    with pytest.raises(FormatError, match="64 runs"):
        Profile.build(meta | {"run_rows": BLOCK}, tensors)
