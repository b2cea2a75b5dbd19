"""One context in all ways: read once, encoded and decoded by each codec, then asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdn.bench.blend.scoring import words_of
from kdn.bench.tasks.problems import Ask, Choose, Follow, Problem, Task
from kdn.bench.tasks.side_by_side import answers, log_likelihoods
from kdn.bench.tasks.ways import EXACT, Ways
from kdn.cache.keys import TAIL_MULTIPLE
from kdn.cache.tensors import KVCache
from kdn.engines.generating import stop_tokens
from kdn.engines.reading import read_whole

MAX_ROW_TOKENS = 1024
"""Of one pass: a model has a logit of each of them for every word that it knows."""
FP16_BYTES = 2


@dataclass(frozen=True)
class Reply:
    """What came of one question."""

    shown: Any
    """The answer, the number of the chosen option, or the most likely tokens."""
    score: float
    tokens: tuple[int, ...] = ()
    """Of an answer in words."""


@dataclass(frozen=True)
class WayResult:
    way: str
    size_bytes: int
    scores: tuple[float, ...]
    agreements: tuple[float, ...]
    """With what the exact cache led to, of each question: 1 where it is the same."""
    shown: tuple[Any, ...]


class Bench:
    """A model, its tokenizer, and the ways to measure."""

    def __init__(self, model: Any, tokenizer: Any, ways: Ways) -> None:
        self.model, self.tokenizer, self.ways = model, tokenizer, ways
        self._stops = stop_tokens(model)

    def measure(
        self, task: Task, problem: Problem, done: Callable[[], None] = lambda: None
    ) -> Iterator[WayResult]:
        """`done` is called after each way."""
        held = len(problem.tokens) // TAIL_MULTIPLE * TAIL_MULTIPLE
        tokens, rest = problem.tokens[:held], tuple(map(int, problem.tokens[held:]))
        made = read_whole(self.model, tokens)
        cache = KVCache(made.keys.cpu(), made.values.cpu())
        desk = _Desk(self, task, problem, rest)
        exact = desk.replies(cache, None)
        size = FP16_BYTES * 2 * cache.keys.numel()
        yield _result(EXACT, size, exact, exact)
        done()
        for way, size_bytes, arrived in self.ways.arrivals(tokens, cache):
            yield _result(way, size_bytes, desk.replies(arrived, exact), exact)
            done()


@dataclass(frozen=True)
class _Desk:
    """Asks all questions about one context. What the last tokens of a context lack to a chunk, a
    client's model reads itself: it stands before each question."""

    bench: Bench
    task: Task
    problem: Problem
    rest: tuple[int, ...]

    def replies(self, cache: KVCache, exact: Sequence[Reply] | None) -> list[Reply]:
        drafts = [()] * len(self.problem.questions) if exact is None else [r.tokens for r in exact]
        found: list[Reply] = []
        for part in _batches([self._num_tokens(one) for one in self.problem.questions]):
            asked = self.problem.questions[part]
            found += self._answered(cache, asked, drafts[part])
        return found

    def _answered(
        self, cache: KVCache, asked: Sequence[Ask | Choose | Follow], drafts: Sequence[Any]
    ) -> list[Reply]:
        in_words = [one for one in asked if isinstance(one, Ask)]
        if in_words:
            assert len(in_words) == len(asked), "questions about a context are of one kind"
            return self._in_words(cache, in_words, drafts)
        scored = [(one, self._rows(one)) for one in asked if not isinstance(one, Ask)]
        rows = iter(log_likelihoods(self.bench.model, cache, [r for _, own in scored for r in own]))
        return [_likeliest(one, [next(rows) for _ in own]) for one, own in scored]

    def _in_words(
        self, cache: KVCache, asked: Sequence[Ask], drafts: Sequence[Sequence[int]]
    ) -> list[Reply]:
        assert self.task.score is not None, "a task with answers in words scores them"
        rows = [(*self.rest, *one.row) for one in asked]
        found = answers(self.bench.model, cache, rows, self.task.most_tokens, drafts)
        replies = []
        for one, tokens in zip(asked, found, strict=True):
            text = str(self.bench.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
            text = text.partition(self.task.until)[0]
            replies.append(Reply(text, self.task.score(text, one.expected), tuple(tokens)))
        return replies

    def _rows(self, one: Choose | Follow) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """What is given, and what is scored after it."""
        if isinstance(one, Choose):
            return [((*self.rest, *one.row), option) for option in one.options]
        return [((*self.rest, one.row[0]), one.row[1:])]

    def _num_tokens(self, one: Ask | Choose | Follow) -> int:
        if isinstance(one, Ask):
            return len(self.rest) + len(one.row) + self.task.most_tokens
        return sum(len(given) + len(then) for given, then in self._rows(one))


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Consecutive ones, as many as one pass may have."""
    start, total = 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > MAX_ROW_TOKENS:
            yield slice(start, number)
            start, total = number, 0
        total += size
    yield slice(start, len(sizes))


def _likeliest(one: Choose | Follow, rows: Sequence[Any]) -> Reply:
    """Of options the one whose tokens are likeliest in the mean: long ones are not worse."""
    if isinstance(one, Choose):
        chosen = int(np.argmax([float(likely.mean()) for likely, _ in rows]))
        return Reply(chosen, float(chosen == one.right))
    ((likely, best),) = rows
    return Reply(best.numpy(), float(-likely.mean()))


def _result(
    way: str, size_bytes: int, replies: Sequence[Reply], exact: Sequence[Reply]
) -> WayResult:
    agreements = [_agreement(a.shown, b.shown) for a, b in zip(replies, exact, strict=True)]
    shown = [one.shown for one in replies if not isinstance(one.shown, np.ndarray)]
    return WayResult(
        way, size_bytes, tuple(one.score for one in replies), tuple(agreements), tuple(shown)
    )


def _agreement(one: Any, other: Any) -> float:
    """Of answers whether they are the same words, of choices whether they are the same, of tokens
    which part of them is."""
    if isinstance(one, str):
        return float(words_of(one) == words_of(other))
    return float(np.mean(np.asarray(one) == np.asarray(other)))
