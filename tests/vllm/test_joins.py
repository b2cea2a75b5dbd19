"""Pieces that were learned apart, joined in vLLM's blocks: as transformers joins them, and for
nobody else.

The model is tiny and random: what it says depends on every token. An engine learns pieces behind
one head by reading each alone; prompts then name where their pieces are. What vLLM's blocks hold is
compared with a join that is made by hand, and so is how far its answers are from a full reading.
Then a hundred requests with and without joins share the engine, in too little memory: those without
say what an engine says that has no cache at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.spec import ModelSpec
from kdn.codec import rope
from tests.vllm.harness import TINY_VOCAB, Engine, Node, connector, tiny_model

BLOCK, BLOCKS = 32, 96
HEAD = 21
LENGTHS = (70, 301, 143, 96, 33, 180)
OUTPUT = 24
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": BLOCK,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


def tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(3, TINY_VOCAB) for _ in range(number)]


class Pieces:
    """Some, behind one head, and the prompts that are made of them."""

    def __init__(self) -> None:
        rng = random.Random(11)
        self.head = tokens(rng, HEAD)
        self.own = [tokens(rng, length) for length in LENGTHS]
        self.questions = [tokens(rng, 9 + 3 * number) for number in range(4)]

    def learning(self, number: int) -> list[int]:
        return self.head + self.own[number]

    def asked(self, numbers: list[int], question: int) -> dict[str, Any]:
        """A prompt, and where its pieces are."""
        prompt, ranges = list(self.head), []
        for number in numbers:
            ranges.append([len(prompt), len(prompt) + len(self.own[number])])
            prompt += self.own[number]
        return {"prompt": prompt + self.questions[question], "kdn": {"pieces": ranges}}


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    return Pieces()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(node: Node, model: str, logs: Path, pieces: Pieces) -> Iterator[Engine]:
    transfer = connector(node.url, codec="exact", blend="ranges", seams=None)
    with Engine(
        logs / "engine", model=model, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=transfer, **SETTINGS,
    ) as engine:  # fmt: skip
        engine.generate_each(
            asked=[
                {"prompt": pieces.learning(number), "kdn": {"learn": True}}
                for number in range(len(LENGTHS))
            ],
            max_tokens=1,
        )
        assert engine.flush()["dropped"] == 0
        assert engine.reset()
        yield engine


@pytest.fixture(scope="module")
def reader(model: str) -> Any:
    """The same model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def joined_by_hand(reader: Any, model: str, pieces: Pieces, numbers: list[int]) -> Any:
    """Keys and values [layers, tokens, heads, dim]: each piece is read behind the head, loses it,
    and has its keys turned to where it stands."""
    from kdn.engines.checkpoint import spec_of_checkpoint

    spec: ModelSpec = spec_of_checkpoint(Path(model), torch.float32)
    keys, values, start = [], [], 0
    for order, number in enumerate(numbers):
        with torch.no_grad():
            past = reader(torch.tensor([pieces.learning(number)])).past_key_values
        own = [
            torch.stack([getattr(layer, side)[0].transpose(0, 1) for layer in past.layers])
            for side in ("keys", "values")
        ]
        if order:
            rope.move(own[0], spec, start - HEAD)
            own = [side[:, HEAD:] for side in own]
        keys.append(own[0])
        values.append(own[1])
        start += own[0].shape[1]
    return torch.cat(keys, 1), torch.cat(values, 1)


NUMBERS = [0, 1, 2, 0, 3]  # one of them twice


def test_blocks_hold_what_transformers_joins(
    engine: Engine, reader: Any, model: str, pieces: Pieces, tmp_path: Path
) -> None:
    """Elements match to the rounding of float32; a plain reading has others."""
    asked = pieces.asked(NUMBERS, 0)
    before = engine.state()
    count = engine.loaded_values(asked=asked, path=str(tmp_path / "values"))
    after = engine.state()
    end = asked["kdn"]["pieces"][-1][1]
    assert count == end // BLOCK * BLOCK
    assert after["worker"]["joined_tokens"] - before["worker"].get("joined_tokens", 0) == count
    assert after["scheduler"]["joins"] - before["scheduler"]["joins"] == 1
    found = torch.load(tmp_path / "values")
    expected = joined_by_hand(reader, model, pieces, NUMBERS)
    with torch.no_grad():
        full = reader(torch.tensor([asked["prompt"]])).past_key_values
    for side, mine, theirs in zip(("keys", "values"), found, expected, strict=True):
        theirs = theirs[:, :count]
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()
        read = torch.stack([getattr(one, side)[0].transpose(0, 1) for one in full.layers])
        assert (mine - read[:, :count]).abs().max() > 0.1 * theirs.abs().max()


def test_the_same_divergence_as_in_transformers(
    engine: Engine, reader: Any, model: str, pieces: Pieces
) -> None:
    """From a full reading, at the first token of the answer."""
    klds: list[tuple[float, float]] = []
    for question, numbers in enumerate([NUMBERS, [5, 2], [3, 0, 4, 1], [4, 5, 2]]):
        assert engine.reset()
        asked = pieces.asked(numbers, question)
        plainly = {"prompt": asked["prompt"], "kdn": {"load": False, "publish": False}}
        full = torch.tensor(engine.expected_next(asked=plainly))
        assert engine.reset()
        joined = torch.tensor(engine.expected_next(asked=asked))
        by_hand = next_by_hand(reader, model, pieces, asked, numbers)
        assert (joined - by_hand).abs().max() < 0.01
        klds.append((divergence(full, joined), divergence(full, by_hand)))
    found, expected = (sum(side) / len(klds) for side in zip(*klds, strict=True))
    assert expected > 0.05  # there is something to compare
    assert found == pytest.approx(expected, rel=0.1)


