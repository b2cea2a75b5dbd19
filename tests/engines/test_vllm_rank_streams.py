"""Streams from one rank to others, as a file that grows."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdn.engines.vllm import rank_streams
from kdn.engines.vllm.rank_folder import RankFolder, load_name
from kdn.engines.vllm.rank_streams import State, StreamsIn, StreamsOut
from kdn.errors import ChecksumError, FormatError


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[RankFolder]]:
    found = [RankFolder(tmp_path, "engine", rank, 3) for rank in range(3)]
    yield found
    for one in found:
        one.close()


def contents(streams: StreamsIn, most: int = 9) -> list[tuple[int, int, bytes]]:
    found = streams.read(most) if streams.has_more() else []
    return [(one.number, one.levels, one.data.tobytes()) for one in found]


def test_all_readers_get_all_in_order(folders: list[RankFolder]) -> None:
    readers = [StreamsIn(folder, 5) for folder in folders[1:]]
    assert contents(readers[0]) == []
    assert readers[0].state is State.WAITING
    out = StreamsOut(folders[0], 5, [1, 2])
    assert contents(readers[0]) == []
    assert readers[0].state is State.GROWING
    out.put(0, 1, [b"head", b"level"])
    out.put(2, 3, [b"x"])
    assert contents(readers[0], 1) == [(0, 1, b"headlevel")]
    assert contents(readers[0]) == [(2, 3, b"x")]
    out.put(0, 2, [b"finer"])
    out.end()
    assert contents(readers[0]) == [(0, 2, b"finer")]
    assert contents(readers[1]) == [(0, 1, b"headlevel"), (2, 3, b"x"), (0, 2, b"finer")]
    assert [one.state for one in readers] == [State.ENDED] * 2
    assert not readers[0].has_more()
    assert not any(folder.has(load_name(5, folder.rank)) for folder in folders)
    for one in readers:
        one.close()


def test_half_a_record_is_not_read(folders: list[RankFolder]) -> None:
    out, streams = StreamsOut(folders[0], 1, [1]), StreamsIn(folders[1], 1)
    out.put(3, 2, [b"0123456789"])
    whole = os.pread(out._fd, 1000, 0)
    os.ftruncate(out._fd, 1)
    for length in range(1, len(whole), 7):
        os.pwrite(out._fd, whole[:length], 0)
        assert contents(streams) == []
        assert streams.state is State.GROWING
    os.pwrite(out._fd, whole, 0)
    assert contents(streams) == [(3, 2, b"0123456789")]


@pytest.mark.parametrize(
    ("at", "error"), [(1, FormatError), (21, FormatError), (-1, ChecksumError)]
)
def test_a_damaged_record_is_refused(
    folders: list[RankFolder], at: int, error: type[Exception]
) -> None:
    out, streams = StreamsOut(folders[0], 1, [1]), StreamsIn(folders[1], 1)
    out.put(3, 2, [b"0123456789"])
    whole = bytearray(os.pread(out._fd, 1000, 0))
    whole[at] ^= 0xFF
    os.pwrite(out._fd, whole, 0)
    with pytest.raises(error):
        contents(streams)


@pytest.mark.parametrize("num_read", [0, 1])
def test_who_cannot_go_on_says_so(
    folders: list[RankFolder], monkeypatch: pytest.MonkeyPatch, num_read: int
) -> None:
    monkeypatch.setattr(rank_streams, "LOAD_BYTES", 100)
    out, streams = StreamsOut(folders[0], 1, [1]), StreamsIn(folders[1], 1)
    out.put(0, 1, [b"x" * 60])
    assert len(contents(streams, num_read)) == num_read
    out.put(1, 1, [b"x" * 60])  # more than there is room for
    out.put(2, 1, [b"x"])
    out.end()
    assert contents(streams) == []
    assert streams.state is State.LEFT


@pytest.mark.parametrize("num_put", [0, 1])
@pytest.mark.parametrize("num_read", [0, 1])
def test_who_has_no_memory_for_the_last_word_says_so(
    folders: list[RankFolder], monkeypatch: pytest.MonkeyPatch, num_put: int, num_read: int
) -> None:
    out, streams = StreamsOut(folders[0], 1, [1]), StreamsIn(folders[1], 1)
    for number in range(num_put):
        out.put(number, 1, [b"x" * 5000])
    for _ in range(num_read):
        assert len(contents(streams)) == num_put

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    pwrite, places = os.pwrite, []

    def in_first_page(fd: int, data: bytes, at: int) -> int:
        places.append(range(os.fstat(fd).st_size, at + len(data)))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "pwrite", in_first_page)
    out.end()
    assert contents(streams) == []
    assert streams.state is State.LEFT
    assert places == [range(1, 33)]  # whose page was never given back
    streams.close()


def test_a_file_whose_memory_was_not_there_is_left(folders: list[RankFolder]) -> None:
    os.close(folders[0].create([load_name(1, 1)]))
    streams = StreamsIn(folders[1], 1)
    assert contents(streams) == []
    assert streams.state is State.LEFT
    streams.close()


@pytest.mark.parametrize("fails", ["open", "write", "link"])
def test_who_cannot_begin_says_so_at_once(
    folders: list[RankFolder], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, fail)
        out = StreamsOut(folders[0], 1, [1, 2])
    out.put(0, 1, [b"x"])
    out.end()
    with pytest.raises(FormatError, match="cannot be read"):
        StreamsIn(folders[1], 1).has_more()
    assert not os.path.lexists(folders[1].path / load_name(1, 1))
    out.forget()  # the third has not looked
    assert [name for name in os.listdir(folders[0].path) if "load" in name or "aside" in name] == []


def test_what_nobody_read_is_forgotten(folders: list[RankFolder]) -> None:
    out = StreamsOut(folders[0], 1, [1, 2])
    out.end()
    assert folders[1].has(load_name(1, 1))
    out.forget()
    assert not any(folders[rank].has(load_name(1, rank)) for rank in (1, 2))
