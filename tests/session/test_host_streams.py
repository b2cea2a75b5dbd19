"""Streams in a folder: what is held, how good it is, and what is never believed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.codec.copies_numba import copy_all
from kdn.codec.format import DType, Header
from kdn.delivery.sink import Arrival, HostSink
from kdn.errors import KdnError, TruncatedError, UnsupportedError
from kdn.session import host_streams
from kdn.session.delivered import Grade
from kdn.session.host_folder import MARKER
from kdn.session.host_streams import HostStreams, levels_wanted
from tests.session.levelled import (
    KLDS,
    PROFILE,
    SPEC,
    Levelled,
    first_chunks,
    prompt,
    section_of,
    stream_of,
)

CHUNKS = prompt(4)
HEADER = Header.parse(stream_of(CHUNKS[0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / f"kdn-{os.geteuid()}"


def open_tier(folder: Path, max_bytes: int = 1 << 30) -> HostStreams:
    return HostStreams(folder.parent, Levelled(), torch.float32, max_bytes)


@pytest.fixture
def tier(folder: Path) -> HostStreams:
    return open_tier(folder)


def path(folder: Path, chunk: Chunk) -> Path:
    return folder / f"{chunk.key.hex()}.stream"


def put(tier: HostStreams, chunk: Chunk, levels: int = 4) -> bool:
    return tier.put(chunk, stream_of(chunk), levels)


class Counted(HostSink):
    """Says what it got, and does something before it looks at it."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        self.before()
        self.batches = [*getattr(self, "batches", []), [one.levels for one in batch]]
        self.failures = super().decode(batch)
        return self.failures


def sink_for(chunks: Sequence[Chunk], before: Callable[[], object] = lambda: None) -> Counted:
    sink = HostSink.of(Levelled(), chunks, torch.float32)
    counted = Counted(Levelled(), sink.cache)
    counted.before = before  # type: ignore[method-assign]
    return counted


# what is held


def test_another_process_finds_what_one_keeps(tier: HostStreams, folder: Path) -> None:
    assert put(tier, CHUNKS[1], 3)
    with open_tier(folder).opened(CHUNKS[1:2], [3]) as [stream]:
        assert (stream.levels_available, stream.has_level(3)) == (3, False)
        assert stream.section(2, 0, 0) == section_of(CHUNKS[1], 2)
        buffer = bytearray(stream.level_end(1) - stream.header.size_bytes)
        stream.read_into(memoryview(buffer), 2)
        assert buffer == section_of(CHUNKS[1], 0) + section_of(CHUNKS[1], 1)
    with pytest.raises(TruncatedError):  # the folder is closed
        stream.section(1, 0, 0)
    assert [tier.levels(chunk) for chunk in CHUNKS] == [0, 3, 0, 0]


@pytest.mark.parametrize(("levels", "worst"), [(1, 0.1), (2, 0.02), (3, 0.003)])
def test_only_what_is_good_enough_counts(tier: HostStreams, levels: int, worst: float) -> None:
    put(tier, CHUNKS[0], levels)
    assert tier.has(CHUNKS[0], worst)
    assert not tier.has(CHUNKS[0], 0.99 * worst)


def test_all_levels_are_always_enough(tier: HostStreams) -> None:
    put(tier, CHUNKS[0], 4)
    assert tier.has(CHUNKS[0], 0.0)


def test_better_takes_the_place_of_worse(tier: HostStreams, folder: Path) -> None:
    assert put(tier, CHUNKS[0], 2)
    assert not put(tier, CHUNKS[0], 1)
    assert not put(tier, CHUNKS[0], 2)
    assert tier.levels(CHUNKS[0]) == 2
    assert put(open_tier(folder), CHUNKS[0], 4)
    assert tier.levels(CHUNKS[0]) == 4  # though another was seen before


@pytest.mark.parametrize(
    ("enough", "wanted"),
    [
        (0.0, [4, 4, 4]),  # nothing is good enough: all there is
        (0.001, [4, 4, 4]),
        (0.003, [3, 3, 3]),  # those before the end leave enough for it
        (0.0018, [3, 3, 4]),
        (0.0116, [2, 2, 3]),
        (0.02, [2, 2, 2]),
        (1.0, [1, 1, 1]),
    ],
)
def test_as_many_levels_as_a_context_needs(enough: float, wanted: list[int]) -> None:
    """In the mean, in which the last tokens count half."""
    assert levels_wanted(KLDS, CHUNKS[:3], 768, enough) == wanted
    body, tail = KLDS[wanted[0] - 1], KLDS[wanted[2] - 1]
    assert (body + tail) / 2 <= max(enough, KLDS[-1])


