"""What is published while the node is away reaches it later, from another client."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.engines.reading import new_cache, read
from tests.client.clients import client_at
from tests.node.harness import config_for, run, running


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("spool_bytes", [1 << 30, 0])
def test_a_node_that_is_away_gets_it_later(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spool_bytes: int
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model, port = tiny_model("llama"), free_port()
    tokens = list(np.random.default_rng(1).integers(3, 128, 600))
    past = new_cache(model)
    read(model, tokens, past)

    async def publish() -> bool:
        async with client_at(f"http://127.0.0.1:{port}", model, spool_bytes=spool_bytes) as client:
            assert await client.publish(tokens, past) == 3
            return await client.flush(2.0)

    async def load() -> int:
        async with (
            running(config_for(tmp_path / "data", port=port)) as node,
            client_at(node.url, model) as client,
        ):
            for _ in range(50):
                if (found := (await client.load(tokens)).num_tokens) == 592:
                    break
                await asyncio.sleep(0.02)
            return found

    assert run(publish()) == bool(spool_bytes)
    assert run(load()) == (592 if spool_bytes else 0)
