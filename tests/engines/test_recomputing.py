"""Ranking and recomputing against plain reading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kdn.engines.grouped import use_grouped_attention
from kdn.engines.own_attention import own_attention
from kdn.engines.ranking import choose, rank, read_question
from kdn.engines.reading import forward, new_cache, read
from kdn.engines.recomputing import recompute
from kdn.errors import MismatchError, UnsupportedError

TOKENS = [3 + i * i % 120 for i in range(300)]
QUESTION = [5, 17, 90, 33, 8, 2, 61]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
    ("phi3", {"pad_token_id": 0}),
    ("olmo2", {}),
    ("granite", {"attention_multiplier": 0.3}),
    ("glm4", {"head_dim": 16, "pad_token_id": 0}),
]


def after(model: Any, tokens: list[int]) -> Any:
    past = new_cache(model)
    read(model, tokens, past)
    return past


def spoiled(model: Any, places: list[int]) -> Any:
    """A cache of TOKENS with some values destroyed in all layers."""
    past = after(model, TOKENS)
    with torch.inference_mode():
        for layer in past.layers:
            layer.keys[:, :, places] = 7.0
            layer.values[:, :, places] = -7.0
    return past


def close(a: Any, b: Any) -> None:
    for one, other in zip(a.layers, b.layers, strict=True):
        for x, y in ((one.keys, other.keys), (one.values, other.values)):
            torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3)


@pytest.fixture(params=[False, True], ids=["sdpa", "grouped"])
def switched(request: Any) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_all_or_none_recomputed_is_reading(
    family: str, settings: dict[str, Any], tiny_model: Any, switched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kdn.engines.recomputing.PASS_TOKENS", {"cpu": 90})
    model = tiny_model(family, **settings)
    if switched:
        use_grouped_attention(model)
    before = model.config._attn_implementation
    expected = after(model, TOKENS)
    logits = forward(model, QUESTION, expected)

    whole = spoiled(model, list(range(len(TOKENS))))
    found = recompute(model, whole, TOKENS, torch.arange(len(TOKENS)), QUESTION)
    torch.testing.assert_close(found, logits, atol=2e-3, rtol=1e-3)
    close(whole, expected)

    nothing = after(model, TOKENS)
    found = recompute(model, nothing, TOKENS, torch.zeros(0, dtype=torch.int64), QUESTION)
    torch.testing.assert_close(found, logits, atol=2e-3, rtol=1e-3)
    close(nothing, expected)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chosen_tokens_become_right_and_others_stay(family: str, tiny_model: Any) -> None:
    """Values that only chosen tokens look at: exactly these are mended, and reading goes on."""
    model = tiny_model(family, head_dim=16)
    expected = after(model, TOKENS)
    logits = forward(model, QUESTION, expected)
    places = [20, 21, 22, 90, 170, 171, 255, 256, 299]
    past = spoiled(model, places)
    found = recompute(model, past, TOKENS, torch.tensor(places), QUESTION)
    torch.testing.assert_close(found, logits, atol=2e-3, rtol=1e-3)
    close(past, expected)
    a, b = (forward(model, [9, 4], one) for one in (past, expected))
    torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)

    left = spoiled(model, [5, *places])
    recompute(model, left, TOKENS, torch.tensor(places), QUESTION)
    assert bool((left.layers[1].keys[:, :, 5] == 7.0).all())


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_rank_is_what_eager_attention_shows(
    family: str, settings: dict[str, Any], tiny_model: Any
) -> None:
    model, eager = tiny_model(family, **settings), tiny_model(family, **settings)
    eager.set_attn_implementation("eager")
    past = after(model, TOKENS)
    scores = rank(model, past, QUESTION)
    assert past.get_seq_length() == len(TOKENS) == len(scores)
    close(past, after(model, TOKENS))
    with torch.inference_mode():
        output = eager(torch.tensor([TOKENS + QUESTION]), output_attentions=True)
    weights = torch.stack(output.attentions)[:, 0, :, -len(QUESTION) :, : len(TOKENS)]
    mean = weights.mean((0, 1, 2))
    torch.testing.assert_close(scores, mean / mean.sum(), atol=1e-5, rtol=1e-3)

    logits, again = read_question(model, past, QUESTION)
    torch.testing.assert_close(logits, output.logits[0, -1], atol=2e-3, rtol=1e-3)
    assert torch.equal(again, scores)
    assert past.get_seq_length() == len(TOKENS) + len(QUESTION)


def test_long_questions_and_many_weights(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    past = after(model, TOKENS[:200])
    expected = after(model, TOKENS[:200])
    monkeypatch.setattr("kdn.engines.ranking.MAX_RANKING_TOKENS", 16)
    scores = rank(model, past, TOKENS[200:])
    monkeypatch.setattr("kdn.engines.ranking.MAX_WEIGHTS", 1)
    torch.testing.assert_close(rank(model, past, TOKENS[200:]), scores)
    logits, _ = read_question(model, past, TOKENS[200:])
    plain = read(model, TOKENS[200:], expected)
    torch.testing.assert_close(logits, plain, atol=2e-3, rtol=1e-3)
    close(past, expected)


def test_choosing() -> None:
    scores = torch.tensor([0.9, 0.1, 0.3, 0.2, 0.25, 0.5])
    assert choose(scores, 0.5, [(1, 6)]).tolist() == [2, 4, 5]
    assert choose(scores, 0.34, [(1, 3), (4, 5)]).tolist() == [2, 4]
    assert choose(scores, 1.0, [(1, 3)]).tolist() == [1, 2]
    assert choose(scores, 0.0, [(0, 6)]).tolist() == []


def test_what_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    past = after(model, TOKENS[:40])
    for chosen in ([40], [-1], [3, 3], [5, 4]):
        with pytest.raises(MismatchError, match="rising"):
            recompute(model, past, TOKENS[:40], torch.tensor(chosen), QUESTION)
    with pytest.raises(MismatchError, match="expected 40 tokens"):
        recompute(model, past, TOKENS[:41], torch.tensor([1]), QUESTION)
    assert past.get_seq_length() == 40
    windowed = tiny_model("mistral", sliding_window=64)
    with pytest.raises(UnsupportedError, match="window"):
        rank(windowed, after(windowed, TOKENS[:80]), QUESTION)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "kdn_grouped"])
def test_other_threads_read_as_ever(implementation: str, tiny_model: Any) -> None:
    """While a model is switched over, and when the switch comes in the middle of their pass."""
    model = tiny_model("llama")
    if implementation == "kdn_grouped":
        use_grouped_attention(model)
    else:
        model.set_attn_implementation(implementation)
    past = after(model, TOKENS[:100])
    expected = forward(model, TOKENS[100:150], after(model, TOKENS[:100]))

    def never(*arguments: Any) -> Any:
        raise AssertionError("attention of another thread's pass")

    with (
        ThreadPoolExecutor(1) as other,
        pytest.raises(UnsupportedError, match="0 of"),
        own_attention(model, never),
    ):
        found = other.submit(forward, model, TOKENS[100:150], past).result()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == implementation
