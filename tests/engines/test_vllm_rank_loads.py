"""Ranks that load together, simulated in one process over a real session."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream, LevelSource
from kdn.delivery.sink import Arrival
from kdn.engines.vllm import rank_streams
from kdn.engines.vllm.one_fetch import stream_of
from kdn.engines.vllm.rank_streams import Record, StreamsOut
from kdn.engines.vllm.shared import SharedSession
from kdn.errors import AuthenticityError, KdnError, MismatchError
from tests.engines.vllm_ranks import Reads, computed, ended, fits, ranks_of, wait_for
from tests.engines.vllm_working import AWAY, SPACE, TOKENS, order, publish, shared_session

CHUNKS = cut(TOKENS, SPACE)


def test_one_rank_fetches_and_each_has_its_heads(shared: SharedSession, tmp_path: Path) -> None:
    cache = publish(shared)
    reads = Reads(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        for one in reversed(ranks):  # the others may well begin before the first
            one.begin(order(0, 576))
        failed, report = ended(ranks)
        assert failed == set()
        assert report.exact_until == {"r": 576}
        assert report.num_ranks("r") == 2
        assert all(fits(one, cache, 576) for one in ranks)
        assert all(one.paged.heads.count == 1 for one in ranks)
        assert set(reads.keys.values()) == {1}
        assert ranks[1].worker.counts["fetched_bytes"] == 0
        wait_for(lambda: len(list(ranks[0].folder.path.iterdir())) == 2)  # the locks


def test_four_ranks_of_two_heads(shared: SharedSession, tmp_path: Path) -> None:
    cache = publish(shared)
    reads = Reads(shared)
    with ranks_of(shared, tmp_path / "host", 4) as ranks:
        assert [one.heads.start for one in ranks] == [0, 0, 1, 1]
        for one in ranks:
            one.begin(order(0, 576))
        assert ended(ranks)[0] == set()
        assert all(fits(one, cache, 576) for one in ranks)
    assert set(reads.keys.values()) == {1}


def test_several_loads_at_once(shared: SharedSession, tmp_path: Path) -> None:
    cache = publish(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        for number, name in enumerate("abcde"):
            for one in ranks:
                one.begin(replace(order(0, 576, name=name), number=number))
        names: list[set[str]] = [set(), set()]
        wait_for(
            lambda: (
                [
                    seen.update(one.worker.take_finished())
                    for seen, one in zip(names, ranks, strict=True)
                ]
                and names == [set("abcde")] * 2
            )
        )
        assert not any(one.worker.take_failed_blocks() for one in ranks)
        assert all(fits(one, cache, 576) for one in ranks)


def test_what_one_rank_lacks_is_missing(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        paged, write = ranks[1].paged, ranks[1].paged.write

        def broken(cache: KVCache, start: int, *given: Any) -> None:
            if start >= 256:
                raise MismatchError("no such blocks")
            write(cache, start, *given)

        monkeypatch.setattr(paged, "write", broken)
        for one in ranks:
            one.begin(order(0, 576))
        failed, report = ended(ranks)
    assert failed == set(range(8, 18))
    assert report.exact_until == {"r": 256}
    assert report.failed_from == {"r": 256}


def test_a_first_rank_that_never_begins_is_a_miss(shared: SharedSession, tmp_path: Path) -> None:
    publish(shared)
    reads = Reads(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        began_s = time.monotonic()
        ranks[1].begin(order(0, 576, deadline_s=0.3))
        failed, _ = ended(ranks[1:])
        assert failed == set(range(18))
        assert 0.3 < time.monotonic() - began_s < 10.0
    assert not reads.keys


def test_without_the_first_rank_the_next_fetches(shared: SharedSession, tmp_path: Path) -> None:
    """As on a second host."""
    cache = publish(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        ranks[0].ranks.close()
        ranks[1].begin(order(0, 576))
        assert ended(ranks[1:])[0] == set()
        assert fits(ranks[1], cache, 576)


@pytest.mark.parametrize("num_handed", [0, 1, 2])
def test_a_first_rank_that_dies(shared: SharedSession, tmp_path: Path, num_handed: int) -> None:
    """The others go on from what it had handed on."""
    cache = publish(shared)
    reads = Reads(shared)
    codec = shared.session.codec
    with ranks_of(shared, tmp_path / "host") as ranks:
        out = StreamsOut(ranks[0].folder, 0, [1])
        for number, chunk in enumerate(CHUNKS[:num_handed]):
            part = cache.slice(chunk.start, chunk.end)
            out.put(number, 1, Bitstream.parse(codec.encode(chunk, part)).parts(1))
        ranks[1].begin(order(0, 576))
        time.sleep(0.2)
        ranks[0].ranks.close()
        assert ended(ranks[1:])[0] == set()
        assert fits(ranks[1], cache, 576)
    assert set(reads.keys) == {chunk.key for chunk in CHUNKS[num_handed:]}


def test_what_the_host_holds_is_fetched_by_nobody(tmp_path: Path) -> None:
    host = {"host_folder": str(tmp_path / "memory"), "host_bytes": 1 << 30}
    with shared_session(tmp_path / "folder", **host) as shared:
        cache = publish(shared)
        held = shared.session.host
        assert held is not None
        wait_for(lambda: held.has(CHUNKS[2], 0.0))
        reads = Reads(shared)
        with ranks_of(shared, tmp_path / "host") as ranks:
            for one in ranks:
                one.begin(order(0, 576))
            assert ended(ranks)[0] == set()
            assert all(fits(one, cache, 576) for one in ranks)
        assert not reads.keys


def test_what_the_first_rank_found_on_the_host_meanwhile(tmp_path: Path) -> None:
    """Another load has left it there since the others looked."""
    host = {"host_folder": str(tmp_path / "memory"), "host_bytes": 1 << 30}
    cache = computed()
    with (
        shared_session(AWAY, **host) as shared,
        ranks_of(shared, tmp_path / "host") as ranks,
    ):
        ranks[1].begin(order(0, 576))
        time.sleep(0.1)
        out, codec, held = StreamsOut(ranks[0].folder, 0, [1]), shared.session.codec, (0, 2)
        for number, chunk in enumerate(CHUNKS):
            part = cache.slice(chunk.start, chunk.end)
            if number in held:
                assert shared.session.host is not None
                assert shared.session.host.put(chunk, part, 0.0, exact=True)
            else:
                out.put(number, 1, Bitstream.parse(codec.encode(chunk, part)).parts(1))
        out.end()
        assert ended(ranks[1:])[0] == set()
        assert fits(ranks[1], cache, 576)


class _Elsewhere(LevelSource):
    """A held stream, whose file is closed by now."""

    def __getitem__(self, level: int) -> memoryview:
        raise AssertionError("read too late")

    def read_into(self, buffer: memoryview, first: int, last: int) -> None:
        raise AssertionError("read too late")

    def __iter__(self) -> Iterator[int]:
        return iter(range(1))

    def __len__(self) -> int:
        return 1


def test_streams_that_the_host_holds_are_not_handed_on(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has them from there."""
    codec, cache = shared.session.codec, computed()
    streams = [
        Bitstream.parse(codec.encode(chunk, cache.slice(chunk.start, chunk.end)))
        for chunk in CHUNKS
    ]
    streams[0] = Bitstream(streams[0].header, _Elsewhere())
    handed = []

    async def deliver(chunks: Any, sink: Any, **_: Any) -> Any:
        given = zip(chunks, streams, strict=True)
        sink.decode([Arrival(chunk, stream, 1, False) for chunk, stream in given])

    class Ignoring:
        batch_chunks = 1

        def decode(self, batch: Sequence[Arrival]) -> list[None]:
            return [None] * len(batch)

    put = StreamsOut.put
    monkeypatch.setattr(StreamsOut, "put", lambda *given: handed.append(given[1]) or put(*given))
    monkeypatch.setattr(shared.session, "deliver", deliver)
    with ranks_of(shared, tmp_path / "host") as ranks:
        first = ranks[0].ranks
        shared.submit(
            lambda: first.deliver(1, CHUNKS, Ignoring(), deadline_s=1.0)  # type: ignore[arg-type]
        ).result(10)
        wait_for(lambda: handed == [1, 2])


