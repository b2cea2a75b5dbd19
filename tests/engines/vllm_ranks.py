"""Ranks of one engine in one process: each has a worker and heads of its own, all one session."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.messages import LoadOrder, LoadReport, SaveOrder, Step
from kdn.engines.vllm.rank_folder import RankFolder
from kdn.engines.vllm.ranks import Ranks
from kdn.engines.vllm.shared import SharedSession
from kdn.engines.vllm.worker import WorkerSide
from tests.engines.vllm_working import (
    ANSWER_S,
    BLOCK,
    BLOCKS,
    DIM,
    LAYERS,
    SPACE,
    SPEC,
    TOKENS,
    values,
)


class Rank:
    def __init__(self, shared: SharedSession, place: Path, rank: int, count: int) -> None:
        self.folder = RankFolder(place, "engine", rank, count)
        self.ranks = Ranks(shared.session, self.folder, rank, count)
        heads = self.ranks.share.heads(rank)
        layers = [torch.zeros(BLOCKS, heads.count, BLOCK, 2 * DIM) for _ in range(LAYERS)]
        self.heads = heads.range
        self.paged = PagedCache(layers, SPEC, heads, BLOCK)
        self.worker = WorkerSide(shared, self.paged, lambda _: False, ANSWER_S, ranks=self.ranks)

    def begin(self, order: LoadOrder) -> None:
        self.worker.begin(Step(loads=(order,)))
        self.worker.start_loads()

    def save(self, cache: KVCache) -> None:
        """As if the model had computed these tokens, this rank its heads."""
        blocks = list(range(40, 60))
        self.paged.write(cache.of_heads(self.heads), 0, cache.num_tokens, blocks)
        order = SaveOrder("r", tuple(cut(TOKENS, SPACE)), tuple(blocks))
        self.worker.begin(Step(saves=(order,), num_tokens=600))
        self.worker.save()

    def loaded(self, until: int) -> KVCache:
        return self.paged.read(0, until, range(30))


@contextmanager
def ranks_of(shared: SharedSession, place: Path, count: int = 2) -> Iterator[list[Rank]]:
    every = [Rank(shared, place, rank, count) for rank in range(count)]
    try:
        yield every
    finally:
        for one in every:
            one.ranks.close()


def ended(ranks: list[Rank], limit_s: float = 30.0) -> tuple[set[int], LoadReport]:
    """What vLLM makes of what its workers tell, when the load has ended on all of them."""
    failed: set[int] = set()
    report, missing = LoadReport(), list(ranks)
    until_s = time.monotonic() + limit_s
    while missing:
        assert time.monotonic() < until_s, "a load does not end"
        for one in list(missing):
            if one.worker.take_finished():
                missing.remove(one)
                failed |= one.worker.take_failed_blocks()
                report = report.joined(one.worker.take_report())
    return failed, report


def wait_for(what: Callable[[], Any], limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class Reads:
    """How often each chunk's bytes are read at a place."""

    def __init__(self, shared: SharedSession) -> None:
        self.keys: Counter[bytes] = Counter()
        store = shared.session.places.publish_to.store
        original = store.read_spans

        def read_spans(asks: Any) -> Any:
            self.keys.update(ask.key for ask in asks)
            return original(asks)

        store.read_spans = read_spans  # type: ignore[method-assign]


def fits(rank: Rank, cache: KVCache, until: int) -> bool:
    found, expected = rank.loaded(until), cache.of_heads(rank.heads)
    return torch.equal(found.keys, expected.keys[:, :until]) and torch.equal(
        found.values, expected.values[:, :until]
    )


def computed() -> KVCache:
    return values(608)
