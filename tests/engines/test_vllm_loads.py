"""Loads over a real session and a folder: what comes, what is missing, what is too coarse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kdn.cache.keys import cut
from kdn.engines.vllm.shared import SharedSession
from kdn.session.delivered import Delivered
from tests.engines.vllm_working import (
    BLOCK,
    SPACE,
    TOKENS,
    load,
    make_worker,
    publish,
)


def test_what_one_publishes_another_loads(shared: SharedSession) -> None:
    cache = publish(shared)
    worker, paged = make_worker(shared)
    assert load(worker, 0, 576) == (set(), 576)
    found = paged.read(0, 576, range(30))
    assert torch.equal(found.keys, cache.keys[:, :576])
    assert torch.equal(found.values, cache.values[:, :576])
    assert not paged.read(576, 640, range(30)).keys.any()
    assert worker.counts["loaded_tokens"] == 576


def test_a_part_is_loaded_behind_what_is_there(shared: SharedSession) -> None:
    cache = publish(shared)
    worker, paged = make_worker(shared)
    assert load(worker, 288, 512) == (set(), 512)
    found = paged.read(0, 512, range(30))
    assert torch.equal(found.keys[:, 288:], cache.keys[:, 288:512])
    assert not found.keys[:, :288].any()


def test_what_is_gone_is_reported_block_by_block(shared: SharedSession) -> None:
    cache = publish(shared)
    gone = cut(TOKENS, SPACE)[1]

    async def delete() -> None:
        assert await shared.session.places.publish_to.store.delete(gone.key)

    shared.submit(delete).result(10)
    worker, paged = make_worker(shared)
    assert load(worker, 0, 576) == (set(range(8, 18)), 256)
    assert torch.equal(paged.read(0, 256, range(30)).keys, cache.keys[:, :256])
    assert worker.counts["failed_tokens"] == 320


def test_an_error_is_a_failed_load(shared: SharedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(shared.session, "deliver", broken)
    worker, _ = make_worker(shared)
    assert load(worker, 0, 512) == (set(range(16)), 0)


@pytest.mark.parametrize(("strict", "good"), [(True, 256), (False, 512)])
def test_what_is_coarser_than_wanted(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch, strict: bool, good: int
) -> None:
    """By the deadline the first chunk is good enough and the second, at the end, is not."""
    cache = publish(shared)
    real = shared.session.deliver

    async def coarse(*given: Any, **named: Any) -> Delivered:
        got = await real(*given, **named)
        assert got.result is not None
        result = replace(got.result, levels=(2, 1), num_levels=3)
        return replace(got, result=result, expected_kld=(0.02, 0.0001, 0.0))

    monkeypatch.setattr(shared.session, "deliver", coarse)
    worker, paged = make_worker(shared)
    found = load(worker, 0, 512, enough_kld=0.001, strict=strict)
    assert found == (set(range(good // BLOCK, 16)), 0)
    assert torch.equal(paged.read(0, good, range(30)).keys, cache.keys[:, :good])


def test_chunks_that_meet_within_a_block(shared: SharedSession) -> None:
    """Neither overwrites the other's tokens; a block of which one is missing is not used."""
    cache = publish(shared)
    worker, paged = make_worker(shared, block_tokens=96)
    assert load(worker, 0, 576) == (set(), 576)
    assert torch.equal(paged.read(0, 576, range(30)).keys, cache.keys[:, :576])
    gone = cut(TOKENS, SPACE)[1]

    async def delete() -> None:
        assert await shared.session.places.publish_to.store.delete(gone.key)

    shared.submit(delete).result(10)
    worker, _ = make_worker(shared, block_tokens=96)
    assert load(worker, 0, 576) == (set(range(2, 6)), 192)


def test_exact_values_of_another_dtype_are_not_known(shared: SharedSession) -> None:
    publish(shared)
    for dtype, end in ((torch.float32, 592), (torch.bfloat16, 0)):
        shared.session.dtype = dtype
        know = partial(shared.session.know, TOKENS, block_tokens=16, whole=True)
        assert shared.submit(know).result(20).end == end
