"""Ranks that publish together, simulated in one process over a real session."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from kdn.cache.keys import cut
from kdn.cache.spec import ModelSpec
from kdn.engines.vllm import gathering
from kdn.engines.vllm.layout import Layout, PagedCache
from kdn.engines.vllm.messages import SaveOrder, Step
from kdn.engines.vllm.rank_parts import HEADER_BYTES, Share, pack, unpack
from kdn.engines.vllm.saver import Saver
from kdn.engines.vllm.shared import SharedSession
from kdn.engines.vllm.staging import Staging
from kdn.errors import FormatError, MismatchError
from tests.engines.vllm_ranks import computed, ranks_of, wait_for
from tests.engines.vllm_working import (
    BLOCK,
    BLOCKS,
    DIM,
    LAYERS,
    SPACE,
    SPEC,
    TOKENS,
    load,
    make_worker,
)

CHUNKS = cut(TOKENS, SPACE)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_publish_together(shared: SharedSession, tmp_path: Path, count: int) -> None:
    cache = computed()
    with ranks_of(shared, tmp_path / "host", count) as ranks:
        for one in reversed(ranks):
            one.save(cache)
        wait_for(lambda: shared.session.publisher.counts.published == 3)
        assert [one.worker.counts["published_chunks"] for one in ranks] == [3] + [0] * (count - 1)
        assert not any(one.worker.counts["incomplete_chunks"] for one in ranks)
        wait_for(lambda: len(list(ranks[0].folder.path.iterdir())) == count)
    worker, paged = make_worker(shared)  # of an engine with one rank
    assert load(worker, 0, 576) == (set(), 576)
    assert torch.equal(paged.read(0, 576, range(30)).keys, cache.keys[:, :576])


def test_a_part_that_does_not_come(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "PART_S", 0.3)
    with ranks_of(shared, tmp_path / "host") as ranks:
        ranks[0].save(computed())
        wait_for(lambda: ranks[0].worker.counts["incomplete_chunks"] == 3)
        ranks[0].save(computed())  # it goes on, if the others do
        ranks[1].save(computed())
        wait_for(lambda: shared.session.publisher.counts.published == 3)


def test_parts_that_nobody_takes(
    shared: SharedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is bounded, and given back after a while."""
    monkeypatch.setattr(gathering, "PART_S", 0.3)
    with ranks_of(shared, tmp_path / "host") as ranks:
        giving = ranks[1].ranks._giving
        assert giving is not None
        giving._room = 2 * (HEADER_BYTES + computed().slice(0, 256).of_heads(range(1)).size_bytes)
        ranks[1].save(computed())
        assert ranks[1].worker.counts["unpublished_chunks"] == 1

        def parts() -> list[int]:
            found = ranks[1].folder.path.glob("part-*")
            return [path.stat().st_mtime_ns for path in found]

        wait_for(lambda: len(parts()) == 2)
        before = max(parts())
        time.sleep(0.4)
        ranks[1].save(computed())
        wait_for(lambda: len(parts()) == 2 and min(parts()) > before)
        assert ranks[1].worker.counts["unpublished_chunks"] == 2


def test_parts_that_are_copied_by_another_thread(shared: SharedSession, tmp_path: Path) -> None:
    """As on a GPU, on a CPU in its place: copies are queued, and given when they are there."""
    cache, blocks = computed(), tuple(range(40, 60))
    with ranks_of(shared, tmp_path / "host") as ranks:
        savers = []
        for one in ranks:
            layers = [torch.zeros(BLOCKS, 1, BLOCK, 2 * DIM) for _ in range(LAYERS)]
            paged = PagedCache(layers, SPEC, one.paged.heads, BLOCK, Layout.HEADS_FIRST)
            paged.write(cache.of_heads(one.heads), 0, 608, blocks)
            staging = Staging(paged, LAYERS, 1 << 20)
            counts, give = one.worker.counts, one.ranks.offer
            savers.append(Saver(shared, paged, staging, lambda: lambda: False, counts, give))
        for saver in savers:
            saver.begin()
            order = SaveOrder("r", tuple(CHUNKS), blocks)
            assert saver.save(Step(saves=(order,), num_tokens=600)) == {}
        wait_for(lambda: shared.session.publisher.counts.published == 3)
        assert all(saver.staging.num_free == len(saver.staging) for saver in savers)
    worker, paged = make_worker(shared)
    assert load(worker, 0, 576) == (set(), 576)
    assert torch.equal(paged.read(0, 576, range(30)).values, cache.values[:, :576])


