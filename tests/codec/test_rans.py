"""rANS: reference and kernel agree bit for bit, near the information content, on any bytes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdn.codec import rans, rans_numba
from kdn.codec.rans import PROB_TOTAL, STATE_LOW, Ints, Symbols, Tables
from kdn.errors import FormatError, KdnError, TruncatedError

Case = tuple[Symbols, Tables, Ints, Ints]
CODERS = pytest.mark.parametrize("coder", [rans, rans_numba], ids=["reference", "numba"])


def make_case(seed: int, alphabet: int, num_steps: int, lanes: int) -> Case:
    """Skewed tables, some symbols impossible; a random table and width at each step."""
    rng = np.random.default_rng(seed)
    counts = (rng.dirichlet(np.full(alphabet, 0.2), 7) * 5000).astype(np.int64)
    counts[:, 0] += 1
    freqs = rans.normalise(counts)
    table_of_step = rng.integers(0, 7, num_steps).astype(np.int32)
    width_of_step = rng.integers(0, lanes + 1, num_steps).astype(np.int32)
    symbols = [
        rng.choice(alphabet, width, p=freqs[table] / PROB_TOTAL)
        for table, width in zip(table_of_step, width_of_step, strict=True)
    ]
    flat = np.concatenate([np.zeros(0), *symbols]).astype(np.uint8)
    return flat, Tables.from_freqs(freqs), table_of_step, width_of_step


@pytest.mark.parametrize("alphabet", [1, 2, 3, 16, 255, 256])
@pytest.mark.parametrize(("num_steps", "lanes"), [(0, 1), (1, 1), (30, 5), (40, 64)])
def test_round_trip_and_agreement(alphabet: int, num_steps: int, lanes: int) -> None:
    symbols, *how = make_case(alphabet + num_steps, alphabet, num_steps, lanes)
    data = rans.encode(symbols, *how)
    assert data == rans_numba.encode(symbols, *how)
    assert np.array_equal(rans.decode(data, *how), symbols)
    assert np.array_equal(rans_numba.decode(data, *how), symbols)


@CODERS
def test_bytes_are_pinned(coder: ModuleType) -> None:
    """Worked by hand: lanes start at 2^16 and code (2, 0), then the ragged last step 1."""
    tables = Tables.from_freqs(np.array([[PROB_TOTAL // 2, PROB_TOTAL // 4, PROB_TOTAL // 4]]))
    steps, widths = np.zeros(2, np.int32), rans.even_widths(3, 2)
    data = coder.encode(np.array([2, 0, 1], np.uint8), tables, steps, widths)
    lane0 = (2**16 // 4096 << 14) + 8192  # symbol 1, backwards first
    lane0 = (lane0 // 4096 << 14) + 12288 + lane0 % 4096  # symbol 2
    lane1 = (2**16 // 8192 << 14) + 0  # symbol 0
    assert data == np.array([lane0, lane1], "<u4").tobytes()
    assert coder.decode(data, tables, steps, widths).tolist() == [2, 0, 1]


@pytest.mark.parametrize("alphabet", [2, 16, 256])
def test_size_is_near_the_information_content(alphabet: int) -> None:
    symbols, tables, table_of_step, width_of_step = make_case(3, alphabet, 3000, 64)
    freqs = np.diff(tables.cdf.astype(np.int64), axis=1)
    tables_of_symbols = np.repeat(table_of_step, width_of_step)
    bits = -np.log2(freqs[tables_of_symbols, symbols] / PROB_TOTAL).sum()
    data = rans_numba.encode(symbols, tables, table_of_step, width_of_step)
    assert bits / 8 <= len(data) <= 1.01 * bits / 8 + 4 * 64


def test_normalising_loses_less_than_a_percent_of_the_entropy() -> None:
    rng = np.random.default_rng(5)
    counts = np.bincount((rng.standard_normal(200_000) * 12 + 128).astype(int), minlength=256)
    p = counts / counts.sum()
    used = p > 0
    entropy = -(p[used] * np.log2(p[used])).sum()
    cross = -(p[used] * np.log2(rans.normalise(counts)[used] / PROB_TOTAL)).sum()
    assert cross < 1.002 * entropy


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=256).filter(any))
def test_normalise_keeps_every_possible_symbol(counts: list[int]) -> None:
    freqs = rans.normalise(np.array(counts))
    assert freqs.sum(dtype=np.int64) == PROB_TOTAL
    assert np.array_equal(freqs > 0, np.array(counts) > 0)


def test_normalise_is_pinned() -> None:
    assert rans.normalise(np.array([[1, 0, 2], [5, 5, 5]])).tolist() == [
        [5461, 0, 10923],
        [5462, 5461, 5461],
    ]
    heavy = np.ones(256, np.int64)
    heavy[7] = 2**32
    assert rans.normalise(heavy)[7] == PROB_TOTAL - 255


@pytest.mark.parametrize(
    "freqs",
    [
        np.full((1, 2), PROB_TOTAL // 2 + 1),
        np.array([[PROB_TOTAL + 1, -1]]),
        np.array([[2**31, -(2**31) + PROB_TOTAL]]),
        np.ones((1, 257)),
        np.full(4, PROB_TOTAL // 4),
    ],
)
def test_wrong_tables_are_refused(freqs: np.ndarray) -> None:
    with pytest.raises(FormatError):
        Tables.from_freqs(freqs.astype(np.int64))


def test_start_is_the_first_symbol_of_each_block() -> None:
    _, tables, _, _ = make_case(1, 100, 1, 1)
    for row, start in zip(tables.cdf, tables.start, strict=True):
        slots = np.arange(256) << rans.PROB_BITS - rans.START_BITS
        assert np.array_equal(np.searchsorted(row, slots, side="right") - 1, start)


@CODERS
def test_every_wrong_stream_has_its_error(coder: ModuleType) -> None:
    symbols, *how = make_case(11, 16, 20, 8)
    data = coder.encode(symbols, *how)
    lanes = int(how[2].max())
    for wrong, error in (
        (data[: 4 * lanes - 2], TruncatedError),
        (data[:-1], FormatError),
        (data[:-2], TruncatedError),
        (data + b"\0\0", FormatError),
        (np.array([STATE_LOW - 1], "<u4").tobytes() + data[4:], FormatError),
        (b"\xff" * len(data), FormatError),
    ):
        with pytest.raises(error):
            coder.decode(wrong, *how)


@CODERS
def test_an_impossible_symbol_is_our_own_mistake(coder: ModuleType) -> None:
    tables = Tables.from_freqs(np.array([[PROB_TOTAL, 0]]))
    with pytest.raises(AssertionError):
        coder.encode(np.ones(1, np.uint8), tables, np.zeros(1, np.int32), np.ones(1, np.int32))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 200), keep=st.booleans())
def test_both_coders_say_the_same_of_any_bytes(seed: int, length: int, keep: bool) -> None:
    symbols, *how = make_case(2, 16, 12, 6)
    rng = np.random.default_rng(seed)
    if keep:  # a valid stream with one wrong byte
        damaged = bytearray(rans.encode(symbols, *how))
        damaged[seed % len(damaged)] ^= 1 + seed % 255
        data = bytes(damaged)
    else:
        data = rng.bytes(length)
    assert _outcome(rans, data, how) == _outcome(rans_numba, data, how)


def _outcome(coder: ModuleType, data: bytes, how: list[object]) -> object:
    try:
        return coder.decode(data, *how).tobytes()
    except KdnError as error:
        return type(error), str(error)
