"""Two real ranks of vLLM (tensor parallelism, on the CPU) beside an engine of one.

What each publishes, the other loads. Ranks sum up in another order, so values are alike up to
rounding; the model's answers are the same. A rank that hears nothing of the other is a miss.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import TINY_VOCAB, Engine, Node, connector, tiny_model
from tests.vllm.sharing import load

ASIDE = {"load": False, "publish": False}
OPTIONS: dict[str, Any] = {"max_tokens": 6, "detokenize": False}
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
}
NUM_TOKENS, LOADED = 320, 288
"""A chunk and a tail; the last token is computed, in a block of 32."""


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, TINY_VOCAB) for _ in range(NUM_TOKENS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"), kv_heads=4)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


def start(log: Path, node: Node, model: str, host: Path, **settings: Any) -> Engine:
    transfer = connector(node.url, codec="exact", host_folder=str(host))
    return Engine(log, model=model, kv_transfer_config=transfer, **SETTINGS, **settings)


@pytest.fixture(scope="module")
def two(node: Node, model: str, host: Path, logs: Path) -> Iterator[Engine]:
    with start(logs / "two", node, model, host, tensor_parallel_size=2) as engine:
        yield engine
    assert not list(host.iterdir())  # when both have gone, so has the place where they met


@pytest.fixture(scope="module")
def one(node: Node, model: str, host: Path, logs: Path) -> Iterator[Engine]:
    with start(logs / "one", node, model, host) as engine:
        yield engine


@pytest.fixture(scope="module")
def truth(one: Engine) -> dict[int, list[int]]:
    """What one rank says without kdn."""
    prompts = [prompt(seed) for seed in range(3)]
    told = one.generate(prompts=prompts, kdn=ASIDE, **OPTIONS)
    assert one.reset()
    return dict(enumerate(told["tokens"]))


def test_two_ranks_publish_what_one_loads(
    one: Engine, two: Engine, truth: dict[int, list[int]], node: Node, model: str
) -> None:
    from transformers import AutoModelForCausalLM

    answer = two.generate(prompts=[prompt(0)], **OPTIONS)
    assert (answer["tokens"], answer["cached"]) == ([truth[0]], [0])
    ranks = two.ranks()
    assert [rank["heads"] for rank in ranks] == [[0, 2], [2, 2]]
    assert [rank["sent"]["published"] for rank in ranks] == [2, 0]
    assert [rank["counts"].get("published_chunks", 0) for rank in ranks] == [2, 0]
    answer = one.generate(prompts=[prompt(0)], **OPTIONS)
    assert (answer["tokens"], answer["cached"]) == ([truth[0]], [LOADED])

    import torch

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stored, _ = asyncio.run(load(node.url, "exact", reference, prompt(0)))
    with torch.no_grad():
        past = reference(torch.tensor([prompt(0)]), use_cache=True).past_key_values
    for layer in range(stored.num_layers):
        kept = past.layers[layer]
        for found, expected in ((stored.keys, kept.keys), (stored.values, kept.values)):
            torch.testing.assert_close(
                found[layer].transpose(0, 1), expected[0], rtol=1e-3, atol=1e-3
            )


def test_one_rank_publishes_what_two_load(
    one: Engine, two: Engine, truth: dict[int, list[int]]
) -> None:
    one.generate(prompts=[prompt(1)], **OPTIONS)
    one.flush()
    before = two.ranks()
    answer = two.generate(prompts=[prompt(1)], **OPTIONS)
    assert (answer["tokens"], answer["cached"]) == ([truth[1]], [LOADED])
    after = two.ranks()
    grown = [
        {name: now["counts"].get(name, 0) - then["counts"].get(name, 0) for name in COUNTED}
        for now, then in zip(after, before, strict=True)
    ]
    assert [rank["loaded_tokens"] for rank in grown] == [LOADED] * 2
    assert grown[0]["fetched_bytes"] > 0
    assert grown[1]["fetched_bytes"] == 0  # one fetch for the host


COUNTED = ("loaded_tokens", "fetched_bytes", "failed_tokens")


def test_a_rank_that_hears_nothing_is_a_miss(
    one: Engine, two: Engine, truth: dict[int, list[int]]
) -> None:
    one.generate(prompts=[prompt(2)], **OPTIONS)
    one.flush()
    two.deafen(rank=1)
    answer = two.generate(prompts=[prompt(2)], kdn={"deadline_s": 1.0}, **OPTIONS)
    assert answer["tokens"] == [truth[2]]
    assert answer["took_s"] < 30.0
    ranks = two.ranks()
    assert ranks[1]["counts"]["failed_tokens"] == LOADED
    assert ranks[0]["counts"].get("failed_tokens", 0) == 0
    free = two.scheduler_state()
    assert free["loading"] == 0
    assert free["free_blocks"] == free["blocks"] - 1
