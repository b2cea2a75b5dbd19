"""The background thread of a vLLM process: what fails in it is seen, and costs vLLM a miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kdn.background import faults
from kdn.cache.keys import Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.runtime import Runtime
from kdn.engines.vllm.settings import Settings
from kdn.errors import StoreError

LAYERS, HEADS, DIM = 2, 2, 8
SPEC = ModelSpec(LAYERS, HEADS, DIM, 1000, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)
[CHUNK] = cut(list(range(3, 259)), Namespace(SPEC.fingerprint, bytes(16)))
CACHE = KVCache(*torch.zeros(2, LAYERS, 256, HEADS, DIM))


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    given = {"url": str(tmp_path / "data"), "codec": "exact", "host_folder": str(tmp_path)}
    runtime = Runtime.acquire(Settings.parse(given), SPEC, torch.float32)
    yield runtime
    runtime.release()


def until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


async def answer() -> int:
    return 7


def test_a_chunk_that_cannot_be_kept_is_told(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **named: object) -> bool:
        raise RuntimeError("a mistake while keeping")

    before = faults["keeping a decoded chunk"]
    with monkeypatch.context() as patch:
        patch.setattr(runtime.host, "put", broken)
        runtime.keep(CHUNK, CACHE, 0.0, exact=True)
        until(lambda: faults["keeping a decoded chunk"] > before)
    assert 'raise RuntimeError("a mistake while keeping")' in caplog.text
    runtime.keep(CHUNK, CACHE, 0.0, exact=True)
    assert runtime.host is not None
    until(lambda: runtime.host is not None and runtime.host.has(CHUNK, 0.0))


def test_an_exit_in_one_task_leaves_the_others(runtime: Runtime) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    left = runtime.submit(leave())
    with pytest.raises(SystemExit):
        left.result(10)
    assert runtime.submit(answer()).result(10) == 7
    runtime.publish(CHUNK, CACHE, 0.0)
    until(lambda: runtime.counts.published == 1)


def test_a_runtime_whose_thread_has_ended_fails_at_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own threads go on without kdn."""

    async def break_down() -> None:
        for task in asyncio.all_tasks():
            if task.get_coro().__name__ == "_serve":  # type: ignore[union-attr]
                task.cancel()

    runtime.submit(break_down())
    runtime._thread.join(15)
    assert not runtime._thread.is_alive()
    with pytest.raises(StoreError, match="has ended"):
        runtime.submit(answer()).result(1)
    assert not runtime.has_room()