def test_no_room_in_the_hosts_memory(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_streams, "LOAD_BYTES", 100)
    cache = publish(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        for one in ranks:
            one.begin(order(0, 576))
        assert ended(ranks)[0] == set()
        assert all(fits(one, cache, 576) for one in ranks)


def test_no_file_for_the_others(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait for it until they have no time left."""

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    cache = publish(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        monkeypatch.setattr(ranks[0].folder, "create", fail)
        for one in ranks:
            one.begin(order(0, 576))
        assert ended(ranks)[0] == set()
        assert all(fits(one, cache, 576) for one in ranks)


def test_streams_of_others_are_refused(shared: SharedSession) -> None:
    codec, cache = shared.session.codec, computed()
    data = codec.encode(CHUNKS[0], cache.slice(0, 256))

    def record(data: bytes, levels: int = 1) -> Record:
        return Record(0, levels, np.frombuffer(data, np.uint8))

    assert stream_of(record(data), CHUNKS[0], codec).levels_available == 1
    for chunk, found in (
        (CHUNKS[1], record(data)),
        (CHUNKS[0], record(data[:-1])),
        (CHUNKS[0], record(data, 2)),
        (CHUNKS[0], record(b"")),
    ):
        with pytest.raises(KdnError):
            stream_of(found, chunk, codec)
    with pytest.raises(AuthenticityError):
        stream_of(record(data), replace(CHUNKS[0], seal_key=b"x" * len(CHUNKS[0].seal_key)), codec)


def test_a_forged_record_costs_its_chunk_alone(shared: SharedSession, tmp_path: Path) -> None:
    cache = publish(shared)
    codec = shared.session.codec
    with ranks_of(shared, tmp_path / "host") as ranks:
        out = StreamsOut(ranks[0].folder, 0, [1])
        for number, chunk in enumerate(CHUNKS[:2]):
            part = cache.slice(chunk.start, chunk.end)
            out.put(number, 1, Bitstream.parse(codec.encode(chunk, part)).parts(1))
        out.put(2, 1, [b"\0" * 5000])
        out.put(99, 1, [b"\0" * 5000])
        out.end()
        ranks[1].begin(order(0, 576))
        assert ended(ranks[1:])[0] == {16, 17}
        assert fits(ranks[1], cache, 512)


def test_a_load_that_is_given_up_is_not_written_to(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank hands nothing on before the other has given up."""
    cache = publish(shared)
    codec = shared.session.codec
    monkeypatch.setattr("kdn.engines.vllm.one_fetch.GRACE_S", 60.0)
    monkeypatch.setattr("kdn.engines.vllm.loader.GRACE_S", 0.1)
    with ranks_of(shared, tmp_path / "host") as ranks:
        out = StreamsOut(ranks[0].folder, 0, [1])
        ranks[1].begin(order(0, 576, deadline_s=0.1))
        assert ended(ranks[1:])[0] == set(range(18))
        part = cache.slice(0, 256)
        out.put(0, 1, Bitstream.parse(codec.encode(CHUNKS[0], part)).parts(1))
        out.end()
        time.sleep(0.1)
        assert not ranks[1].loaded(256).keys.any()


def test_nothing_is_left_on_the_loop(shared: SharedSession, tmp_path: Path) -> None:
    publish(shared)
    with ranks_of(shared, tmp_path / "host") as ranks:
        for one in ranks:
            one.begin(order(0, 576))
        ended(ranks)

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        before = shared.submit(tasks).result(5)
        for one in ranks:
            one.begin(order(0, 576))
        ended(ranks)
        assert shared.submit(tasks).result(5) <= before
