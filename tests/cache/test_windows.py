"""Which chunks a model must read where layers with a window lack tokens of others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.cache.windows import (
    Held,
    chunks_to_read,
    layer_order,
    needed_from,
    num_unbounded,
    ordered,
    resumable,
)

CHUNKS = cut(np.zeros(256 * 6 + 48, np.uint32), Namespace(bytes(16), bytes(16)))
SPEC = ModelSpec(4, 1, 2, 9, (None,) * 4, (300, None, 700, None), bytes(16))


def whole(chunk: Chunk) -> Held:
    return (chunk.start,) * 4


def unbounded(chunk: Chunk) -> Held:
    """Without the layers that have a window."""
    return (chunk.end, chunk.start, chunk.end, chunk.start)


def held(kinds: str) -> list[Held]:
    """w: whole, u: without layers that have a window, -: nothing."""
    make = {"w": whole, "u": unbounded, "-": lambda _: None}
    return [make[kind](chunk) for kind, chunk in zip(kinds, CHUNKS, strict=True)]


def test_layers_with_a_window_come_last() -> None:
    assert layer_order(SPEC) == (1, 3, 0, 2)
    assert ordered(SPEC).windows == (None, None, 300, 700)
    assert num_unbounded(SPEC) == 2
    none = replace(SPEC, windows=(None,) * 4)
    assert ordered(none) == none
    assert not none.has_windows


def test_what_the_last_window_holds() -> None:
    assert needed_from(SPEC.windows, 1000) == 301
    assert needed_from(SPEC.windows, 699) == 0
    assert needed_from((None, None), 1000) == 0


# The context ends at 1,584: a window of 700 begins in chunk 3 (768 to 1,024), for it reaches 885.
@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("wwwwwww", ""),
        ("uuuwwww", ""),
        ("uuuuwww", "0123"),  # what lacks is read, and what its own windows reach
        ("wuuuwww", "123"),
        ("-uuwwww", "0"),  # read from the front: nothing before it
        ("uu-wwww", "012"),  # its windows reach to both
        ("wwu-www", "23"),
        ("www-www", "3"),
        ("uuwwww-", "6"),
        ("uwwww-w", "5"),
        ("u-uwwww", "01"),
        ("w--wwww", "12"),
    ],
)
def test_what_a_model_must_read(kinds: str, expected: str) -> None:
    found = chunks_to_read(CHUNKS, held(kinds), SPEC.windows)
    assert sorted(found) == [int(number) for number in expected]


def test_everything_that_can_be_held() -> None:
    """Against the rule itself: a model that reads a chunk, or goes on at the end, finds in every
    layer all that it attends to."""
    for kinds in product("wu-", repeat=len(CHUNKS)):
        here = held("".join(kinds))
        read = chunks_to_read(CHUNKS, here, SPEC.windows)
        assert {i for i, one in enumerate(here) if one is None} <= read
        for number in [*sorted(read), len(CHUNKS)]:
            end = CHUNKS[number].start if number < len(CHUNKS) else CHUNKS[-1].end
            reached = max(0, end - 699)
            before = [i for i in range(number) if CHUNKS[i].end > reached]
            assert all(i in read or kinds[i] == "w" for i in before), (kinds, read)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("wwwwwww", 7), ("uuuwwww", 7), ("uuuuwww", 0), ("wwwuwww", 3), ("w-wwwww", 1),
        ("-wwwwww", 0), ("wuwwww-", 6), ("uwww-ww", 4), ("uuuuuuu", 0), ("uuwww-w", 5),
    ],
)  # fmt: skip
def test_from_where_a_model_can_go_on(kinds: str, expected: int) -> None:
    assert resumable(CHUNKS, held(kinds), SPEC.windows) == expected


def test_layers_in_another_order() -> None:
    keys = torch.arange(24.0).view(4, 3, 1, 2)
    cache = KVCache(keys, keys + 100, 5, (5, 6, 7, 8))
    moved = cache.of_layers((1, 3, 0, 2))
    assert moved.valid_from == (6, 8, 5, 7)
    assert torch.equal(moved.keys[1], keys[3])
    back = moved.of_layers((2, 0, 3, 1))
    assert back.valid_from == cache.valid_from
    assert torch.equal(back.values, cache.values)
    assert cache.of_layers(range(4)) is cache
