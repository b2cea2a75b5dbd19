"""Two engines of one host: the second, fresh one maps what the first has left in shared memory.

The node is dead by then, so nothing else can have answered; and the control, an engine of another
host, finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import Engine, Node, connector, documents, questions

DOCUMENT_TOKENS = 600
MODEL: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [one + asked for one in documents(2, DOCUMENT_TOKENS) for asked in questions()[:2]]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host") / "memory"


def start(log: Path, node: Node, host: Path, **settings: Any) -> Engine:
    from kdn.engines.models import smollm2_folder

    transfer = connector(node.url, host_bytes=1 << 30, host_folder=str(host), lookup_s=0.5)
    return Engine(
        log, model=str(smollm2_folder()), kv_transfer_config=transfer, **MODEL, **settings
    )


@pytest.fixture(scope="module")
def own(node: Node, host: Path, logs: Path, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """What the first engine says with its own prefix cache. Then it ends, and the node with it."""
    with start(logs / "first", node, host) as first:
        first.generate(prompts=documents(2, DOCUMENT_TOKENS), max_tokens=1)
        first.flush()
        told = [first.generate(prompts=[prompt], kdn={"load": False}) for prompt in prompts]
        assert [one["cached"] for one in told] == [[512]] * len(prompts)
        first.flush()
    node.kill()
    yield [one["tokens"][0] for one in told]
    node.start()  # so that it can be stopped


def test_a_fresh_engine_of_the_same_host(
    own: list[list[int]], prompts: list[list[int]], node: Node, host: Path, logs: Path
) -> None:
    """Exactly as the first engine would go on, though the codec is lossy: nothing was decoded."""
    with start(logs / "second", node, host, block_size=32) as second:
        answers = [second.generate(prompts=[prompt]) for prompt in prompts]
        state = second.state()
    known = [(len(prompt) - 1) // 16 * 16 // 32 * 32 for prompt in prompts]
    assert [one["cached"][0] for one in answers] == known
    assert [one["tokens"][0] for one in answers] == own
    assert state["worker"]["host_tokens"] == state["worker"]["loaded_tokens"] > 0
    assert state["worker"].get("fetched_bytes", 0) == 0
    assert state["lossy_blocks"] == 0


def test_an_engine_of_another_host(
    own: list[list[int]], prompts: list[list[int]], node: Node, tmp_path: Path, logs: Path
) -> None:
    with start(logs / "third", node, tmp_path / "other") as third:
        answer = third.generate(prompts=prompts[:1])
    assert answer["cached"] == [0]
    assert answer["tokens"] == own[:1]
