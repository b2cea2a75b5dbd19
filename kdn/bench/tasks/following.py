"""Perplexity: how likely a model finds the text that really follows a context."""

from __future__ import annotations

import numpy as np

from kdn.bench.tasks.problems import Follow, Problem, Task, Writer
from kdn.calibrate.corpus import Sample, Text

CONTEXT_TOKENS = 2048
FOLLOWING_TOKENS = 256
SHARE = 2


def task(text: Text, writer: Writer, most: int) -> Task:
    """An item is a context and what follows it. A context is long and tells much: a part of
    `most` will do."""
    tokens = np.asarray(writer.ids(text.content), dtype=np.uint32)
    head = np.asarray(writer.head(), dtype=np.uint32)
    count = min(-(-most // SHARE), max(1, len(tokens) // (CONTEXT_TOKENS + FOLLOWING_TOKENS + 1)))
    sample = Sample.of(text, tokens, CONTEXT_TOKENS, count, FOLLOWING_TOKENS, 0, head)
    return Task(
        text.name, "perplexity", "perplexity",
        f"{CONTEXT_TOKENS} tokens of running text; the next {FOLLOWING_TOKENS} are scored",
        [_problem(sample, start) for start in sample.starts],
    )  # fmt: skip


def _problem(sample: Sample, start: int) -> Problem:
    ids = sample.ids(start)
    follow = Follow(tuple(map(int, ids[CONTEXT_TOKENS:])))
    return Problem(f"{sample.name}+{start}", ids[:CONTEXT_TOKENS], (follow,))
