"""What is published while the node is away: with a spool another client sends it later."""

from __future__ import annotations

import asyncio
import socket
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.delivery.publish import Publisher
from kdn.engines.reading import new_cache, read
from tests.client.clients import client_at
from tests.node.harness import config_for, run, running

TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 128, 600)]
FLUSH_S = 5.0


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Where a node will be; nobody listens there yet."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def publish(port: int, model: Any, spool_bytes: int, flush_s: float) -> bool:
    past = new_cache(model)
    read(model, TOKENS, past)
    async with client_at(f"http://127.0.0.1:{port}", model, spool_bytes=spool_bytes) as client:
        assert await client.publish(TOKENS, past) == 3
        return await client.flush(flush_s)


async def load(port: int, model: Any, folder: Path, wait_s: float) -> int:
    """From a node that has started meanwhile, by a client with a spool: how many tokens it finds as
    soon as it finds all of them, or after that time."""
    async with (
        running(config_for(folder, port=port)) as node,
        client_at(node.url, model) as client,
    ):
        until_s = client.now_s() + wait_s
        while (found := (await client.load(TOKENS)).num_tokens) < 592 and client.now_s() < until_s:
            await asyncio.sleep(0.02)
        return found


def test_what_was_spooled_reaches_a_node_that_was_away(
    port: int, tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    assert run(publish(port, model, 1 << 30, FLUSH_S))
    assert run(load(port, model, tmp_path / "data", 10.0)) == 592


def test_without_a_spool_flush_tells_that_it_is_not_stored(
    port: int, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Publisher, "close", partialmethod(Publisher.close, 0.2))
    model = tiny_model("llama")
    assert not run(publish(port, model, 0, 0.3))
    assert run(load(port, model, tmp_path / "data", 0.2)) == 0
