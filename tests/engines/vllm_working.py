"""A worker's side over a real session, with small tensors in the place of vLLM's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import Heads, PagedCache
from kdn.engines.vllm.messages import LoadOrder, SaveOrder, Step
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.shared import SharedSession
from kdn.engines.vllm.worker import WorkerSide

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 8, 32, 64
SPEC = ModelSpec(LAYERS, HEADS, DIM, 1000, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)
SPACE = Namespace(SPEC.fingerprint, bytes(16))
TOKENS = list(range(3, 603))  # two full chunks and a tail of 80
ANSWER_S = 0.5
AWAY = "http://127.0.0.1:9"


@contextmanager
def shared_session(url: str | Path, **settings: Any) -> Iterator[SharedSession]:
    """As vLLM has it, but that nothing is kept for others unless it is said where."""
    given = {"url": str(url), "codec": "exact", "spool_bytes": 0, "host_bytes": 0, **settings}
    shared = SharedSession.acquire(Settings.parse(given).session, SPEC, torch.float32)
    try:
        yield shared
    finally:
        shared.release()


def order(
    start: int,
    end: int,
    *,
    name: str = "r",
    heads: Sequence[bytes] = (),
    deadline_s: float = 30.0,
    enough_kld: float = 0.0,
    strict: bool = False,
) -> LoadOrder:
    """Without `heads`, the scheduler knows no more of these tokens than that they are there."""
    chunks = tuple(c for c in cut(TOKENS, SPACE) if c.start < end and c.end > start)
    told = tuple(heads) or (b"",) * len(chunks)
    blocks = tuple(range(30))
    return LoadOrder(name, chunks, told, start, end, blocks, deadline_s, enough_kld, strict)


def begin(worker: WorkerSide, *orders: LoadOrder) -> None:
    worker.begin(Step(loads=orders))
    worker.start_loads()


def load(worker: WorkerSide, start: int, end: int, **more: Any) -> tuple[set[int], int]:
    """What comes of it: failed blocks, and up to where it is exact."""
    begin(worker, order(start, end, **more))
    assert ended_within(worker, 60.0) == {"r"}
    assert worker.take_finished() == set()
    return worker.take_failed_blocks(), worker.take_report().exact_until["r"]


def make_worker(
    shared: SharedSession,
    weights_changed: Callable[[], bool] = lambda: False,
    block_tokens: int = BLOCK,
) -> tuple[WorkerSide, PagedCache]:
    layers = [torch.zeros(BLOCKS, HEADS, block_tokens, 2 * DIM) for _ in range(LAYERS)]
    paged = PagedCache(layers, SPEC, Heads(0, HEADS), block_tokens)
    return WorkerSide(shared, paged, lambda _: weights_changed(), ANSWER_S), paged


def values(num_tokens: int) -> KVCache:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, LAYERS, num_tokens, HEADS, DIM, generator=generator)
    return KVCache(keys, values)


def publish(shared: SharedSession) -> KVCache:
    """A worker computes all tokens and publishes them."""
    worker, paged = make_worker(shared)
    blocks = list(range(40, 60))
    cache = values(608)
    paged.write(cache, 0, 608, blocks)
    worker.begin(
        Step(saves=(SaveOrder("r", tuple(cut(TOKENS, SPACE)), tuple(blocks)),), num_tokens=600)
    )
    worker.save()
    until_s = time.monotonic() + 30
    while shared.session.publisher.counts.published < 3:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert worker.counts["published_chunks"] == 3
    return cache


def ended_within(worker: WorkerSide, limit_s: float) -> set[str]:
    """Which loads have, after so long, or as soon as there are some."""
    until_s = time.monotonic() + limit_s
    while not (done := worker.take_finished()) and time.monotonic() < until_s:
        pass
    return done
