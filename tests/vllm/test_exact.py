"""With `exact`, a load is as good as vLLM's own prefix cache: the same text, token for token.

One engine reads four documents; twenty prompts are then asked of it with its own prefix cache, with
only what it published, and of a fresh engine with other blocks. Hits are counted: correct text
alone could come from a cache that is never used. The last test stores shuffled values instead and
wants the text to be wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.vllm.harness import Engine, Node, connector, documents, questions
from tests.vllm.sharing import answer, learn, load

BLOCK = 128
NUM_DOCUMENTS, DOCUMENT_TOKENS = 4, 600
LOADED = 512  # whole blocks of what is known of a document: two chunks and a tail of 80 tokens
MODEL: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def docs() -> list[list[int]]:
    return documents(NUM_DOCUMENTS, DOCUMENT_TOKENS)


@pytest.fixture(scope="module")
def prompts(docs: list[list[int]]) -> list[list[int]]:
    return [document + question for document in docs for question in questions()]


@pytest.fixture(scope="module")
def engine(node: Node, logs: Path) -> Iterator[Engine]:
    from kdn.engines.models import smollm2_folder

    transfer = connector(node.url, codec="exact")
    with Engine(
        logs / "engine", model=str(smollm2_folder()), kv_transfer_config=transfer, **MODEL
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def own(engine: Engine, docs: list[list[int]], prompts: list[list[int]]) -> list[list[int]]:
    """What vLLM says with its own prefix cache; the documents are published on the way."""
    cold = engine.generate(prompts=docs, max_tokens=1)
    assert cold["cached"] == [0] * NUM_DOCUMENTS
    assert engine.flush()["published"] == 3 * NUM_DOCUMENTS
    told = [engine.generate(prompts=[prompt], kdn={"load": False}) for prompt in prompts]
    assert [one["cached"] for one in told] == [[LOADED]] * len(prompts)
    assert engine.state()["hits"] == 0
    engine.flush()
    return [one["tokens"][0] for one in told]


def ask_each(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """One at a time and without vLLM's own prefix cache."""
    tokens, cached = [], []
    for prompt in prompts:
        assert engine.reset()
        answer = engine.generate(prompts=[prompt], kdn={"publish": False})
        tokens += answer["tokens"]
        cached += answer["cached"]
    return tokens, cached


