"""Training windows: as prompts begin, from anywhere, with passages that come back."""

from __future__ import annotations

import numpy as np
import pytest

from kdn.bench.models import windows
from kdn.bench.models.shapes import BOS
from kdn.bench.models.windows import Windows, unigram_nats
from kdn.errors import FormatError

TOKENS = np.arange(10, 5010, dtype=np.uint32)
"""No token twice: what is repeated shows."""


def test_windows_begin_with_bos_and_are_pieces_of_the_text() -> None:
    batch = Windows(TOKENS, 100, seed=0, repeating=0).draw(50)
    assert batch.shape == (50, 100)
    assert (batch[:, 0] == BOS).all()
    assert (np.diff(batch[:, 1:], axis=1) == 1).all()
    assert len(set(batch[:, 1].tolist())) > 40


def test_a_passage_comes_back_behind_its_first_place() -> None:
    for row in Windows(TOKENS, 400, seed=0, repeating=1).draw(50):
        breaks = np.flatnonzero(np.diff(row[1:]) != 1) + 2
        begin = int(breaks[0])
        end = int(breaks[1]) if len(breaks) > 1 else len(row)
        passage = row[begin:end]
        assert 32 <= len(passage) <= 256
        [first] = np.flatnonzero(row[:begin] == passage[0])
        assert first + len(passage) <= begin
        assert (row[first : first + len(passage)] == passage).all()


def test_other_words_are_words_of_the_text() -> None:
    text = np.resize(np.random.default_rng(0).integers(10, 60, 700), 5000).astype(np.uint32)
    rows = Windows(text, 300, seed=0, swapped=1).draw(20)
    assert (rows[:, 0] == BOS).all()
    assert np.isin(rows[:, 1:], text).all()
    assert len({bytes(row) for row in rows}) == 20


def test_a_swapped_window_is_the_text_in_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "PASSAGES_OF_SWAPPED", 0)
    text = np.resize(np.random.default_rng(0).integers(10, 60, 700), 5000).astype(np.uint32)
    for row in Windows(text, 300, seed=0, swapped=1).draw(20)[:, 1:]:
        # Somewhere in the text stands the same pattern of equal and different tokens.
        starts = [s for s in range(700) if _pattern(text[s : s + 299]) == _pattern(row)]
        assert starts
        assert (text[starts[0] : starts[0] + 299] != row).any()


def _pattern(tokens: np.ndarray) -> list[int]:
    """Of each token, where it stood first."""
    first: dict[int, int] = {}
    return [first.setdefault(int(token), at) for at, token in enumerate(tokens)]


def test_windows_are_drawn_with_a_seed() -> None:
    one, same, other = (Windows(TOKENS, 100, seed).draw(4) for seed in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(FormatError, match="at least 6,000 tokens"):
        Windows(TOKENS, 3000, seed=0)


def test_unigrams_of_a_fair_coin_take_one_bit() -> None:
    coin = np.tile(np.array([0, 1], np.uint32), 50_000)
    assert unigram_nats(coin, coin, 2) == pytest.approx(np.log(2), abs=1e-6)
