"""The full reading held against itself scores nothing, and words are compared as SQuAD does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdn.bench.blend.answering import Together
from kdn.bench.blend.scoring import ANSWER_TOKENS, Reading, f1, greedy, score
from kdn.engines.reading import forward, new_cache
from kdn.engines.transformers import spec_of

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
    assert found.begun == reading.answer


def test_answers_made_together_are_those_made_alone(model: Any) -> None:
    reading = Reading.of(model, *asked(model, TOKENS))
    others = [TOKENS[::-1].copy(), TOKENS, np.concatenate([TOKENS[:59], [9]])]
    together = Together(model, spec_of(model), 4, len(TOKENS) + ANSWER_TOKENS, ANSWER_TOKENS)
    for other in others:
        logits, past = asked(model, other)
        found = score(model, reading, logits, past)
        assert (found.kld > 0.01) == (other is not TOKENS)
        assert past.get_seq_length() == len(other) + len(found.begun) - 1
        together.add(past, found.begun)
    alone = [greedy(model, *asked(model, other)) for other in others]
    assert together.finish() == alone
    assert tuple(alone[1]) == reading.answer


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
