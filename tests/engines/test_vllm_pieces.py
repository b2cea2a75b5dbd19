"""Where a prompt's pieces are: what requests and operators may say, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cache.spec import RopeSpec
from kdn.engines.models import smollm2_folder
from kdn.engines.vllm.checks import check_joins, separator_of
from kdn.engines.vllm.piece_ranges import MAX_PIECES, checked_ranges, separated
from kdn.engines.vllm.settings import Settings
from kdn.errors import UnsupportedError
from tests.codec.conftest import Tiny


def test_ranges_as_they_should_be() -> None:
    assert checked_ranges([[5, 9], [9, 10]], 10) == ((5, 9), (9, 10))
    assert checked_ranges([(0, 4)], 100) == ((0, 4),)


@pytest.mark.parametrize(
    "wrong",
    [
        "x", 7, {}, {"0": [1, 2]}, [], [[]], [[1]], [[1, 2, 3]], [7], [["1", "2"]], [[1.0, 2.0]],
        [[True, 2]], [[None, 2]], [[3, 3]], [[4, 3]], [[-1, 3]], [[1, 5], [4, 8]], [[1, 3], [4, 8]],
        [[4, 8], [1, 4]], [[1, 101]], [[1, 10**30]], [[1, 10**5000]],
        [[n, n + 1] for n in range(MAX_PIECES + 1)], [[1, 2]] * 100_000,
    ],
)  # fmt: skip
def test_ranges_that_are_refused(wrong: Any) -> None:
    with pytest.raises((UnsupportedError, ValueError)):  # integers too long to be shown
        checked_ranges(wrong, 100)


def test_many_pieces_behind_a_long_head() -> None:
    """All of it would be hashed again and again."""
    few = [[100_000 + n, 100_001 + n] for n in range(2)]
    many = [[100_000 + n, 100_001 + n] for n in range(200)]
    assert len(checked_ranges(few, 200_000)) == 2
    with pytest.raises(UnsupportedError, match="head of 100000"):
        checked_ranges(many, 200_000)


@pytest.mark.parametrize(
    ("tokens", "separator", "expected"),
    [
        ([1, 2, 9, 3, 4, 9, 5, 9, 6], [9], ((3, 6), (6, 8))),  # what is behind the last is none
        ([1, 9, 9, 2], [9], ((2, 3),)),
        ([9, 9, 9, 9, 9], [9, 9], ((2, 4),)),  # none within another
        ([1, 8, 9, 2, 8, 7, 8, 9], [8, 9], ((3, 8),)),
        ([1, 2, 3], [9], ()),
        ([1, 9, 3], [9], ()),
        ([9], [8, 9], ()),
        ([], [9], ()),
        ([1, 2], [], ()),
    ],
)
def test_separated(tokens: list[int], separator: list[int], expected: Any) -> None:
    assert separated(tokens, separator) == expected


def test_too_many_separators() -> None:
    with pytest.raises(UnsupportedError, match="pieces"):
        separated([9] * (MAX_PIECES + 2), [9])


def test_settings() -> None:
    plain = Settings.parse({"url": "x"})
    assert (plain.blend, plain.separator, plain.seams) == ("off", (), "")
    own = Settings.parse({"url": "x", "blend": "separator", "separator": [1, 2], "seams": None})
    assert (own.blend, own.separator, own.seams) == ("separator", (1, 2), None)
    asked = own.for_request({"kdn": {"pieces": "anything", "learn": True, "join_kld": 1.0}})
    assert asked.learn
    assert asked.join_kld == own.join_kld
    assert own.for_request({"kdn": {"join_kld": 0.01}}).join_kld == 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"blend": "on"}, {"blend": True}, {"blend": "separator"}, {"separator": [-1]},
        {"blend": "separator", "separator": ""}, {"separator": [1.5]}, {"separator": [True]},
        {"separator": list(range(100))}, {"seams": 3}, {"join_kld": -1}, {"learn": True},
        {"pieces": [[0, 1]]},
    ],
)  # fmt: skip
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        Settings.parse({"url": "x", **wrong})


def test_a_separator_given_as_a_text() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(tokenizer=str(smollm2_folder())))
    own = Settings.parse({"url": "x", "blend": "separator", "separator": "<|im_end|>"})
    assert separator_of(config, own) == (2,)
    assert separator_of(config, Settings.parse({"url": "x", "separator": [7, 8]})) == (7, 8)
    with pytest.raises(UnsupportedError, match="1 to 32 tokens"):
        separator_of(config, Settings.parse({"url": "x", "separator": "a b " * 40}))


def test_a_model_whose_pieces_cannot_be_joined() -> None:
    turn = RopeSpec(tuple(100.0 ** (-i / 4) for i in range(4)))
    plain = replace(Tiny.with_layers(2).spec, ropes=(turn, turn))
    windowed = replace(plain, windows=(None, 64))
    check_joins(Settings.parse({"url": "x"}), windowed)
    joining = Settings.parse({"url": "x", "blend": "ranges"})
    check_joins(joining, plain)
    with pytest.raises(UnsupportedError, match="sliding window"):
        check_joins(joining, windowed)
