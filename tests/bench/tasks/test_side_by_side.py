"""Rows after one context, in one pass: each reads what it would read alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kdn.bench.tasks.side_by_side import SideBySide, answers, log_likelihoods
from kdn.cache.tensors import KVCache
from kdn.engines.generating import Sampling, generate
from kdn.engines.reading import forward, new_cache, read_whole

CONTEXT = np.random.default_rng(0).integers(3, 128, 70)
ROWS = {0: [5, 6, 7], 3: [9], 1: [11, 12, 13, 14, 15]}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def cache(model: Any) -> KVCache:
    return read_whole(model, CONTEXT)


def alone(model: Any, row: list[int]) -> torch.Tensor:
    return forward(model, [*CONTEXT, *row], new_cache(model), every=True)[len(CONTEXT) :]


def greedy(model: Any, row: list[int], most: int) -> list[int]:
    past = new_cache(model)
    logits = forward(model, [*CONTEXT, *row], past)
    return list(generate(model, logits, past, Sampling(most)))


def test_every_row_reads_as_if_it_were_alone(model: Any, cache: KVCache) -> None:
    rows = SideBySide(model, cache)
    first, then = rows.read(ROWS), rows.read({1: [20, 21], 0: [22]})
    for number, more in ((0, [22]), (1, [20, 21]), (3, [])):
        expected = alone(model, [*ROWS[number], *more])
        found = torch.cat([first[number], *([then[number]] if more else [])])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_was_taken_back_is_not_seen(model: Any, cache: KVCache) -> None:
    rows = SideBySide(model, cache)
    rows.read({0: [5, 6, 90, 91], 1: [7]})
    rows.take_back(0, 2)
    found = rows.read({0: [8]})[0]
    torch.testing.assert_close(found, alone(model, [5, 6, 8])[-1:], atol=1e-4, rtol=1e-4)


def test_the_cache_of_the_context_stays_as_it_was(model: Any, cache: KVCache) -> None:
    before = cache.keys.clone()
    SideBySide(model, cache).read(ROWS)
    assert torch.equal(cache.keys, before)


def test_likelihoods_are_those_of_the_tokens_that_follow(model: Any, cache: KVCache) -> None:
    [(likely, best), (other, _)] = log_likelihoods(model, cache, [([5, 6], [7, 8, 9]), ([4], [3])])
    log_probs = torch.log_softmax(alone(model, [5, 6, 7, 8, 9]), -1)
    expected = torch.stack([log_probs[i, t] for i, t in ((1, 7), (2, 8), (3, 9))]).double()
    torch.testing.assert_close(likely, expected, atol=1e-4, rtol=1e-4)
    assert best.tolist() == log_probs[1:4].argmax(-1).tolist()
    assert other.shape == (1,)


def test_answers_are_those_of_each_question_alone(model: Any, cache: KVCache) -> None:
    questions = list(ROWS.values())
    assert answers(model, cache, questions, 6) == [greedy(model, row, 6) for row in questions]


@pytest.mark.parametrize("wrong_from", [0, 2, 5, 6])
def test_drafts_change_no_answer(model: Any, cache: KVCache, wrong_from: int) -> None:
    questions = list(ROWS.values())
    right = answers(model, cache, questions, 6)
    drafts = [[*own[:wrong_from], *(127 - t for t in own[wrong_from:])] for own in right]
    assert answers(model, cache, questions, 6, drafts) == right


def test_an_answer_ends_where_the_model_ends_it(
    model: Any, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = list(ROWS.values())
    whole = answers(model, cache, questions, 8)
    stop = whole[0][3]
    monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
    ended = [own[: own.index(stop)] if stop in own else own for own in whole]
    assert answers(model, cache, questions, 8) == ended
    assert answers(model, cache, questions, 8, ended) == ended
