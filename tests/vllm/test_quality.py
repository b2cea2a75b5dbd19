"""At the default quality: how far the model's expectations are off, teacher-forced, in vLLM itself.

And one cache for two engines: vLLM reads what transformers learned, transformers what vLLM did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import Engine, Node, connector, documents
from tests.vllm.sharing import compare, learn, load

DOCUMENTS, CONTEXT, SCORED = 3, 1024, 256
NO_CACHE = {"kdn": {"load": False, "publish": False}}
WITH_CACHE = {"kdn": {"publish": False}}


@pytest.fixture(scope="module")
def engine(node: Node, logs: Path) -> Iterator[Engine]:
    from kdn.engines.models import smollm2_folder

    with Engine(
        logs / "engine",
        model=str(smollm2_folder()),
        kv_transfer_config=connector(node.url),
        max_model_len=2048,
        max_num_batched_tokens=2048,
    ) as engine:
        yield engine


def test_default_quality(engine: Engine) -> None:
    found = []
    for document in documents(DOCUMENTS, CONTEXT + SCORED):
        engine.generate(prompts=[document[:CONTEXT]], max_tokens=1)
        engine.flush()
        engine.reset()
        own, loaded = engine.teach(
            prompt=document, num_scored=SCORED - 1, runs=[NO_CACHE, WITH_CACHE]
        )
        assert (own["cached"], loaded["cached"]) == (0, CONTEXT)
        assert own["kld"] == 0.0
        found.append(loaded)
    kld = sum(one["kld"] for one in found) / len(found)
    top1 = sum(one["top1"] for one in found) / len(found)
    print(f"\nKLD {kld:.5f} top-1 {top1:.4f}: {found}")  # noqa: T201
    assert 0.0 < kld <= 0.01
    assert top1 >= 0.97


def test_what_was_loaded_with_losses_is_not_published(engine: Engine, node: Node) -> None:
    """Not from the request that loaded it, nor from one that finds its blocks in vLLM's cache."""
    [document] = documents(1, CONTEXT + SCORED)
    engine.reset()
    engine.flush()
    before = node.stats()["objects"]
    for _ in range(2):
        answer = engine.generate(prompts=[document], max_tokens=1)
        assert answer["cached"] == [CONTEXT] or answer["cached"] == [CONTEXT + SCORED - 128]
    engine.flush()
    assert node.stats()["objects"] == before
    assert engine.state()["scheduler"]["lossy"] > 0
    # Without the loaded blocks the model's own values are published.
    engine.reset()
    engine.generate(prompts=[document], max_tokens=1, kdn={"load": False})
    engine.flush()
    assert node.stats()["objects"] > before


def test_transformers_continues_what_vllm_read(
    engine: Engine, node: Node, smollm2: tuple[Any, Any]
) -> None:
    model, _ = smollm2
    [document] = documents(1, CONTEXT + SCORED)
    cache, levels = asyncio.run(load(node.url, "klt", model, document[:CONTEXT]))
    assert cache.end == CONTEXT
    assert set(levels) == {4}  # all that there are: transformers sees what vLLM computed
    kld, top1 = compare(model, cache, document)
    print(f"\ntransformers after vLLM: KLD {kld:.6f} top-1 {top1:.4f}")  # noqa: T201
    assert kld <= 0.001
    assert top1 >= 0.98


def test_vllm_continues_what_transformers_read(
    engine: Engine, node: Node, smollm2: tuple[Any, Any]
) -> None:
    model, _ = smollm2
    document = documents(DOCUMENTS + 1, CONTEXT + SCORED)[-1]
    assert asyncio.run(learn(node.url, "klt", model, document[:CONTEXT])) == CONTEXT // 256
    engine.reset()
    own, loaded = engine.teach(prompt=document, num_scored=SCORED - 1, runs=[NO_CACHE, WITH_CACHE])
    print(f"\nvLLM after transformers: {loaded}")  # noqa: T201
    assert (own["cached"], loaded["cached"]) == (0, CONTEXT)
    assert loaded["kld"] <= 0.01
    assert loaded["top1"] >= 0.93
