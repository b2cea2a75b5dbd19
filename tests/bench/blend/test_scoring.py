"""The full reading held against itself scores nothing, and words are compared as SQuAD does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdn.bench.blend.scoring import ANSWER_TOKENS, Reading, f1, greedy, score
from kdn.engines.reading import forward, new_cache

TOKENS = np.random.default_rng(0).integers(3, 128, 60)


def asked(model: Any, tokens: Any) -> tuple[Any, Any]:
    past = new_cache(model)
    return forward(model, tokens, past), past


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


def test_a_reading_is_its_own_truth(model: Any) -> None:
    reading = Reading.of(model, *asked(model, TOKENS))
    assert len(reading.answer) == ANSWER_TOKENS
    found = score(model, reading, *asked(model, TOKENS))
    assert found.kld_first == 0
    assert found.kld == 0
    assert found.same_first
    assert found.answer == reading.answer


def test_another_context_diverges_and_answers_as_it_would_alone(model: Any) -> None:
    reading = Reading.of(model, *asked(model, TOKENS))
    found = score(model, reading, *asked(model, TOKENS[::-1].copy()))
    assert found.kld_first > 0.01
    assert found.kld > 0.01
    alone = greedy(model, *asked(model, TOKENS[::-1].copy()), stops={2})
    assert list(found.answer) == [token for token in alone if token != 2]


def test_divergence_is_that_of_each_token(model: Any) -> None:
    reading = Reading.of(model, *asked(model, TOKENS))
    logits, past = asked(model, TOKENS[::-1].copy())
    found = score(model, reading, logits, past)
    p, q = reading.log_probs[0].double(), logits.double().log_softmax(-1)
    assert found.klds[0] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    assert found.klds.shape == (ANSWER_TOKENS,)


@pytest.mark.parametrize(
    ("answer", "expected", "wanted"),
    [
        ("The Answer!", ["answer"], 1.0),
        ("in Paris, France", ["Paris"], 0.5),
        ("x", ["y", "x z"], 2 / 3),
        ("", ["y"], 0.0),
        ("the", ["a"], 1.0),
    ],
)
def test_f1_of_words(answer: str, expected: list[str], wanted: float) -> None:
    assert f1(answer, expected) == pytest.approx(wanted)
