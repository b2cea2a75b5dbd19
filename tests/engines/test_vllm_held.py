"""What the host's shared memory holds, and what engines leave there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.engines.vllm import loader as loader_module
from kdn.engines.vllm.shared import SharedSession
from tests.engines.vllm_working import (
    AWAY,
    SPACE,
    TOKENS,
    load,
    make_worker,
    publish,
    shared_session,
    values,
)


@pytest.fixture
def host_session(tmp_path: Path) -> Iterator[SharedSession]:
    """Beside a node that is away, with decoded chunks in a folder."""
    with shared_session(AWAY, **held_in(tmp_path / "host")) as shared:
        yield shared


def held_in(folder: Path) -> dict[str, Any]:
    return {"host_folder": str(folder), "host_bytes": 1 << 30}


def hold(shared: SharedSession, klds: Sequence[float], exact: bool) -> KVCache:
    """The first chunks, as far as there are `klds`."""
    assert shared.session.host is not None
    cache = values(600)
    for chunk, kld in zip(cut(TOKENS, SPACE), klds, strict=False):
        part = cache.slice(chunk.start, chunk.end)
        assert shared.session.host.put(chunk, part, kld, exact=exact)
    return cache


def known(shared: SharedSession, limit_s: float = 0.2) -> tuple[int, bool]:
    found = shared.submit(
        lambda: shared.session.know(TOKENS, block_tokens=32, whole=True, limit_s=limit_s)
    ).result(5)
    return found.end, found.is_late


def test_what_the_host_holds_needs_no_node(host_session: SharedSession) -> None:
    cache = hold(host_session, [0.0] * 3, exact=True)
    assert known(host_session) == (592, False)
    worker, paged = make_worker(host_session)
    assert load(worker, 64, 576) == (set(), 576)
    found = paged.read(64, 576, range(30))
    assert torch.equal(found.keys, cache.keys[:, 64:576])
    assert torch.equal(found.values, cache.values[:, 64:576])
    assert (worker.counts["host_tokens"], worker.counts["fetched_bytes"]) == (512, 0)


def test_a_part_that_the_host_holds(host_session: SharedSession) -> None:
    """Nobody has the rest: it is reported."""
    cache = hold(host_session, [0.0], exact=True)
    assert known(host_session) == (256, True)
    assert known(host_session, limit_s=0.0) == (256, False)
    worker, paged = make_worker(host_session)
    assert load(worker, 0, 512, deadline_s=0.3) == (set(range(8, 16)), 256)
    assert torch.equal(paged.read(0, 256, range(30)).keys, cache.keys[:, :256])


def test_what_the_host_holds_with_losses(host_session: SharedSession) -> None:
    hold(host_session, [0.01] * 3, exact=False)
    assert known(host_session) == (0, True)
    worker, _ = make_worker(host_session)
    assert load(worker, 0, 512, deadline_s=0.3) == (set(range(16)), 0)
    worker, _ = make_worker(host_session)
    assert load(worker, 0, 512, enough_kld=0.04) == (set(), 0)  # there, and not exact


def test_the_end_must_be_finer_than_what_is_before(host_session: SharedSession) -> None:
    """As a delivery leaves it: what it decoded is good enough for the next that asks the same."""
    hold(host_session, [0.0016, 0.0002, 0.0002], exact=False)
    worker, _ = make_worker(host_session)
    assert load(worker, 0, 576, enough_kld=0.001) == (set(), 0)
    assert worker.counts["host_tokens"] == 576
    worker, _ = make_worker(host_session)  # here the first chunk is the end
    assert load(worker, 0, 256, deadline_s=0.3, enough_kld=0.001) == (set(range(8)), 0)


@pytest.mark.parametrize("publishing", [True, False])
def test_what_was_computed_or_loaded_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publishing: bool
) -> None:
    monkeypatch.setattr(loader_module, "KEEP_AFTER_S", 0.0)
    with shared_session(tmp_path / "data", **held_in(tmp_path / "writer")) as writer:
        cache = publish(writer)
        if publishing:
            assert_held(writer, cache)
            return
    with shared_session(tmp_path / "data", **held_in(tmp_path / "reader")) as reader:
        worker, _ = make_worker(reader)
        assert load(worker, 0, 576) == (set(), 576)
        assert worker.counts["host_tokens"] == 0
        assert_held(reader, cache)


def assert_held(shared: SharedSession, cache: KVCache) -> None:
    """Soon."""
    assert shared.session.host is not None
    until_s = time.monotonic() + 10
    for chunk in cut(TOKENS, SPACE):
        while (held := shared.session.host.get(chunk, 0.0)) is None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert torch.equal(held.cache.keys, cache.keys[:, chunk.start : chunk.end])
        assert held.exact
