"""A router's view: real vLLM, a subscriber, and the blocks that kdn says it could load."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.bench.node_servers import free_port
from tests.vllm.harness import Engine, Node, connector, tiny_model

zmq = pytest.importorskip("zmq")

PROMPT = [3 + number % 500 for number in range(600)]
OTHER = [5 + number % 300 for number in range(40)]
BLOCK = 32


class Router:
    """Everything that was published, in order."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.topics: set[str] = set()
        self.events: list[Any] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def listen(self, wait_s: float = 0.5) -> None:
        from msgspec.msgpack import decode

        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1):
                topic, _, payload = self._socket.recv_multipart()
                self.topics.add(topic.decode())
                _, events, *_ = decode(payload)
                self.events += [SimpleNamespace(**event) for event in events]

    def stored(self, medium: str) -> list[Any]:
        named = [one for one in self.events if one.type == "BlockStored"]
        return [one for one in named if one.medium == medium]

    def hashes(self, medium: str) -> list[Any]:
        return [name for event in self.stored(medium) for name in event.block_hashes]

    def removed(self, medium: str) -> list[Any]:
        named = [one for one in self.events if one.type == "BlockRemoved"]
        return [name for one in named if one.medium == medium for name in one.block_hashes]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_kdn_tells_routers_of_vllms_own_blocks(
    node: Node, model: str, logs: Path, tmp_path: Path
) -> None:
    port, host = free_port(), {"host_bytes": 1 << 26, "host_folder": str(tmp_path)}
    vllms = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}",
             "topic": "kv@pod@tiny"}  # fmt: skip
    common = {"model": model, "skip_tokenizer_init": True, "block_size": BLOCK}
    router = Router(f"tcp://127.0.0.1:{port}", "kv@pod@")
    given = connector(node.url, codec="exact", **host)
    log = logs / "events.log"
    with Engine(log, **common, kv_transfer_config=given, kv_events_config=vllms) as engine:
        engine.generate(prompts=[OTHER], max_tokens=1)
        engine.generate(prompts=[PROMPT], max_tokens=1)
        engine.flush()
        time.sleep(0.5)  # until the host's memory has it, too
        engine.generate(prompts=[OTHER], max_tokens=2)
        router.listen()
        assert router.topics == {"kv@pod@tiny"}
        own = {tuple(one.token_ids): one for one in router.stored("GPU")}
        for medium, locality in (("STORAGE", "REMOTE"), ("CPU", "LOCAL")):
            told = router.stored(medium)
            prompt = [t for one in told if one.token_ids[0] == PROMPT[0] for t in one.token_ids]
            assert set(router.hashes(medium)) <= set(router.hashes("GPU")), medium
            assert prompt[:256] == PROMPT[:256]
            assert {one.locality for one in told} == {locality}
            assert {one.block_size for one in told} == {BLOCK}
        [long] = [one for one in own.values() if len(one.token_ids) > 512]
        blocks = long.block_hashes[: 592 // BLOCK]
        for medium in ("STORAGE", "CPU"):
            found = [name for name in router.hashes(medium) if name in blocks]
            assert found == blocks, f"{medium}: all blocks of the prompt, in order"
        _chained(router.stored("STORAGE"))
    router.close()

    # A fresh engine finds the same blocks, under the same hashes, and tells of them by itself.
    port = free_port()
    router = Router(f"tcp://127.0.0.1:{port}", "kv@")
    given = connector(node.url, codec="exact", host_bytes=0, events_endpoint=f"tcp://*:{port}")
    with Engine(logs / "own.log", {"POD_NAME": "pod-7"}, **common, kv_transfer_config=given) as two:
        two.generate(prompts=[OTHER], max_tokens=1)
        told = two.generate(prompts=[PROMPT], max_tokens=4)
        assert told["cached"] == [len(blocks) * BLOCK]
        router.listen()
        assert router.topics == {f"kv@pod-7@{model}"}
        assert not router.stored("GPU")
        assert [name for name in router.hashes("STORAGE") if name in blocks] == blocks
        assert two.hit_sources() == {"external_unspecified": (1 + len(blocks)) * BLOCK}
    router.close()


def _chained(events: list[Any]) -> None:
    """Each event goes on from a block that was told before, or begins a prompt."""
    seen: set[Any] = set()
    for event in events:
        assert event.parent_block_hash is None or event.parent_block_hash in seen
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        seen |= set(event.block_hashes)


def test_what_ranks_publish_reaches_routers(node: Node, logs: Path, tmp_path: Path) -> None:
    """The workers' processes publish, and the scheduler's tells."""
    model = tiny_model(tmp_path / "model", kv_heads=4)
    port = free_port()
    router = Router(f"tcp://127.0.0.1:{port}", "kv@")
    given = connector(node.url, codec="exact", events_endpoint=f"tcp://*:{port}",
                      events_topic="kv@two@tiny")  # fmt: skip
    with Engine(
        logs / "ranks.log", model=model, kv_transfer_config=given, tensor_parallel_size=2,
        skip_tokenizer_init=True, block_size=BLOCK, max_model_len=1024, max_num_seqs=4,
    ) as engine:  # fmt: skip
        engine.generate(prompts=[OTHER], max_tokens=1, detokenize=False)
        engine.generate(prompts=[PROMPT], max_tokens=1, detokenize=False)
        until_s = time.monotonic() + 30.0
        while len(router.hashes("STORAGE")) < 592 // BLOCK and time.monotonic() < until_s:
            engine.generate(prompts=[OTHER], max_tokens=2, detokenize=False)
            router.listen(0.2)
    told = [one for one in router.stored("STORAGE") if len(one.token_ids) > len(OTHER)]
    assert [t for one in told for t in one.token_ids] == PROMPT[: 592 // BLOCK * BLOCK]
    assert router.topics == {"kv@two@tiny"}
    _chained(router.stored("STORAGE"))
    router.close()