def next_by_hand(
    reader: Any, model: str, pieces: Pieces, asked: dict[str, Any], numbers: list[int]
) -> torch.Tensor:
    """vLLM joins whole blocks, and reads from there on."""
    from transformers import DynamicCache

    start = asked["kdn"]["pieces"][-1][1] // BLOCK * BLOCK
    keys, values = joined_by_hand(reader, model, pieces, numbers)
    cache = DynamicCache()
    for layer in range(len(keys)):
        own = [side[layer, :start].transpose(0, 1)[None] for side in (keys, values)]
        cache.update(*own, layer)
    with torch.no_grad():
        rest = torch.tensor([asked["prompt"][start:]])
        logits: torch.Tensor = reader(rest, past_key_values=cache).logits
    return logits[0, -1].log_softmax(-1)


def divergence(true: torch.Tensor, found: torch.Tensor) -> float:
    return float((true.exp() * (true - found)).sum())


def mixed(pieces: Pieces) -> list[dict[str, Any]]:
    """A hundred: joins, the same prompts without, with a salt, with pieces that nobody knows, and
    with ranges that are wrong."""
    rng = random.Random(3)
    some: list[dict[str, Any]] = []
    wrong = [[[5, 3]], [[0, 10], [11, 20]], [[0, 9000]], "x", [[1, 2]] * 3000, [[True, 9]], [[]]]
    for number in range(100):
        asked = pieces.asked(
            rng.sample(range(len(LENGTHS)), rng.choice([2, 3, 3, 4])), rng.randrange(4)
        )
        kind = number % 5
        if kind == 1 or (kind == 3 and number % 2):
            asked = {**some[-1]}
            asked.pop("kdn")
        elif kind == 3:
            asked["kdn"] = {"pieces": wrong[number % len(wrong)]}
        elif kind == 4 and number % 2:
            asked = {"prompt": some[-2]["prompt"], "salt": "of somebody"}
        some.append(asked)
    return some


def is_join(one: dict[str, Any]) -> bool:
    """Whether its pieces are as they should be."""
    own = one.get("kdn", {}).get("pieces")
    return isinstance(own, list) and len(own) < 100 and bool(own[0]) and own[0][0] == HEAD


@pytest.fixture(scope="module")
def truth(model: str, pieces: Pieces, logs: Path) -> dict[tuple[int, ...], list[int]]:
    """What an engine without any cache says."""
    unique = list(dict.fromkeys(tuple(one["prompt"]) for one in mixed(pieces)))
    with Engine(logs / "truth", model=model, enable_prefix_caching=False, **SETTINGS) as engine:
        told = engine.generate_each(
            asked=[{"prompt": list(one)} for one in unique], max_tokens=OUTPUT
        )
    return dict(zip(unique, told["tokens"], strict=True))


def test_a_hundred_mixed_requests(engine: Engine, pieces: Pieces, truth: Any) -> None:
    """Whoever asked for no join says what he says without a cache, in whatever order they come."""
    asked = mixed(pieces)
    joins = [one for one in asked if is_join(one)]
    assert 40 <= len(joins) <= 70
    for seed in range(2):
        order = list(asked)
        random.Random(seed).shuffle(order)
        before = engine.state()
        told = engine.generate_each(asked=order, max_tokens=OUTPUT)
        after = engine.state()
        assert set(told["reasons"]) == {"length"}
        pairs = list(zip(order, told["tokens"], strict=True))
        wrong = [one for one, said in pairs if not is_join(one) and said != truth[key(one)]]
        assert wrong == []
        other = [one for one, said in pairs if is_join(one) and said != truth[key(one)]]
        assert len(other) > len(joins) // 4  # a joined block that went astray would show
        grown = {
            name: after["scheduler"][name] - before["scheduler"][name]
            for name in ("joins", "refused_joins")
        }
        assert grown["joins"] >= len(joins) // 3  # of the same prompt, one is enough
        assert grown["refused_joins"] == len([1 for one in asked if is_wrong(one)])
        assert (after["requests"], after["loading"]) == (0, 0)
    assert after["preemptions"] > 0


def key(one: dict[str, Any]) -> tuple[int, ...]:
    return tuple(one["prompt"])


def is_wrong(one: dict[str, Any]) -> bool:
    return "kdn" in one and not is_join(one)


def test_nothing_of_a_join_is_published(engine: Engine, pieces: Pieces, truth: Any) -> None:
    """The same prompts without pieces, from what has been published of all by now."""
    engine.flush()
    assert engine.reset()
    before = engine.state()
    asked = [{"prompt": one["prompt"]} for one in mixed(pieces) if is_join(one)]
    told = engine.generate_each(asked=asked, max_tokens=OUTPUT)
    assert told["tokens"] == [truth[key(one)] for one in asked]
    after = engine.state()
    assert after["hits"] - before["hits"] > 1000
    assert after["scheduler"]["joins"] == before["scheduler"]["joins"]