def test_no_more_is_put_together_than_there_is_room_for(
    shared: SharedSession, tmp_path: Path
) -> None:
    """Parts wait meanwhile, each in its rank's own room."""
    with ranks_of(shared, tmp_path / "host") as ranks:
        gathering = ranks[0].ranks._gathering
        assert gathering is not None
        asked: list[int] = []
        gathering._takes = lambda size: asked.append(size) or False  # type: ignore[func-returns-value]
        for one in ranks:
            one.save(computed())
        wait_for(lambda: len(asked) > 6)
        assert asked[0] == computed().slice(0, 256).size_bytes
        assert ranks[0].worker.counts["published_chunks"] == 0
        gathering._takes = lambda size: True
        wait_for(lambda: shared.session.publisher.counts.published == 3)


def test_a_chunk_that_is_offered_again_is_published_once(
    shared: SharedSession, tmp_path: Path
) -> None:
    """A rank had no room for its part: the scheduler orders the chunk again, of all ranks."""
    with ranks_of(shared, tmp_path / "host") as ranks:
        for one in (ranks[0], ranks[0], ranks[1]):
            one.save(computed())
        wait_for(lambda: shared.session.publisher.counts.published == 3)
        assert ranks[0].worker.counts["published_chunks"] == 3
        gathering = ranks[0].ranks._gathering
        assert gathering is not None
        wait_for(lambda: gathering._bytes == 0 and not gathering._waiting)
        assert ranks[0].worker.counts["incomplete_chunks"] == 0


def test_ranks_on_several_hosts_publish_nothing(
    shared: SharedSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ranks_of(shared, tmp_path / "one", 2) as here,
        ranks_of(shared, tmp_path / "two", 2) as there,
    ):
        here[1].ranks.close()
        there[0].ranks.close()
        here[0].save(computed())
        there[1].save(computed())
        here[0].save(computed())
        assert here[0].worker.counts["unpublished_chunks"] == 6
        assert there[1].worker.counts["unpublished_chunks"] == 3
        assert sum("nothing is published" in line for line in caplog.messages) == 2
        assert not list(there[1].folder.path.glob("part-*"))


def test_closing_publishes_what_is_complete(shared: SharedSession, tmp_path: Path) -> None:
    with ranks_of(shared, tmp_path / "host") as ranks:
        for one in ranks:
            one.save(computed())
        ranks[1].ranks.close()
        ranks[0].ranks.close()
    wait_for(lambda: shared.session.publisher.counts.published == 3)
    assert list((tmp_path / "host").iterdir()) == []
    assert not [one for one in threading.enumerate() if one.name == "kdn-gathering"]


# parts

FOUR = ModelSpec(2, 4, 8, 1000, (None,) * 2, (None,) * 2, b"m" * 16)


@pytest.mark.parametrize(("ranks", "writers"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (8, [0, 2, 4, 6])])
def test_one_of_those_with_the_same_heads_writes(ranks: int, writers: list[int]) -> None:
    assert Share(FOUR, 0, ranks).writers == writers


def test_a_part_is_what_is_expected_or_refused() -> None:
    chunk, dtype = CHUNKS[0], torch.float32
    cache = computed().slice(0, 256)
    giver, taker = Share(SPEC, 1, 2), Share(SPEC, 0, 2)
    data = b"".join(pack(giver, chunk, cache.of_heads(range(1, 2))))
    keys, found = unpack(taker, chunk, 1, dtype, bytearray(data))
    assert torch.equal(keys, cache.keys[:, :, 1:])
    assert torch.equal(found, cache.values[:, :, 1:])
    damaged = bytearray(data)
    damaged[-1] ^= 1
    for share, of, rank, kind, given in (
        (taker, chunk, 0, dtype, data),
        (taker, CHUNKS[1], 1, dtype, data),
        (taker, chunk, 1, torch.float16, data),
        (Share(SPEC, 0, 4), chunk, 1, dtype, data),
        (taker, chunk, 1, dtype, data[:-1]),
        (taker, chunk, 1, dtype, b"[]".ljust(len(data))),
        (taker, chunk, 1, dtype, b"x" * 100),
        (taker, chunk, 1, dtype, damaged),
    ):
        with pytest.raises(FormatError):
            unpack(share, of, rank, kind, bytearray(given))
    with pytest.raises(MismatchError):
        pack(giver, chunk, cache)
