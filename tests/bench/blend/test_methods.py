"""Every way to answer, on a tiny model: those that compute everything agree with the full reading,
and what kdn delivers is what a join put together by hand holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.bench.blend.cacheblend import by_deviation, first_layers, first_tokens
from kdn.bench.blend.desk import Desk
from kdn.bench.blend.learned import FolderJoiner, Reader, session_of
from kdn.bench.blend.measure import Bench
from kdn.bench.blend.methods import (
    HEADLESS,
    JOINED,
    METHODS,
    REPAIRED,
    Method,
    read_question,
)
from kdn.bench.blend.pieces import Prompt, read_pieces
from kdn.bench.blend.rows import Outcome, rows_of
from kdn.blend.seams import Block, Seams
from kdn.cache.keys import Namespace
from kdn.cache.spec import ModelSpec
from kdn.engines.reading import forward, new_cache
from kdn.engines.transformers import spec_of, to_dynamic_cache
from tests.bench.blend.reference_join import reference_join
from tests.client.letters import Letters

RNG = np.random.default_rng(0)
PROMPT = Prompt(
    RNG.integers(3, 128, 7).astype(np.uint32),
    tuple(RNG.integers(3, 128, n).astype(np.uint32) for n in (40, 21, 300)),
    RNG.integers(3, 128, 9).astype(np.uint32),
)
SPACE = Namespace(b"model", b"profile")


def some_seams(spec: ModelSpec, scale: float) -> Seams:
    """For each layer, random."""
    generator = torch.Generator().manual_seed(3)
    columns = spec.values_per_token // spec.num_layers

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    blocks = [
        Block((layer, layer + 1), some(columns, 2), some(2, columns), some(columns))
        for layer in range(spec.num_layers)
    ]
    return Seams(spec.fingerprint, blocks)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


def joined(model: Any) -> tuple[Any, Any]:
    join = PROMPT.join(SPACE)
    cache = reference_join(join, read_pieces(model, join.pieces), spec_of(model))
    return join, to_dynamic_cache(cache, model.config)


def full_logits(model: Any) -> torch.Tensor:
    return forward(model, np.concatenate([PROMPT.tokens, PROMPT.question]), new_cache(model))


def test_both_joins_hold_the_tokens_that_are_read_in_full() -> None:
    assert np.array_equal(PROMPT.join(SPACE).tokens, PROMPT.tokens)
    assert np.array_equal(PROMPT.headless(SPACE).tokens, PROMPT.tokens)
    turned = PROMPT.reordered((2, 0, 1))
    assert sorted(turned.join(SPACE).tokens) == sorted(PROMPT.tokens)


@pytest.mark.parametrize("name", ["question", "cacheblend"])
def test_all_recomputed_is_the_full_reading(model: Any, name: str) -> None:
    join, past = joined(model)
    every = Method(name, JOINED, 1.0)
    logits, computed = read_question(every, model, past, join, PROMPT.question)
    assert torch.allclose(logits, full_logits(model), atol=1e-3)
    assert computed >= len(PROMPT.tokens) - 47
    assert past.get_seq_length() == len(PROMPT.tokens) + len(PROMPT.question)


def test_a_join_of_one_piece_is_the_full_reading(model: Any) -> None:
    one = Prompt(PROMPT.head, PROMPT.pieces[:1], PROMPT.question)
    join = one.join(SPACE)
    cache = reference_join(join, read_pieces(model, join.pieces), spec_of(model))
    past = to_dynamic_cache(cache, model.config)
    logits, computed = read_question(Method("join", JOINED), model, past, join, one.question)
    wanted = forward(model, np.concatenate([one.tokens, one.question]), new_cache(model))
    assert torch.allclose(logits, wanted, atol=1e-4)
    assert computed == len(one.question)


def test_deviation_is_largest_where_pieces_moved(model: Any) -> None:
    join, past = joined(model)
    first = len(PROMPT.head) + len(PROMPT.pieces[0])
    chosen, passes = by_deviation(model, past, join.tokens, 30)
    assert len(chosen) == 30
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= first  # what stands where it was learned does not deviate
    assert passes == (2 + 45 / len(join.tokens)) / 4  # 45 candidates for 30 tokens


def test_what_was_computed_to_choose_stays_in_the_cache(model: Any) -> None:
    join, past = joined(model)
    _, whole = joined(model)
    read = new_cache(model)
    forward(model, join.tokens, read)
    chosen, _ = by_deviation(model, past, join.tokens, 30)

    def is_read(layer: int) -> Any:
        far = (past.layers[layer].keys - read.layers[layer].keys).abs().amax((0, 1, 3))
        return (far < 1e-4).numpy()

    assert is_read(0).all()
    assert is_read(1).all()
    moved = is_read(2)[len(PROMPT.head) + len(PROMPT.pieces[0]) :]
    assert moved.sum() == 45  # its candidates, computed without the others
    assert is_read(2)[chosen].all()
    assert torch.equal(past.layers[3].keys, whole.layers[3].keys)


def test_first_layers_are_those_of_a_whole_pass(model: Any) -> None:
    past = new_cache(model)
    forward(model, PROMPT.tokens, past)
    found, next_layer = first_layers(model, PROMPT.tokens, 2)
    assert len(found) == 2
    assert next_layer is not None
    some = torch.tensor([3, 50, 51, 360])
    with torch.inference_mode():
        found.append(next_layer(some))
    held = past.layers[2]
    assert torch.allclose(found[2][0], held.keys[0, :, some], atol=1e-5)
    assert torch.allclose(found.pop()[1], held.values[0, :, some], atol=1e-5)
    assert first_layers(model, PROMPT.tokens, 4)[1] is None
    for (keys, values), layer in zip(found, past.layers, strict=False):
        assert torch.allclose(keys, layer.keys[0], atol=1e-5)
        assert torch.allclose(values, layer.values[0], atol=1e-5)


def test_epic_takes_the_first_tokens_of_pieces_that_moved() -> None:
    join = PROMPT.join(SPACE)
    starts = join.starts
    assert first_tokens(join, 6).tolist() == [
        *range(starts[1], starts[1] + 3), *range(starts[2], starts[2] + 3)
    ]  # fmt: skip
    assert len(first_tokens(join, 10_000)) == 321
    assert (
        len(first_tokens(Prompt(PROMPT.head, PROMPT.pieces[:1], PROMPT.question).join(SPACE), 5))
        == 0
    )


def bench(model: Any, joiners: Any) -> Bench:
    return Bench(model, Letters(), spec_of(model), joiners, METHODS)


def test_what_is_delivered_is_the_join_by_hand(model: Any, tmp_path: Path) -> None:
    spec = spec_of(model)
    seams = some_seams(spec, 0.05)

    async def check() -> None:
        async with session_of(tmp_path, "exact", spec, torch.float32) as session:
            joiner = FolderJoiner(session, Reader(model), "default", seams)
            await joiner.learn(PROMPT, headless=True)
            for kind, repair in ((JOINED, None), (REPAIRED, seams), (HEADLESS, None)):
                join = PROMPT.headless(SPACE) if kind == HEADLESS else joiner.join(PROMPT)
                wanted = reference_join(join, read_pieces(model, join.pieces), spec, repair)
                desk = Desk(model, spec, join, 9)
                size_bytes, _ = await joiner.deliver(PROMPT, kind, desk.given)
                found = desk.given.canonical(join.num_tokens)
                assert torch.allclose(found.keys, wanted.keys, atol=1e-4)
                assert torch.allclose(found.values, wanted.values, atol=1e-4)
                assert size_bytes > 0

    asyncio.run(check())


def test_every_method_in_one_table(model: Any, tmp_path: Path) -> None:
    spec = spec_of(model)

    async def measured() -> list[Outcome]:
        async with session_of(tmp_path, "exact", spec, torch.float32) as session:
            joiner = FolderJoiner(session, Reader(model), "default", some_seams(spec, 0.0))
            work = Bench(model, Letters(), spec, [joiner], METHODS)
            outcomes = await work.measure(PROMPT, ["gold"])
            store = session.places.publish_to.store
            assert [one async for one in store.list()] == []  # what was learned is forgotten
            assert work.timings.seconds["full reading"] > 0
            return outcomes

    rows = {(row.method, row.share): row for row in rows_of("set", asyncio.run(measured()))}
    assert list(rows) == [(one.name, one.share) for one in METHODS]
    full, prefix, join = rows["full", 1.0], rows["prefix", 0.0], rows["join", 0.0]
    assert (full.kld_first, full.kld, full.top1, full.f1_full) == (0, 0, 1, 1)
    assert prefix.kld < 1e-6  # the first piece is right, the rest is read
    assert prefix.f1_full == 1
    assert join.kld > 0.01
    assert rows["join-no-head", 0.0].head is False
    assert rows["question", 0.3].kld < join.kld
    # seams that add nothing change nothing
    assert rows["seams", 0.0].kld == pytest.approx(join.kld, rel=1e-3)
    num_tokens, asked = len(PROMPT.tokens), len(PROMPT.question)
    assert full.computed_tokens == num_tokens + asked
    assert prefix.computed_tokens == num_tokens + asked - 47
    assert join.computed_tokens == asked
    assert rows["question", 0.15].computed_tokens == round(0.15 * num_tokens) + 2 * asked
    assert join.bytes > prefix.bytes > full.bytes == 0
    assert all(row.ttft_s > 0 for row in rows.values())