def test_what_is_held_is_delivered_up_to_the_first_gap(tier: HostStreams) -> None:
    for chunk, levels in zip(CHUNKS, (4, 3, 2, 4), strict=True):
        put(tier, chunk, levels)
    sink = sink_for(CHUNKS)
    assert tier.deliver(CHUNKS, sink, 1024, 0.003) == (Grade(0.003, False, 3),) * 2
    assert sink.batches == [[3, 3]]
    assert sink.cache.keys[0, ::256, 0, 0].tolist()[:2] == [3.0, 3.0]
    exact = sink_for(CHUNKS)
    assert tier.deliver(CHUNKS, exact, 1024, 0.0) == (Grade(0.0003, True, 4),)
    assert tier.deliver(prompt(1, 7), exact, 256, 1.0) == ()


def test_a_sink_gets_some_batches_at_once(
    tier: HostStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "batch_chunks", 1)
    chunks = prompt(6)
    for chunk in chunks:
        put(tier, chunk)
    sink = sink_for(chunks)
    assert len(tier.deliver(chunks, sink, 1536, 0.1)) == 6
    assert [len(batch) for batch in sink.batches] == [4, 2]


def test_when_it_is_late_no_batch_is_begun(
    tier: HostStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "batch_chunks", 1)
    chunks = prompt(6)
    for chunk in chunks:
        put(tier, chunk)
    sink = sink_for(chunks)
    assert len(tier.deliver(chunks, sink, 1536, 0.1, lambda: hasattr(sink, "batches"))) == 4
    assert tier.deliver(chunks, sink, 1536, 0.1, lambda: True) == ()
    assert [len(batch) for batch in sink.batches] == [4]


# what changes meanwhile


def test_a_stream_that_fades_while_it_is_read_is_a_miss(tier: HostStreams, folder: Path) -> None:
    for chunk in CHUNKS:
        put(tier, chunk)
    file = path(folder, CHUNKS[2])
    short = file.stat().st_size - 1
    sink = sink_for(CHUNKS, before=lambda: os.truncate(file, short))
    assert tier.deliver(CHUNKS, sink, 1024, 0.0) == (Grade(0.0003, True, 4),) * 2
    assert isinstance(sink.failures[2], TruncatedError)
    assert tier.levels(CHUNKS[2]) == 3  # and what is left of it stays


def test_a_stream_that_is_replaced_or_gone_while_it_is_read_is_read_as_it_was(
    tier: HostStreams, folder: Path
) -> None:
    put(tier, CHUNKS[0], 3)
    better = sink_for(CHUNKS, before=lambda: put(open_tier(folder), CHUNKS[0], 4))
    assert len(tier.deliver(CHUNKS[:1], better, 256, 0.1)) == 1
    assert tier.levels(CHUNKS[0]) == 4
    for go in (lambda: path(folder, CHUNKS[0]).unlink(), lambda: shutil.rmtree(folder)):
        put(tier, CHUNKS[0])
        assert len(tier.deliver(CHUNKS[:1], sink_for(CHUNKS, before=go), 256, 0.1)) == 1
        assert tier.levels(CHUNKS[0]) == 0
        assert tier.deliver(CHUNKS[:1], sink_for(CHUNKS), 256, 0.1) == ()


def test_a_level_is_checked_once_and_then_copied_in_bulk(tier: HostStreams) -> None:
    """Until then only `read_into`, which checks it, may read it."""
    put(tier, CHUNKS[0])
    with tier.opened(CHUNKS[:1], [3]) as [stream]:
        assert stream.copies(3) is None
        size = HEADER.level_end(2) - HEADER.size_bytes
        checked, copied = bytearray(size), np.zeros(size, np.uint8)
        stream.read_into(memoryview(checked), 3)
        assert stream.copies(4) is None
        copies = stream.copies(3)
        assert copies is not None
        assert copy_all(copies, np.array([copied.ctypes.data], np.uint64)).all()
    assert copied.tobytes() == checked


def test_a_stream_that_is_cut_while_it_is_copied_is_not_whole(
    tier: HostStreams, folder: Path
) -> None:
    put(tier, CHUNKS[0])
    with tier.opened(CHUNKS[:1], [3]) as [stream]:
        size = HEADER.level_end(2) - HEADER.size_bytes
        buffer = np.zeros(size, np.uint8)
        stream.read_into(buffer.data, 3)
        os.truncate(path(folder, CHUNKS[0]), 4000)
        copies = stream.copies(3)
        assert copies is not None
        assert not copy_all(copies, np.array([buffer.ctypes.data], np.uint64)).any()


