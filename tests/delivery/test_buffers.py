"""Memory that is used again, and never while somebody can still read it."""

from __future__ import annotations

import numpy as np
import pytest

from kdn.delivery.buffers import Buffers


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_what_nobody_uses_any_more_is_used_again() -> None:
    buffers = Buffers()
    buffer = buffers.take(100_000)
    where = address(buffer.view)
    assert len(buffer.view) == 100_000
    del buffer
    assert address(buffers.take(99_000).view) == where


@pytest.mark.parametrize("kind", ["slice", "array", "slice of an array"])
def test_memory_with_a_view_of_it_is_not_given_away(kind: str) -> None:
    buffers = Buffers()
    buffer = buffers.take(100_000)
    buffer.view[:4] = b"mine"
    view: object = buffer.view[:4]
    if kind != "slice":
        view = np.frombuffer(buffer.view, np.uint8)
        view = view if kind == "array" else view[:4]
    del buffer
    other = buffers.take(100_000)
    other.view[:4] = b"else"
    assert bytes(view)[:4] == b"mine"  # type: ignore[call-overload]


def test_what_is_kept_is_bounded_by_what_was_written() -> None:
    buffers = Buffers(max_kept_bytes=250)
    several = [buffers.take(1 << 20) for _ in range(5)]
    for buffer in several:
        buffer.wrote(100)
    del buffer, several
    assert buffers.kept_bytes == 200
    again = [buffers.take(1 << 20) for _ in range(5)]
    assert buffers.kept_bytes == 0
    del again
    assert buffers.kept_bytes <= 250


def test_streams_of_other_sizes_do_not_get_it() -> None:
    buffers = Buffers()
    small = buffers.take(1000)
    small.wrote(10)
    del small
    assert len(buffers.take(1 << 20).view) == 1 << 20
    assert buffers.kept_bytes == 10
