"""vLLM with the URL of a store instead of a node: one engine publishes there, another one loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from kdn.bench.node_servers import start_redis
from kdn.bench.servers import find_program
from tests.vllm.harness import TINY_VOCAB, Engine, connector, tiny_model


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    with start_redis(folder) as server:
        yield f"redis://{server.address[0]}:{server.address[1]}"


@contextmanager
def bucket(folder: Path) -> Iterator[str]:
    yield f"file://{folder}"


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(
            redis,
            marks=pytest.mark.skipif(
                find_program("redis-server") is None or find_spec("redis") is None,
                reason="needs redis-server and the package redis",
            ),
        ),
        pytest.param(
            bucket,
            marks=pytest.mark.skipif(
                find_spec("obstore") is None, reason="needs the package obstore"
            ),
        ),
    ],
)
def test_engines_share_a_store(store: object, logs: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    settings = {"model": model, "skip_tokenizer_init": True, "max_model_len": 1024}
    prompts = [[(i * i + 7 * n) % (TINY_VOCAB - 3) + 3 for i in range(700)] for n in range(2)]
    (folder := tmp_path / "store").mkdir()
    assert callable(store)
    with store(folder) as url:
        transfer = connector(url, codec="exact")
        with Engine(logs / "first", kv_transfer_config=transfer, **settings) as engine:
            own = engine.generate(prompts=prompts)
            assert own["cached"] == [0, 0]
            engine.flush()
        with Engine(logs / "second", kv_transfer_config=transfer, **settings) as engine:
            found = engine.generate(prompts=prompts)
        assert found["tokens"] == own["tokens"]
        assert min(found["cached"]) >= 512
