"""The reference coder, and the kernels against it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdn.codec import rans
from kdn.codec.klt import symbols, symbols_numba
from kdn.codec.klt.symbols import Ints, Model
from kdn.errors import FormatError, TruncatedError


def make_model(num_components: int, num_tokens: int, *, digits: bool, seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    num_tables = symbols.DIGIT_TABLES if digits else symbols.BASE_TABLES
    alphabet = symbols.DIGIT_ALPHABET if digits else symbols.BASE_ALPHABET
    cdf = np.zeros((num_tables, alphabet + 1), np.uint16)
    np.cumsum(rans.normalise(rng.integers(1, 500, (num_tables, alphabet))), axis=1, out=cdf[:, 1:])
    blocks = -(-num_components // symbols.BLOCK)
    return Model(
        rng.integers(0, symbols.NUM_SCALES, num_components).astype(np.uint8),
        rng.integers(-4, 5, num_tokens).astype(np.int8),
        np.sort(rng.integers(0, 250, (blocks, symbols.NUM_ACTIVITIES - 1)), axis=1).astype(
            np.int32
        ),
        cdf,
    )


def make_values(num_components: int, num_tokens: int, seed: int = 0) -> Ints:
    rng = np.random.default_rng(seed)
    values = np.rint(rng.standard_t(1.5, (num_components, num_tokens)) * 4)
    return np.clip(values, -30_000, 30_000).astype(np.int32)


def test_levels_nest_exactly() -> None:
    finest = np.arange(-2000, 2001, dtype=np.int32)[None]
    levels = symbols.split_levels(finest, 5)
    for coarse, fine in itertools.pairwise(levels):
        assert np.abs(fine - 3 * coarse).max() == 1
    # Every level is the uniform quantiser of its own step: rounding to nearest, no dead zone.
    for k, level in enumerate(levels):
        np.testing.assert_array_equal(level, np.rint(finest / 3 ** (4 - k)))


@pytest.mark.parametrize("q", [0, 1, -1, 7, -7, 8, -8, 30_000])
def test_base_symbols(q: int) -> None:
    symbol = symbols.base_symbol(q)
    assert symbol == symbols.ESCAPE if abs(q) > 7 else symbols.base_value(symbol) == q


@pytest.mark.parametrize("coarse", [-3, -1, 0, 1, 2])
@pytest.mark.parametrize("digit", [-1, 0, 1])
def test_digit_symbols(coarse: int, digit: int) -> None:
    fine = 3 * coarse + digit
    assert symbols.digit_value(coarse, symbols.digit_symbol(coarse, fine)) == fine


@pytest.mark.parametrize(("components", "tokens"), [(1, 1), (9, 16), (24, 48), (17, 33)])
def test_kernels_equal_the_reference(components: int, tokens: int) -> None:
    levels = symbols.split_levels(make_values(components, tokens), 3)
    coarse = None
    for k, values in enumerate(levels):
        model = make_model(components, tokens, digits=k > 0, seed=k)
        data = symbols.encode(model, values, coarse)
        assert symbols_numba.encode(model, values, coarse) == data
        np.testing.assert_array_equal(symbols.decode(model, data, coarse), values)
        np.testing.assert_array_equal(symbols_numba.decode(model, data, coarse), values)
        coarse = values


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 40))
def test_random_round_trips(seed: int, components: int, tokens: int) -> None:
    coarse, fine = symbols.split_levels(make_values(components, tokens, seed), 2)
    base = make_model(components, tokens, digits=False, seed=seed)
    digits = make_model(components, tokens, digits=True, seed=seed)
    data = symbols_numba.encode(base, coarse, None)
    np.testing.assert_array_equal(symbols_numba.decode(base, data, None), coarse)
    data = symbols_numba.encode(digits, fine, coarse)
    np.testing.assert_array_equal(symbols_numba.decode(digits, data, coarse), fine)


def test_size_is_near_the_information_content() -> None:
    values = make_values(64, 256)
    model = make_model(64, 256, digits=False)
    tables, found = symbols_numba.contexts(model, values, None)
    low, high = (model.cdf[tables, found + i].astype(float) for i in (0, 1))
    bits = -np.log2((high - low) / rans.PROB_TOTAL).sum() + 16 * (found == symbols.ESCAPE).sum()
    states = 4 * model.num_lanes
    size = len(symbols_numba.encode(model, values, None))
    assert bits / 8 <= size <= 1.005 * bits / 8 + states


@pytest.mark.parametrize("decode", [symbols.decode, symbols_numba.decode])
def test_short_long_and_damaged_sections(decode: object) -> None:
    assert callable(decode)
    model = make_model(16, 32, digits=False)
    data = symbols_numba.encode(model, make_values(16, 32), None)
    with pytest.raises(TruncatedError):
        decode(model, data[: 4 * model.num_lanes - 2], None)
    with pytest.raises((TruncatedError, FormatError)):
        decode(model, data[:-20], None)
    with pytest.raises(FormatError):
        decode(model, data + b"\0\0", None)
    with pytest.raises(FormatError):
        decode(model, data[:-1], None)


def test_activity_picks_tables() -> None:
    """The same values under another history are coded with other tables."""
    model = make_model(32, 16, digits=False)
    model = replace(model, thresholds=np.full_like(model.thresholds, 100))
    quiet, loud = np.zeros((32, 16), np.int32), np.zeros((32, 16), np.int32)
    loud[:8] = 3
    same = symbols_numba.contexts(model, quiet, None)[0][8:16]
    other = symbols_numba.contexts(model, loud, None)[0][8:16]
    np.testing.assert_array_equal(other - same, symbols.NUM_ACTIVITIES - 1)


def test_golden_bytes() -> None:
    """Exact bytes of a tiny section: any change of the coder is a new format version."""
    values = (np.arange(6 * 4, dtype=np.int32).reshape(6, 4) * 7) % 11 - 5
    cdf = np.zeros((symbols.BASE_TABLES, 17), np.uint16)
    counts = np.arange(1, 17)[None] + np.arange(symbols.BASE_TABLES)[:, None] % 5
    np.cumsum(rans.normalise(counts), axis=1, out=cdf[:, 1:])
    scales, shifts = np.arange(6, dtype=np.uint8), np.array([-1, 0, 1, 0], np.int8)
    model = Model(scales, shifts, np.full((1, 7), 3, np.int32), cdf)
    assert symbols_numba.encode(model, values, None).hex() == GOLDEN_BASE


GOLDEN_BASE = "df959a05d844671074c68613bedac80504460dc6505e3245"
