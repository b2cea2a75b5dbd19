"""Seams fitted on a question set, and measured with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdn.bench.blend.items import Item
from kdn.bench.blend.pieces import ids_of
from kdn.blend.seams import Seams
from kdn.cache.spec import ModelSpec
from kdn.engines.prompts import Prompts
from kdn.engines.seam_fitting import Example, fit_seams


def fitted_on(
    items: Sequence[Item],
    model: Any,
    tokenizer: Any,
    spec: ModelSpec,
    told: Callable[[float], None],
) -> Seams:
    """As `kdn seams` fits them, with its defaults."""
    examples = [
        Example(item.question, [ids_of(f"{text}\n\n", tokenizer).tolist() for text in item.pieces])
        for item in items
    ]
    return fit_seams(
        model, Prompts(tokenizer), spec, [], examples=examples,
        on_progress=lambda what, done, left_s: told(done),
    )  # fmt: skip
