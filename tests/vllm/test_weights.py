"""Weights and adapters that are replaced in a running engine, in a real vLLM, which does not tell.

The model is tiny and random. What it says without kdn after the change is the truth.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import (
    TINY_VOCAB,
    Engine,
    Node,
    connector,
    tiny_adapter,
    tiny_model,
)

ASIDE = {"load": False, "publish": False}
OPTIONS: dict[str, Any] = {"max_tokens": 12, "detokenize": False}
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
}


def prompt(seed: int, num_tokens: int = 600) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, TINY_VOCAB) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("other"), seed=2)


def start(log: Path, node: Node, model: str, **settings: Any) -> Engine:
    transfer = connector(node.url, codec="exact")
    return Engine(log, model=model, kv_transfer_config=transfer, **SETTINGS, **settings)


@pytest.fixture(scope="module")
def engine(node: Node, model: str, logs: Path) -> Iterator[Engine]:
    with start(
        logs / "lora", node, model, enable_lora=True, max_loras=1, max_lora_rank=8
    ) as engine:
        yield engine


def ask(engine: Engine, seed: int, **options: Any) -> list[int]:
    answer = engine.generate(prompts=[prompt(seed)], **OPTIONS, **options)
    tokens: list[int] = answer["tokens"][0]
    return tokens


def stored(engine: Engine, node: Node) -> int:
    engine.flush()
    return int(node.stats()["objects"])


def test_an_adapter_trained_on_in_its_place(engine: Engine, node: Node, tmp_path: Path) -> None:
    """vLLM keeps the weights that it has; the files are of others."""
    lora = ["a", 1, tiny_adapter(tmp_path / "a", seed=1)]
    first = ask(engine, 1, lora=lora)
    assert first != ask(engine, 1)
    assert stored(engine, node) == 6  # two full chunks and a tail, with the adapter and without
    tiny_adapter(tmp_path / "a", seed=2)
    assert engine.reset()
    assert ask(engine, 1, lora=lora) == first  # as vLLM has it
    ask(engine, 2, lora=lora)
    assert stored(engine, node) == 6
    assert engine.state()["scheduler"]["refused"] == 2
    # Under a name and an id of its own it is an adapter as any other.
    ask(engine, 2, lora=["b", 2, tiny_adapter(tmp_path / "b", seed=2)])
    assert stored(engine, node) == 9


def test_weights_loaded_into_a_running_engine(engine: Engine, node: Node, other_model: str) -> None:
    """What is known is of the old ones: the load that was promised is not used."""
    before = ask(engine, 1)
    objects = stored(engine, node)
    assert engine.reset()
    answer = engine.generate(prompts=[prompt(1)], **OPTIONS)
    assert (answer["tokens"], answer["cached"]) == ([before], [576])
    engine.load_weights(folder=other_model)
    assert engine.reset()  # and nothing but vLLM's own cache
    truth = ask(engine, 1, kdn=ASIDE)
    assert truth != before
    assert engine.reset()
    assert ask(engine, 1) == truth
    check_stopped(engine, node, objects)


def test_weights_changed_in_their_place(node: Node, model: str, logs: Path) -> None:
    """Nothing is known of the first prompt that follows: what is computed is not published."""
    with start(logs / "in place", node, model) as engine:
        before = ask(engine, 11)
        objects = stored(engine, node)
        engine.change_weights()
        assert engine.reset()
        truth = ask(engine, 11, kdn=ASIDE)
        assert truth != before
        assert engine.reset()
        ask(engine, 12)
        assert stored(engine, node) == objects
        assert ask(engine, 11) == truth
        check_stopped(engine, node, objects)


def check_stopped(engine: Engine, node: Node, objects: int) -> None:
    state = engine.state()
    assert state["scheduler"]["stopped"] == 1
    ask(engine, 100)
    assert stored(engine, node) == objects
    assert engine.state()["scheduler"]["asked"] == state["scheduler"]["asked"]
    assert (engine.state()["states"], engine.state()["loading"]) == (0, 0)
