"""Seams fitted on a question set, and what each of its questions says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from kdn.bench.blend.items import Item
from kdn.bench.blend.pieces import ids_of
from kdn.blend.seams import Seams
from kdn.cache.spec import ModelSpec
from kdn.engines.prompts import Prompts
from kdn.engines.seam_fitting import DEFAULTS, Example, Klds, fit_seams

Answers = dict[str, dict[float, tuple[float, float]]]
"""By question and share: both divergences, means over the orders."""


def fitted_on(
    items: Sequence[Item],
    model: Any,
    tokenizer: Any,
    spec: ModelSpec,
    told: Callable[[float], None],
) -> tuple[Seams, Answers]:
    """As `kdn seams` fits them, with its defaults; and what their report is the mean of, for each
    question that was asked about all of its text. Of much text, a report takes the beginning; a
    long piece may be cut there, and so be joined in one place more."""
    answers: Answers = {}
    shares = (0.0, *DEFAULTS.shares)
    examples = [
        Example(item.question, [ids_of(f"{text}\n\n", tokenizer).tolist() for text in item.pieces])
        for item in items
    ]
    whole = {one.question: [*chain(*one.pieces)] for one in examples}

    def measured(pieces: Sequence[Sequence[int]], questions: Sequence[str], klds: Klds) -> None:
        if [*chain(*pieces)] == whole.get(questions[0]):  # others are made up
            answers[questions[0]] = dict(zip(shares, klds[1:], strict=False))

    seams = fit_seams(
        model, Prompts(tokenizer), spec, [], examples=examples,
        on_progress=lambda what, done, left_s: told(done), on_measured=measured,
    )  # fmt: skip
    return seams, answers
