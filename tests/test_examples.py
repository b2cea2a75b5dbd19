"""The programs in examples/ do what they say. They share one model, one folder and one node."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.harness import config_for, running

EXAMPLES = Path(__file__).parent.parent / "examples"
TOKENS = 4
"""Of each answer: these tests are not about what the model says."""


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("examples") / "knowledge")


@pytest.fixture(scope="module")
def node_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a node on an event loop in a thread."""
    begun, told, ends = threading.Event(), {}, asyncio.Event()
    config = config_for(tmp_path_factory.mktemp("node"))

    async def serve() -> None:
        async with running(config) as node:
            told.update(url=node.url, loop=asyncio.get_running_loop())
            begun.set()
            await ends.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert begun.wait(30)
    yield told["url"]
    told["loop"].call_soon_threadsafe(ends.set)
    thread.join(30)


@pytest.mark.model
def test_documents_are_joined(folder: str, smollm2: Any) -> None:
    answers = example("rag").main(folder, smollm2, TOKENS)
    assert len(answers) == 2
    for answer in answers:
        assert answer.stats.joined_pieces == 2
        assert answer.stats.known_tokens > 5 * answer.stats.computed_tokens


@pytest.mark.model
def test_a_chat_goes_on_elsewhere(node_url: str, smollm2: Any) -> None:
    first, second, third = example("chat_moves").main(node_url, smollm2, TOKENS)
    assert first.computed_tokens == first.num_tokens
    assert second.num_tokens < third.num_tokens
    for later in (second, third):
        assert later.computed_tokens < later.num_tokens / 2


@pytest.mark.model
def test_an_agent_reads_only_what_is_new(folder: str, smollm2: Any) -> None:
    steps = example("agent").main(folder, smollm2, TOKENS)
    assert [step.num_tokens for step in steps] == sorted({step.num_tokens for step in steps})
    added = steps[-1].num_tokens - steps[-2].num_tokens
    assert steps[-1].computed_tokens < added + 256


@pytest.mark.model
def test_a_server_answers_all_its_users(folder: str, smollm2: Any) -> None:
    answers = asyncio.run(example("async_server").main(folder, smollm2, TOKENS))
    assert len(answers) == 3
    assert all(answers)
    assert not [said for said in answers if said.startswith("sorry")]


@pytest.mark.model
def test_an_own_loop_makes_what_generate_makes(folder: str, smollm2: Any) -> None:
    import torch

    loop = example("generation_loop")
    known, made = loop.main(folder, smollm2, TOKENS)
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer(loop.PROMPT).input_ids])
    expected = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    assert (known, made) == (0, expected[0, ids.shape[1] :].tolist())
    known, _ = loop.main(folder, smollm2, TOKENS)
    assert known >= 256


def test_examples_are_short_and_every_one_is_listed() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert len(programs) == 6
    listed = (EXAMPLES / "README.md").read_text()
    for path in programs:
        assert len(path.read_text().splitlines()) < 80
        assert f"`{path.name}`" in listed
