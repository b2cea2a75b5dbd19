"""The arithmetic coder: exact round trips, close to the information content, known bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kdn.bench.rivals import arithmetic
from kdn.bench.rivals.shipped import _tables


def draw(rows: int, length: int, alphabet: int, spread: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(alphabet / 2, spread, (rows, length))
    return np.clip(np.rint(noise), 0, alphabet - 1).astype(np.uint8)


@pytest.mark.parametrize(("alphabet", "spread"), [(32, 0.01), (32, 2.0), (128, 40.0), (2, 1.0)])
def test_round_trip_near_the_information_content(alphabet: int, spread: float) -> None:
    symbols = draw(50, 256, alphabet, spread, seed=alphabet)
    tables = _tables(symbols, alphabet)
    data, lengths = arithmetic.encode(symbols, tables)
    assert len(data) == lengths.sum()
    assert np.array_equal(arithmetic.decode(data, lengths, tables, 256), symbols)
    bounds = tables.astype(np.int64)
    bounds[:, -1] = 65536
    slots = np.take_along_axis(np.diff(bounds, axis=1), symbols.astype(np.int64), 1)
    content_bits = -np.log2(slots / 65536).sum(1)
    assert (8 * lengths <= content_bits + 10).all()  # 2 bits to end, and whole bytes
    assert (8 * lengths >= content_bits - 1e-6).all()


def test_symbols_the_table_hardly_expects() -> None:
    tables = np.array([[0, 65534, 65535, 0]], dtype=np.uint16)  # the last bound is 65536
    symbols = np.array([[0, 2, 1, 2, 2, 0, 1]], dtype=np.uint8)
    data, lengths = arithmetic.encode(symbols, tables)
    assert np.array_equal(arithmetic.decode(data, lengths, tables, 7), symbols)
    assert lengths[0] in (10, 11)  # five symbols of 16 bits


def test_known_bytes() -> None:
    tables = np.array([[0, 16384, 0]], dtype=np.uint16)  # a quarter, three quarters
    symbols = np.array([[0, 0, 1, 0]], dtype=np.uint8)
    data, lengths = arithmetic.encode(symbols, tables)
    assert lengths[0] == 1
    # The interval narrows to [0, 16), [0, 4), [1, 4), [1, 1.75) 64ths.
    point = int.from_bytes(data, "big") / 256
    assert 1 / 64 <= point < 1.75 / 64


def test_tables_leave_room_for_every_symbol() -> None:
    tables = _tables(np.zeros((1, 256), np.uint8), 4)
    assert tables.tolist() == [[0, 65533, 65534, 65535, 0]]