def test_a_folder_that_was_removed_comes_back(tier: HostStreams, folder: Path) -> None:
    put(tier, CHUNKS[0])
    shutil.rmtree(folder)
    assert not tier.has(CHUNKS[0], 1.0)
    tier.used(CHUNKS)
    assert put(tier, CHUNKS[0], 1)
    assert tier.levels(CHUNKS[0]) == 1


def test_full_memory_keeps_nothing(
    tier: HostStreams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    told: list[str] = []
    monkeypatch.setattr(
        host_streams.logger, "warning", lambda text, *given: told.append(text % given)
    )
    disk = SimpleNamespace(f_bavail=300, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(os, "rename", full)
    assert not put(tier, CHUNKS[0])
    assert os.listdir(folder) == [MARKER]
    assert not put(tier, CHUNKS[1])
    assert tier.counts["unkept"] == 2
    [line] = told
    assert f"{folder} (1,228,800 bytes free): [Errno 28] no space left" in line


def test_what_there_is_no_room_for_is_counted(folder: Path) -> None:
    tier = open_tier(folder, max_bytes=100)
    assert not put(tier, CHUNKS[0])
    assert tier.counts["unkept"] == 1


# what is not believed


@pytest.mark.parametrize("level", range(4))
def test_a_damaged_level_is_a_miss_and_goes(tier: HostStreams, folder: Path, level: int) -> None:
    put(tier, CHUNKS[0])
    put(tier, CHUNKS[1])
    file = path(folder, CHUNKS[0])
    data = bytearray(file.read_bytes())
    data[len(data) - HEADER.stream_bytes + HEADER.level_start(level) + 5] ^= 1
    file.write_bytes(data)
    if level:  # what comes before it is as it was
        enough = KLDS[level - 1]
        assert len(tier.deliver(CHUNKS[:2], sink_for(CHUNKS), 10**6, enough / 1.75)) == 2
    assert tier.deliver(CHUNKS[:2], sink_for(CHUNKS), 10**6, KLDS[level] / 1.75) == ()
    assert not file.exists()


@pytest.mark.parametrize("at", [0, 9, 20, 60, 87, 88, 120, 298])
def test_a_damaged_head_is_a_miss_and_goes(tier: HostStreams, folder: Path, at: int) -> None:
    put(tier, CHUNKS[0])
    file = path(folder, CHUNKS[0])
    data = bytearray(file.read_bytes())
    data[at] ^= 0x41
    file.write_bytes(data)
    assert not tier.has(CHUNKS[0], 1.0)
    assert not file.exists()


@pytest.mark.parametrize("data", [b"", b"x", b"\x89KDNheld", bytes(5000), b"\xff" * 5000])
def test_a_file_of_something_else_is_a_miss(tier: HostStreams, folder: Path, data: bytes) -> None:
    path(folder, CHUNKS[0]).write_bytes(data)
    assert not tier.has(CHUNKS[0], 1.0)
    assert tier.deliver(CHUNKS, sink_for(CHUNKS), 1024, 1.0) == ()


def test_a_file_that_is_cut_within_its_first_level_is_a_miss(
    tier: HostStreams, folder: Path
) -> None:
    put(tier, CHUNKS[0])
    os.truncate(path(folder, CHUNKS[0]), 2000)
    assert (tier.levels(CHUNKS[0]), tier.levels(CHUNKS[0])) == (0, 0)
    assert put(tier, CHUNKS[0], 1)


def test_streams_do_not_pass_for_others(tier: HostStreams, folder: Path) -> None:
    """Neither another chunk's, nor what somebody sealed who has not the namespace's secret."""
    put(tier, CHUNKS[0])
    path(folder, CHUNKS[0]).rename(path(folder, CHUNKS[1]))
    assert not tier.has(CHUNKS[1], 1.0)
    [own] = cut(range(256), Namespace(SPEC.fingerprint, PROFILE, secret=b"mine"))
    [other] = cut(range(256), Namespace(SPEC.fingerprint, PROFILE, secret=b"theirs"))
    forged = Chunk(own.key, own.parent, 0, own.tokens, own.history, other.seal_key)
    assert not tier.put(own, stream_of(forged), 4)
    assert tier.put(forged, stream_of(forged), 4)  # whoever has that key believes it
    assert not open_tier(folder).has(own, 1.0)


def test_what_an_engine_cannot_use_is_not_kept(
    tier: HostStreams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, whole = CHUNKS[1], stream_of(CHUNKS[1])
    assert not tier.put(chunk, stream_of(chunk, absent=1), 4)
    assert not tier.put(chunk, stream_of(CHUNKS[2]), 4)
    assert not tier.put(chunk, b"", 4)
    assert not tier.put(chunk, whole[:100], 1)
    for levels in (0, 5):
        assert not tier.put(chunk, whole, levels)
    assert not tier.put(chunk, whole[:-1], 4)
    assert tier.put(chunk, whole[:-1], 3)
    monkeypatch.setattr(Levelled, "decodes_to", lambda *_: False)
    assert not open_tier(folder).has(chunk, 1.0)
    assert path(folder, chunk).exists()  # it is good for others
    assert not open_tier(folder).put(CHUNKS[0], stream_of(CHUNKS[0], DType.BFLOAT16), 4)


def test_what_another_could_have_written_is_not_believed(tier: HostStreams, folder: Path) -> None:
    for chunk in CHUNKS:
        put(tier, chunk)
    path(folder, CHUNKS[0]).chmod(0o666)
    elsewhere = folder.parent / "elsewhere"
    path(folder, CHUNKS[1]).rename(elsewhere)
    path(folder, CHUNKS[1]).symlink_to(elsewhere)
    assert [tier.levels(chunk) for chunk in CHUNKS] == [0, 0, 4, 4]
    path(folder, CHUNKS[2]).chmod(0o666)
    assert tier.deliver(CHUNKS[2:3], sink_for(CHUNKS), 1024, 1.0) == ()
    folder.chmod(0o777)
    tier.used(CHUNKS)
    assert tier.levels(CHUNKS[3]) == 0
    with pytest.raises(UnsupportedError, match="only this user"):
        put(tier, CHUNKS[1])


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folder.rename(folder.with_name("kdn-12345"))
    with pytest.raises(UnsupportedError, match="only this user"):
        open_tier(folder)


def test_too_many_open_files_are_a_miss(
    tier: HostStreams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no reason to remove anything."""
    put(tier, CHUNKS[0])
    real = os.open

    def crowded(name: Any, *given: Any, **more: Any) -> int:
        if str(name).endswith(".stream"):
            raise OSError(errno.EMFILE, "too many open files")
        return real(name, *given, **more)

    monkeypatch.setattr(os, "open", crowded)
    assert not open_tier(folder).has(CHUNKS[0], 1.0)
    assert tier.deliver(CHUNKS[:1], sink_for(CHUNKS), 256, 1.0) == ()
    monkeypatch.undo()
    assert tier.has(CHUNKS[0], 0.0)


def test_headers_are_read_once(
    tier: HostStreams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as files are the same; looking at many is little more than asking for their size."""
    for chunk in CHUNKS:
        put(tier, chunk)
    reads: list[int] = []
    real = os.pread

    def counted(*given: Any) -> bytes:
        reads.append(1)
        return real(*given)

    monkeypatch.setattr(os, "pread", counted)
    other = open_tier(folder)
    for _ in range(3):
        assert all(other.has(chunk, 0.0) for chunk in CHUNKS)
        tier.used(CHUNKS)
    assert len(reads) == 4
    os.truncate(path(folder, CHUNKS[0]), 8192)
    assert other.levels(CHUNKS[0]) == 2
    assert len(reads) == 5


def test_what_was_seen_before_is_opened_with_few_calls(
    tier: HostStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gives the interpreter to an engine, which is slow to give it back."""
    for chunk in CHUNKS:
        put(tier, chunk)
    calls: list[str] = []
    for name in ("open", "stat", "fstat", "close", "pread"):
        monkeypatch.setattr(os, name, _counting(name, getattr(os, name), calls))
    with tier.opened(CHUNKS, [1] * 4) as streams:
        assert len(streams) == 4
    calls.clear()
    with tier.opened(CHUNKS, [1] * 4) as streams:
        assert len(streams) == 4
    assert sorted(set(calls)) == ["close", "fstat", "open"]
    assert len(calls) == 3 * (4 + 1)  # and the folder's


def _counting(name: str, real: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(*args, **kwargs)

    return counted


def test_many_prompts_do_not_fill_the_memory_of_headers(
    tier: HostStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdn.session.host_streams.MAX_SEEN", 3)
    for chunk in first_chunks(5):
        put(tier, chunk, 1)
    assert all(tier.has(chunk, 0.1) for chunk in first_chunks(5))
    assert len(tier._seen) == 3
