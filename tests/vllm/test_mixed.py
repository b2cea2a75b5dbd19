"""Two hundred requests at once, of every kind, in too little memory, while the node dies and comes
back: nothing hangs, nothing is wrong, nothing is left behind.

The model is tiny and random: what it says depends on every token, and it says it quickly. What it
says without any cache, one prompt at a time, is the truth. With KDN_TEST_MODEL=smollm2 the model is
SmolLM2 and the prompts are real text: the same in a quarter of an hour.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import TINY_VOCAB, Engine, Node, connector, documents, tiny_model

BLOCK, BLOCKS = 32, 64
REAL = os.environ.get("KDN_TEST_MODEL") == "smollm2"
OUTPUT = 12 if REAL else 40
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": BLOCK,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}
OPTIONS: dict[str, Any] = {"max_tokens": OUTPUT, "detokenize": False}
LIMIT_S = 900.0 if REAL else 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from kdn.engines.models import smollm2_folder

    return str(smollm2_folder()) if REAL else tiny_model(tmp_path_factory.mktemp("model"))


def tokens(rng: random.Random, number: int) -> list[int]:
    if REAL:
        text = real_text()
        start = rng.randrange(len(text) - number)
        return text[start : start + number]
    return [rng.randrange(3, TINY_VOCAB) for _ in range(number)]


@cache
def real_text() -> list[int]:
    [text] = documents(1, 20_000)
    return text


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A beginning shared by all, twelve documents of all lengths, five questions; some twice."""
    rng = random.Random(5)
    beginning = tokens(rng, 256 + 40)
    documents = [beginning + tokens(rng, 30 + 37 * number) for number in range(12)]
    asked = [tokens(rng, 5 + 7 * number) for number in range(5)]
    every = [document + question for document in documents for question in asked]
    every += [tokens(rng, 8 + 20 * number) for number in range(10)]  # of which nothing is known
    return [every[rng.randrange(len(every))] for _ in range(200)]


@pytest.fixture(scope="module")
def truth(model: str, prompts: list[list[int]], logs: Path) -> dict[tuple[int, ...], list[int]]:
    unique = list(dict.fromkeys(map(tuple, prompts)))
    with Engine(logs / "truth", model=model, enable_prefix_caching=False, **SETTINGS) as engine:
        told = [engine.generate(prompts=[list(prompt)], **OPTIONS) for prompt in unique]
        assert {cached for one in told for cached in one["cached"]} == {0}
    answers = [tuple(one["tokens"][0]) for one in told]
    assert len(set(answers)) > 0.9 * len(answers)  # the model does listen
    return {prompt: list(answer) for prompt, answer in zip(unique, answers, strict=True)}


@pytest.fixture(scope="module")
def engine(node: Node, model: str, logs: Path) -> Iterator[Engine]:
    transfer = connector(node.url, fetch_connections=2, codec="exact", lookup_s=1.0, deadline_s=3.0)
    with Engine(
        logs / "engine", model=model, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=transfer, **SETTINGS,
    ) as engine:  # fmt: skip
        yield engine


def check(
    answer: dict[str, Any], prompts: list[list[int]], truth: dict[tuple[int, ...], list[int]]
) -> None:
    assert set(answer["reasons"]) == {"length"}
    wrong = [
        number
        for number, prompt in enumerate(prompts)
        if answer["tokens"][number] != truth[tuple(prompt)]
    ]
    assert wrong == []
    assert answer["took_s"] < LIMIT_S


def missed(state: dict[str, Any]) -> int:
    return int(state["scheduler"]["late"] + state["worker"].get("failed_tokens", 0))


def test_first_time(engine: Engine, prompts: Any, truth: Any) -> None:
    """Everything is computed, published, and partly used at once."""
    check(engine.generate(prompts=prompts[:100], **OPTIONS), prompts[:100], truth)
    counts = engine.flush()
    assert counts["published"] > 40
    assert (counts["refused"], counts["dropped"]) == (0, 0)


def test_the_node_dies_midway(engine: Engine, node: Node, prompts: Any, truth: Any) -> None:
    assert engine.reset()
    before = engine.state()
    engine.begin("generate", prompts=prompts, **OPTIONS)
    time.sleep(2.0)
    node.kill()
    check(engine.end(), prompts, truth)
    after = engine.state()
    assert after["preemptions"] > before["preemptions"]
    assert after["scheduler"]["hits"] - before["scheduler"]["hits"] > 5
    assert missed(after) > missed(before)
    assert after["scheduler"]["asked"] - before["scheduler"]["asked"] >= 190


def test_the_node_comes_back(engine: Engine, node: Node, prompts: Any, truth: Any) -> None:
    node.start()
    time.sleep(6.0)
    assert engine.reset()
    before = engine.state()
    check(engine.generate(prompts=prompts, **OPTIONS), prompts, truth)
    after = engine.state()
    assert after["hits"] - before["hits"] > 5000
    failed = [state["worker"].get("failed_tokens", 0) for state in (before, after)]
    assert failed[1] == failed[0]


def test_requests_that_are_given_up(engine: Engine, prompts: Any) -> None:
    assert engine.reset()
    assert engine.abandon(prompts=prompts[:40], steps=3) == 40


def test_nothing_is_left_behind(engine: Engine, prompts: Any, truth: Any) -> None:
    engine.flush()
    before = engine.state()
    for _ in range(2):
        assert engine.reset()
        check(engine.generate(prompts=prompts, **OPTIONS), prompts, truth)
    engine.flush()
    assert engine.reset()
    after = engine.state()
    assert after["free_blocks"] == after["blocks"] - 1  # vLLM keeps one that stands for none
    assert (after["requests"], after["states"], after["loading"]) == (0, 0, 0)
    assert after["rss_bytes"] - before["rss_bytes"] < 100 << 20
