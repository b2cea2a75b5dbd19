"""Which levels go when room is short: exact, by an injected clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.codec.format import Header, Section, StreamInfo, write
from kdn.codec.header import CodecId, DType
from kdn.delivery.sink import HostSink
from kdn.session.fading import PAGE_BYTES, Kept, Room, stays
from kdn.session.host_folder import MARKER, Here
from kdn.session.host_streams import HostStreams
from kdn.session.stream_file import FileHead
from tests.session.levelled import (
    PAGES,
    Clock,
    Levelled,
    first_chunks,
    pages_of,
    prompt,
    stream_of,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / f"kdn-{os.geteuid()}"


def open_tier(folder: Path, pages: int, clock: Clock, spare: float = 0.0) -> HostStreams:
    return HostStreams(
        folder.parent, Levelled(), torch.float32, pages * PAGE_BYTES, clock, spare=spare
    )


def put(tier: HostStreams, chunk: Chunk, levels: int = 4) -> bool:
    return tier.put(chunk, stream_of(chunk), levels)


def levels(tier: HostStreams, chunks: list[Chunk]) -> list[int]:
    return [tier.levels(chunk) for chunk in chunks]


def taken_pages(folder: Path) -> int:
    return sum(-(-one.stat().st_size // PAGE_BYTES) for one in folder.glob("*.stream"))


@pytest.mark.parametrize(
    ("room", "left"),
    [
        (29, [4, 4, 4, 4]), (28, [3, 4, 4, 4]), (24, [3, 3, 4, 4]), (20, [3, 3, 3, 4]),
        (16, [3, 3, 3, 3]), (12, [2, 3, 3, 3]), (11, [2, 2, 3, 3]), (10, [2, 2, 2, 3]),
        (9, [2, 2, 2, 2]), (8, [1, 2, 2, 2]), (7, [1, 1, 2, 2]), (6, [1, 1, 1, 2]),
        (5, [1, 1, 1, 1]), (4, [0, 1, 1, 1]), (3, [0, 0, 1, 1]), (1, [0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_what_was_used_alike_fades_together(
    folder: Path, clock: Clock, room: int, left: list[int]
) -> None:
    """From four levels to three, to two, to one, all of them, and only then one is forgotten: the
    first that was used."""
    *chunks, last = first_chunks(5)
    wide = open_tier(folder, 100, clock)
    for chunk in chunks:
        put(wide, chunk)
        clock.pass_s(0.001)
    assert put(open_tier(folder, room, clock), last, 1)
    assert levels(wide, chunks) == left
    assert taken_pages(folder) == pages_of(left) + 1 <= room


def test_what_is_new_fades_as_others_do(folder: Path, clock: Clock) -> None:
    """It is not kept finer than all that is as fresh."""
    tier, chunks = open_tier(folder, 6, clock), first_chunks(6)
    assert [put(tier, chunk) for chunk in chunks] == [True] * 6
    assert levels(tier, chunks) == [1] * 6
    assert taken_pages(folder) == 6
    assert put(tier, prompt(1, 99)[0])
    assert levels(tier, chunks) == [0, 1, 1, 1, 1, 1]


def test_what_nobody_used_for_long_goes_before_fresh_streams_lose_what_they_need(
    folder: Path, clock: Clock
) -> None:
    tier, old, fresh = open_tier(folder, 9, clock), first_chunks(3), first_chunks(6)[3:]
    for chunk in old:
        put(tier, chunk, 3)
    clock.pass_s(3600)
    for chunk in fresh:
        assert put(tier, chunk, 3)
        clock.pass_s(1)
    assert levels(tier, fresh) == [3, 3, 3]
    assert levels(tier, old) == [0, 0, 0]


@pytest.mark.parametrize(("age_s", "left"), [(29, [2, 2]), (31, [1, 3])])
def test_a_coarser_level_stays_half_as_long_again(
    folder: Path, clock: Clock, age_s: float, left: list[int]
) -> None:
    """One stream of two levels, of `age_s`, and one of three levels, 20 s old."""
    tier, [older, newer, third] = open_tier(folder, 5, clock), first_chunks(3)
    put(tier, older, 2)
    clock.pass_s(age_s - 20)
    put(tier, newer, 3)
    clock.pass_s(20)
    put(tier, third, 1)
    assert levels(tier, [older, newer]) == left


def test_levels_that_nobody_asks_for_go_first(folder: Path, clock: Clock) -> None:
    """A stream's third level goes before the second of one that is sixteen times older, if readers
    are content with two; if they want four, it is age that counts."""
    for worst_kld, expected in ((0.02, [2, 2]), (0.0, [1, 3])):
        tier, [older, newer, third] = open_tier(folder, 5, clock), first_chunks(3)
        put(tier, older, 2)
        clock.pass_s(100)
        put(tier, newer, 3)
        clock.pass_s(10)
        for _ in range(10):
            tier.has(third, worst_kld)
        put(tier, third, 1)
        assert levels(tier, [older, newer]) == expected
        for chunk in (older, newer, third):
            (folder / f"{chunk.key.hex()}.stream").unlink()


def test_what_some_readers_ask_for_does_not_count() -> None:
    room = Room(1)
    assert room._asked_for(4) == 3
    for asked in [2] * 58 + [4] * 6:
        room.asked(asked)
    assert room._asked_for(4) == 2
    for asked in [4] * 6:
        room.asked(asked)
    assert room._asked_for(4) == 4
    assert [stays(levels, 3) for levels in (4, 3, 2, 1)] == [1 / 16, 1, 1.5, 2.25]


def test_the_least_recently_used_fades_first(folder: Path, clock: Clock) -> None:
    tier, chunks = open_tier(folder, 9, clock), first_chunks(4)
    for chunk in chunks[:3]:
        put(tier, chunk, 3)
        clock.pass_s(100)
    tier.used(chunks[:1])
    put(tier, chunks[3], 1)
    assert levels(tier, chunks) == [3, 2, 3, 1]


def test_of_one_prompt_the_end_fades_first(folder: Path, clock: Clock) -> None:
    """Also if its end was put last, and after it was used."""
    tier, chunks, other = open_tier(folder, 12, clock), prompt(4), prompt(1, 5)[0]
    for chunk in chunks:
        put(tier, chunk, 3)
        clock.pass_s(0.01)
    assert levels(tier, chunks) == [3, 3, 3, 3]
    put(tier, other, 1)
    assert levels(tier, chunks) == [3, 3, 3, 2]
    clock.pass_s(100)
    tier.used(list(reversed(chunks)))
    put(tier, other, 3)
    assert levels(tier, chunks) == [3, 2, 2, 2]


def test_what_is_too_large_is_kept_as_far_as_it_fits(folder: Path, clock: Clock) -> None:
    assert put(open_tier(folder, 3, clock), first_chunks(1)[0])
    assert levels(open_tier(folder, 3, clock), first_chunks(1)) == [3]


def test_a_full_memory_takes_no_levels_that_nobody_asks_for(folder: Path, clock: Clock) -> None:
    tier, chunks = open_tier(folder, 17, clock), first_chunks(3)
    for chunk in chunks[:2]:
        put(tier, chunk)
    assert put(tier, chunks[2])  # three pages are left
    assert levels(tier, chunks) == [4, 4, 3]
    assert put(tier, prompt(1, 9)[0])
    assert levels(tier, [*chunks, prompt(1, 9)[0]]) == [3, 4, 3, 3]


def test_without_any_room_nothing_is_kept_or_lost(folder: Path, clock: Clock) -> None:
    tier, chunks = open_tier(folder, 1, clock), prompt(2)
    assert put(tier, chunks[0])
    assert not put(tier, chunks[1])  # it would be the first to go
    assert levels(tier, chunks) == [1, 0]
    assert not put(open_tier(folder, 0, clock), first_chunks(2)[1])
    assert levels(tier, chunks) == [1, 0]


def test_others_memory_stays_free(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(folder, 10**6, clock)
    disk = SimpleNamespace(f_blocks=1000, f_bavail=1000, f_frsize=PAGE_BYTES)
    monkeypatch.setattr(os, "fstatvfs", lambda _: disk)
    old, new, last = first_chunks(3)
    assert put(tier, old)
    taken = taken_pages(folder)
    disk.f_bavail = 250 + taken - 1  # for all but a page of another
    assert put(tier, new)
    assert taken < taken_pages(folder) <= 2 * taken - 1
    taken, disk.f_bavail = taken_pages(folder), 249
    clock.pass_s(1000)
    assert put(tier, last)  # in the place of what was there
    assert taken_pages(folder) <= taken


def test_a_better_stream_counts_once(folder: Path, clock: Clock) -> None:
    tier, chunks = open_tier(folder, 10, clock), first_chunks(2)
    for count in (1, 2, 3, 4):
        assert put(tier, chunks[0], count)
    assert put(tier, chunks[1], 3)
    assert levels(tier, chunks) == [4, 3]
    assert taken_pages(folder) == pages_of([4, 3]) == 10


def test_more_is_freed_than_needed(folder: Path, clock: Clock) -> None:
    """So that the next ones find room without looking for it: a fifth, here."""
    tier, chunks = open_tier(folder, 30, clock, spare=0.2), first_chunks(12)
    for chunk in chunks[:10]:
        put(tier, chunk, 3)
        clock.pass_s(0.01)
    put(tier, chunks[10], 1)
    assert levels(tier, chunks[:11]) == [2] * 7 + [3] * 3 + [1]
    assert taken_pages(folder) == 24


def test_room_is_not_looked_for_at_every_put(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[int] = []
    real = Here.entries

    def counted(here: Here) -> Iterator[tuple[str, os.stat_result]]:
        scans.append(1)
        return real(here)

    monkeypatch.setattr(Here, "entries", counted)
    tier, other = open_tier(folder, 100, clock), open_tier(folder, 100, clock)
    for chunk in first_chunks(20):
        put(tier, chunk, 1)
        clock.pass_s(60)
    assert len(scans) == 1  # at first
    put(other, prompt(1, 50)[0], 4)
    assert len(scans) == 2
    put(tier, prompt(1, 51)[0], 1)  # another process has put something there
    assert len(scans) == 3
    for first in range(60, 200):  # and makes room again and again, without the time to look
        put(tier, prompt(1, first)[0], 1)
    assert len(scans) == 3
    assert taken_pages(folder) == 100


def test_a_scan_lets_others_run(folder: Path, clock: Clock) -> None:
    wide = open_tier(folder, 1000, clock)
    for chunk in first_chunks(300):
        put(wide, chunk, 1)
    pauses: list[float] = []
    room = Room(1 << 20, clock, pause=pauses.append)
    with wide._folder.opened() as here:
        assert room.make(here, Kept("new", 0, clock.now_ns, (5000,), 1)) == 1
    assert len(pauses) == 1


# several processes


def test_two_who_make_room_do_not_make_a_file_longer(folder: Path, clock: Clock) -> None:
    """One knows of four levels where the other has left one: what is cut off stays cut off."""
    chunks = first_chunks(6)
    first, second = open_tier(folder, 30, clock), open_tier(folder, 15, clock)
    for chunk in chunks[:2]:
        put(first, chunk)
    put(second, chunks[2], 1)  # now it has looked: 4, 4, 1
    clock.pass_s(1)
    put(open_tier(folder, 4, clock), chunks[3], 1)
    assert levels(first, chunks[:4]) == [1, 1, 1, 1]
    put(second, chunks[4], 3)  # and lets the first two have three levels, as it thinks
    assert second.counts["faded"] == 1
    assert levels(first, chunks[:5]) == [1, 1, 1, 1, 3]
    sink = HostSink.of(Levelled(), chunks[:1], torch.float32)
    assert len(first.deliver(chunks[:1], sink, 256, 1.0)) == 1


def test_what_another_process_used_stays(folder: Path, clock: Clock) -> None:
    chunks = first_chunks(4)
    mine, others = open_tier(folder, 9, clock), open_tier(folder, 9, clock)
    for chunk in chunks[:3]:
        put(mine, chunk, 3)
        clock.pass_s(1)
    others.used(chunks[:1])
    put(mine, chunks[3], 1)
    assert levels(mine, chunks) == [3, 2, 3, 1]


def test_what_another_process_removed_does_not_count(folder: Path, clock: Clock) -> None:
    tier, chunks = open_tier(folder, 9, clock), first_chunks(5)
    for chunk in chunks[:3]:
        put(tier, chunk, 3)
    for chunk in chunks[:2]:
        (folder / f"{chunk.key.hex()}.stream").unlink()
    clock.pass_s(11)
    assert put(tier, chunks[3], 3)
    assert put(tier, chunks[4], 3)
    assert levels(tier, chunks) == [0, 0, 3, 3, 3]


def test_what_a_dead_process_left_goes_and_others_files_stay(folder: Path, clock: Clock) -> None:
    tier = open_tier(folder, 2, clock)
    left, fresh = folder / ".0123456789abcdef.part", folder / ".fedcba9876543210.part"
    strange = folder / ("00" * 16 + ".stream")  # of a later version, perhaps
    theirs = folder / "thesis.tex"
    for file in (left, fresh, strange, theirs):
        file.write_bytes(b"?" * 5000)
        os.utime(file, ns=(clock.now_ns, clock.now_ns))
    os.utime(left, ns=(0, clock.now_ns - 61 * 10**9))
    clock.pass_s(0.1)
    assert put(tier, first_chunks(1)[0], 1)
    names = sorted(os.listdir(folder))
    kept = f"{first_chunks(1)[0].key.hex()}.stream"
    assert names == sorted([MARKER, fresh.name, theirs.name, kept])


# how much fits


def test_three_levels_of_an_8b_model_fit_fifteen_times_as_often_as_its_values() -> None:
    """8,192 tokens, bf16: 1.07 GB of values; 0.58 bits a value in three levels. What is added to
    streams (head, header, whole pages) is less than a hundredth."""
    values = 2 * 32 * 256 * 8 * 128  # of a chunk
    bits = (0.06, 0.17, 0.35, 2.2)
    groups = 16
    [chunk] = first_chunks(1)
    info = StreamInfo.for_chunk(
        chunk, Levelled.spec, codec=CodecId.KLT, dtype=DType.BFLOAT16, num_levels=4,
        profile=Levelled.profile_id,
    )  # fmt: skip
    sections = [
        Section(level, kind, group, bytes(int(values * rate / 8 / groups / 2)))
        for level, rate in enumerate(bits)
        for group in range(groups)
        for kind in (0, 4)
    ]
    data = write(info, sections, chunk.seal_key)
    head = FileHead.of(Header.parse(data), memoryview(data), 3)
    file = Kept("", 0, 0, head.level_ends, 3).size_bytes
    coded = values * sum(bits[:3]) / 8
    assert coded < file < 1.01 * coded
    assert 20e9 // (32 * file) > 15 * (20e9 // (32 * values * 2))
    assert round(values * 2 / file, 1) == 27.5


def test_pages_are_as_the_other_tests_expect(folder: Path, clock: Clock) -> None:
    for count, pages in enumerate(PAGES, 1):
        tier, chunk = open_tier(folder, 100, clock), first_chunks(1)[0]
        put(tier, chunk, count)
        assert taken_pages(folder) == pages
