"""Joins of a real model in vLLM, coded with losses and repaired by seams: they say what the same
joins say in transformers.

SmolLM2 reads parts of Python's manual in vLLM, each behind one head. Seams are fitted on others (a
few joins: how good they are does not matter here). Then questions are asked about joins of the
parts, in vLLM and in transformers, which loads the same streams from the same node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.blend.pieces import Join, Piece
from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.client.asynchronous import AsyncClient
from kdn.client.fitting import fit_and_share
from kdn.delivery.join_sink import JoinSink
from kdn.engines.seam_fitting import SeamOptions
from kdn.engines.transformers import to_dynamic_cache
from kdn.session.seams import find_seams
from tests.vllm.harness import Engine, Node, connector, documents

BLOCK, TAG, QUALITY = 32, "join-quality", 0.004
LENGTHS = (210, 300, 150, 260, 120, 330)
JOINS = ([0, 1, 2], [3, 4], [5, 0, 4], [2, 5, 1])
OPTIONS = SeamOptions(joins=4, questions=2, join_tokens=640, shares=())


@pytest.fixture(scope="module")
def parts() -> list[list[int]]:
    [document] = documents(1, 4096)
    ends = np.cumsum(LENGTHS)
    return [document[end - length : end] for end, length in zip(ends, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def client(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncClient]:
    """With seams that are shared at the node; what it keeps on this machine goes with the test."""
    from kdn.engines.models import smollm2_folder

    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").symlink_to(smollm2_folder().parent)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("KDN_CACHE", str(cache))
        client = AsyncClient(node.url, recompute=False)
        runner.run(client.__aenter__())
        engine = client.engine
        [document] = documents(1, 9000)
        texts = [engine.prompts.text(document[at : at + 160]) for at in range(5000, 9000, 160)]
        runner.run(fit_and_share(engine, client.session, [], texts, [], TAG, None, OPTIONS))
        client.runner = runner  # type: ignore[attr-defined]
        yield client
        runner.run(client.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def engine(node: Node, logs: Path, client: AsyncClient, parts: list[list[int]]) -> Iterator[Engine]:
    from kdn.engines.models import smollm2_folder

    transfer = connector(node.url, blend="ranges", seams=TAG, join_kld=100.0, quality=QUALITY)
    with Engine(
        logs / "engine", model=str(smollm2_folder()), enable_prefix_caching=True,
        kv_transfer_config=transfer, max_model_len=2048, block_size=BLOCK,
        max_num_batched_tokens=512,
    ) as engine:  # fmt: skip
        head = client.engine.prompts.begin()
        engine.generate_each(
            asked=[{"prompt": head + part, "kdn": {"learn": True}} for part in parts], max_tokens=1
        )
        assert engine.flush()["dropped"] == 0
        assert engine.reset()
        yield engine


def test_the_same_divergence_as_in_transformers(
    engine: Engine, client: AsyncClient, parts: list[list[int]]
) -> None:
    """From a full reading, at the first token of the answer."""
    head, klds = client.engine.prompts.begin(), []
    for numbers in JOINS:
        asked = asked_about(client, head, [parts[number] for number in numbers])
        plainly = {"prompt": asked["prompt"], "kdn": {"load": False, "publish": False}}
        before = engine.state()["worker"].get("repaired_tokens", 0)
        assert engine.reset()
        full = torch.tensor(engine.expected_next(asked=plainly))
        assert engine.reset()
        joined = torch.tensor(engine.expected_next(asked=asked))
        assert engine.state()["worker"]["repaired_tokens"] > before
        end = asked["kdn"]["pieces"][-1][1] // BLOCK * BLOCK
        values = client.runner.run(  # type: ignore[attr-defined]
            loaded(client, head, [parts[number] for number in numbers])
        )
        by_hand = next_after(client, values.slice(0, end), asked["prompt"][end:])
        klds.append((divergence(full, joined), divergence(full, by_hand)))
    print(f"\nKLD of joins in vLLM and in transformers: {klds}")  # noqa: T201
    found, expected = (sum(side) / len(klds) for side in zip(*klds, strict=True))
    assert expected > 0.01, "there is something to compare"
    assert found == pytest.approx(expected, rel=0.1)


def asked_about(client: AsyncClient, head: list[int], own: list[list[int]]) -> dict[str, Any]:
    prompt, ranges = list(head), []
    for part in own:
        ranges.append([len(prompt), len(prompt) + len(part)])
        prompt += part
    prompt += client.engine.tokenizer("\n\nIn short, this says that")["input_ids"]
    return {"prompt": prompt, "kdn": {"pieces": ranges}}


async def loaded(client: AsyncClient, head: list[int], own: list[list[int]]) -> KVCache:
    """The join, as this client's codec decodes and repairs it."""
    session, spec = client.session, client.engine.spec
    namespace = await client.engine.names()
    pieces = []
    for part in own:
        tokens = np.asarray(head + part)
        pieces.append(Piece(tokens, len(head), tuple(cut(tokens, namespace, whole=True))))
    join = Join(tuple(pieces))
    seams = await find_seams(session, TAG)
    assert seams is not None
    cache = KVCache.empty(
        spec.num_layers, join.num_tokens, spec.num_kv_heads, spec.head_dim, dtype=torch.float32
    )
    sink = JoinSink(session.codec, session.codec.repaired(seams), join, cache, seams=seams)
    got = await session.deliver(join.chunks, sink, enough_kld=QUALITY, deadline_s=60.0)
    assert all(got.grades), got.troubles
    return cache


def next_after(client: AsyncClient, values: KVCache, rest: list[int]) -> torch.Tensor:
    model = client.engine.model
    with torch.no_grad():
        past = to_dynamic_cache(values, model.config)
        logits: torch.Tensor = model(torch.tensor([rest]), past_key_values=past).logits
    return logits[0, -1].log_softmax(-1)


def divergence(true: torch.Tensor, found: torch.Tensor) -> float:
    return float((true.exp() * (true - found)).sum())
