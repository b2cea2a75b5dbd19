"""From a prompt to blocks, through the real session: a node is asked for it once."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.delivery.known import Known
from kdn.engines.vllm.early import Prospect
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.messages import Step
from kdn.engines.vllm.scheduler import SchedulerSide
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.shared import SharedSession
from tests.engines.vllm_scheduling import request
from tests.engines.vllm_working import (
    BLOCK,
    SPACE,
    TOKENS,
    ended_within,
    make_worker,
    publish,
    shared_session,
)
from tests.vllm.harness import Node, running_node

KNOWN = 576  # whole blocks of two chunks and a tail


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("node") / "data") as node:
        yield node


@pytest.fixture(scope="module")
def cache(node: Node) -> KVCache:
    """What somebody has published there."""
    with shared_session(node.url) as shared:
        return publish(shared)


def num_lookups(node: Node) -> int:
    """That the node has answered since it started."""
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=10.0) as answer:
        told = answer.read().decode()
    counts = re.findall(r'kdn_request_seconds_count\{.*route="[^"]*lookup[^"]*".*\} (\S+)', told)
    return int(sum(map(float, counts)))


def planned(shared: SharedSession) -> Step:
    """The scheduler's side is asked about a prompt, and has its blocks allocated."""

    def look_up(tokens: Any, space: Namespace, limit_s: float, prospect: Prospect) -> Any:
        future = shared.submit(lambda: shared.early.look_up(tokens, space, limit_s, prospect))
        assert isinstance(future.result(10), Known)
        return future

    settings = Settings(shared.session.settings, quality=0.0, lookup_s=5.0, deadline_s=30.0)
    side = SchedulerSide(settings, Identity(shared.session.namespace), look_up, BLOCK)
    asked = request("r", len(TOKENS), prompt_token_ids=TOKENS, all_token_ids=TOKENS)
    side.arrived(asked)
    assert side.matched(asked, 0) == (KNOWN, True)
    side.allocated(asked, list(range(30)), KNOWN)
    nothing = SimpleNamespace(req_ids=[])
    return side.step(
        SimpleNamespace(
            scheduled_new_reqs=[], scheduled_cached_reqs=nothing, num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
        )
    )  # fmt: skip


def loaded(shared: SharedSession, step: Step) -> tuple[set[int], KVCache]:
    """By a worker that gets the step as it travels: failed blocks, and what is in the others."""
    worker, paged = make_worker(shared)
    worker.begin(step.with_seal_key(b"").with_seal_key(SPACE.seal_key))
    worker.start_loads()
    assert ended_within(worker, 30.0) == {"r"}
    return worker.take_failed_blocks(), paged.read(0, KNOWN, range(30))


def test_the_scheduler_asks_and_the_worker_does_not(node: Node, cache: KVCache) -> None:
    with shared_session(node.url) as here, shared_session(node.url, client="other") as there:
        before = num_lookups(node)
        step = planned(here)
        assert num_lookups(node) == before + 1
        assert [len(head) > 0 for head in step.loads[0].heads] == [True] * 3
        for worker in (here, there):  # a rank in another process has another session
            failed, found = loaded(worker, step)
            assert failed == set()
            assert torch.equal(found.keys, cache.keys[:, :KNOWN])
            assert torch.equal(found.values, cache.values[:, :KNOWN])
        assert num_lookups(node) == before + 1


def test_what_the_host_held_and_lost_is_asked_for(
    node: Node, cache: KVCache, tmp_path: Path
) -> None:
    """The only case in which the worker asks."""
    memory = {"host_folder": str(tmp_path / "host"), "host_bytes": 1 << 30}
    with shared_session(node.url, **memory) as shared:
        host, chunks = shared.session.host, cut(TOKENS, SPACE)
        assert host is not None
        for chunk in chunks:
            host.put(chunk, cache.slice(chunk.start, chunk.end), 0.0, exact=True)
        before = num_lookups(node)
        step = planned(shared)
        assert step.loads[0].heads == (b"",) * 3
        assert loaded(shared, step)[0] == set()
        assert num_lookups(node) == before
        shared.session.host = None
        failed, found = loaded(shared, step)
        assert (failed, num_lookups(node)) == (set(), before + 1)
        assert torch.equal(found.keys, cache.keys[:, :KNOWN])