def test_same_text_as_its_own_prefix_cache(
    engine: Engine, own: list[list[int]], docs: list[list[int]], prompts: list[list[int]]
) -> None:
    before = engine.state()
    tokens, cached = ask_each(engine, prompts)
    after = engine.state()
    assert tokens == own
    # The prompts themselves were published too: of each, all whole blocks but the last token's.
    expected = [(len(prompt) - 1) // 16 * 16 // BLOCK * BLOCK for prompt in prompts]
    assert cached == expected
    assert after["hits"] - before["hits"] == sum(expected)
    assert after["scheduler"]["hits"] - before["scheduler"]["hits"] == len(prompts)
    assert after["worker"].get("failed_tokens", 0) == 0


def test_a_fresh_engine_with_other_blocks(
    own: list[list[int]], prompts: list[list[int]], node: Node, logs: Path
) -> None:
    from kdn.engines.models import smollm2_folder

    # As on a GPU, a process of its own receives, once link and decoder are known to be fast.
    transfer = connector(node.url, codec="exact", fetch_connections=2)
    settings = {**MODEL, "block_size": 32, "kv_transfer_config": transfer}
    with Engine(logs / "other", model=str(smollm2_folder()), **settings) as other:
        tokens, cached = ask_each(other, prompts[:5])
        assert cached == [(len(prompt) - 1) // 16 * 16 // 32 * 32 for prompt in prompts[:5]]
        assert tokens == own[:5]
        assert other.state()["orders"] >= 1
        assert other.state()["fingerprint"] == expected_fingerprint()


def expected_fingerprint() -> str:
    from kdn.engines.models import load_model
    from kdn.engines.transformers import fingerprint_of

    return fingerprint_of(load_model("smollm2")[0]).hex()


def test_a_salt_hides_what_others_know(engine: Engine, prompts: list[list[int]]) -> None:
    engine.reset()
    answer = engine.generate(prompts=[prompts[0]], salt="mine", max_tokens=1)
    assert answer["cached"] == [0]
    engine.flush()
    engine.reset()
    answer = engine.generate(prompts=[prompts[0]], salt="mine", max_tokens=1)
    assert answer["cached"] == [LOADED]


def test_a_request_may_refuse(engine: Engine, prompts: list[list[int]]) -> None:
    engine.reset()
    answer = engine.generate(prompts=[prompts[0]], kdn={"load": False}, max_tokens=1)
    assert answer["cached"] == [0]
    engine.reset()
    before = engine.state()["scheduler"]["refused"]
    answer = engine.generate(prompts=[prompts[0]], kdn={"nonsense": 1}, max_tokens=1)
    assert answer["cached"] == [0]
    assert engine.state()["scheduler"]["refused"] == before + 1


@pytest.mark.parametrize("drops_hits", [True, False])
def test_what_a_prompts_tokens_are_expected_to_be(
    engine: Engine, own: list[list[int]], prompts: list[list[int]], drops_hits: bool
) -> None:
    """Every token's log probability comes from computing it: a hit is there, and not looked up.
    vLLM drops such a hit since 0.32, and before answers with whatever was in memory."""
    score = {"prompts": prompts[:1], "max_tokens": 1, "scores": True}
    engine.reset()
    without = engine.generate(**score, kdn={"load": False, "publish": False})
    engine.reset()
    found = engine.generate(prompts=prompts[:1], kdn={"publish": False}, max_tokens=1)
    assert found["cached"][0] >= LOADED
    engine.reset()
    if not drops_hits:
        engine.keep_hits()  # until the engine ends: last of all that ask for these
    before = engine.state()["scheduler"]["asked"]
    told = engine.generate(**score, kdn={"publish": False})
    assert len(without["scores"][0]) == len(prompts[0]) - 1
    assert told["scores"] == without["scores"]
    assert told["cached"] == [0]
    assert engine.state()["scheduler"]["asked"] == before


def test_vllm_continues_what_transformers_read(
    engine: Engine, node: Node, smollm2: tuple[Any, Any]
) -> None:
    """The same text as without a cache, though the other engine rounds differently."""
    document = documents(NUM_DOCUMENTS + 1, DOCUMENT_TOKENS)[-1]
    assert asyncio.run(learn(node.url, "exact", smollm2[0], document)) == 3
    prompts = [document + question for question in questions()]
    tokens, cached = ask_each(engine, prompts)
    assert cached == [LOADED] * len(prompts)
    engine.reset()
    without = engine.generate(prompts=prompts, kdn={"load": False, "publish": False})
    assert tokens == without["tokens"]


def test_transformers_continues_what_vllm_read(
    own: list[list[int]], prompts: list[list[int]], node: Node, smollm2: tuple[Any, Any]
) -> None:
    for prompt in prompts[::5]:
        cache, _ = asyncio.run(load(node.url, "exact", smollm2[0], prompt[:512]))
        assert answer(smollm2[0], prompt, cache, 16) == answer(smollm2[0], prompt, None, 16)


def test_shuffled_values_give_other_text(
    engine: Engine, own: list[list[int]], prompts: list[list[int]], node: Node
) -> None:
    """The negative control, last: it spoils the node."""
    number = asyncio.run(shuffle_all(node.url))
    assert number >= 3 * NUM_DOCUMENTS
    tokens, cached = ask_each(engine, prompts[::4])
    assert min(cached) >= LOADED
    wrong = sum(found != expected for found, expected in zip(tokens, own[::4], strict=True))
    assert wrong == len(tokens)


async def shuffle_all(url: str) -> int:
    """Puts valid streams of the same values, but other tokens' keys, in the place of all."""
    import numpy as np

    from kdn.cache.keys import PUBLIC_SEAL_KEY, Chunk
    from kdn.cache.tensors import KVCache
    from kdn.codec import open_codec
    from kdn.codec.format import Bitstream
    from kdn.codec.header import Header
    from kdn.engines.checkpoint import spec_of_checkpoint
    from kdn.engines.models import smollm2_folder
    from kdn.places.places import open_places

    codec = open_codec("exact", spec_of_checkpoint(smollm2_folder()))
    none = np.zeros(0, np.uint32)
    async with open_places(url) as places:
        store = places.publish_to.store
        entries = [entry async for entry in store.list()]
        for entry in entries:
            span = await store.get(entry.key)
            assert span is not None
            stream = Bitstream.parse(bytes(span.data))
            info = stream.info
            chunk = Chunk(
                entry.key,
                b"",
                info.start,
                np.zeros(info.num_tokens, np.uint32),
                none,
                PUBLIC_SEAL_KEY,
            )
            cache = codec.decode(stream, chunk)
            order = torch.randperm(info.num_tokens, generator=torch.Generator().manual_seed(1))
            # Attention does not mind the order of tokens, as long as keys keep their values.
            cache = KVCache(cache.keys[:, order], cache.values, cache.start)
            data = codec.encode(chunk, cache)
            await store.delete(entry.key)
            await store.put(
                entry.key, data, etag=Header.parse(data).stream_id,
                checksum=xxhash.xxh3_64_intdigest(data), hints=entry.hints,
            )  # fmt: skip
    return len(entries)
