"""Fits seams: draws joins of pieces, reads them both ways, solves for the map, and measures it.

1. Pieces and questions are divided into two halves (`seam_halves.py`).
2. Joins of the first half are drawn at random and read twice, piece by piece and in full
   (`join_reading.py`). Only sums over their tokens are kept (`seam_moments.py`). From them follows
   a first map: for each layer alone, of low rank, with the ridge that predicts best on every fourth
   join, left out for that. Why: docs/decisions/0008-blending.md.
3. Joins that questions of the second half are asked about are read both ways, repaired by that map,
   and the questions answered, with some tokens recomputed and with none. What was read counts for a
   second map, which measures the questions of the first half likewise.
4. The seams follow from all sums. What they promise is what these two maps of half the sums left:
   the mean divergence from the full reading, and how sure that mean is (`uncertainty.py`).

An answer's divergence is chance for the most part: asked again with the same pieces in another
order, a question differs from itself as much as from others. So each is asked in several orders.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kdn.blend.seams import Intervals, Seams
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.join_quality import AnswerProbe, AnswerQuality
from kdn.engines.join_reading import (
    Drawn,
    columns_of,
    drawn_at_random,
    drawn_orders,
    put_together,
    read_apart,
    read_in_full,
    read_join,
)
from kdn.engines.prompts import CHAT, PLAIN, Prompts
from kdn.engines.seam_halves import Example, Half, Part, in_halves
from kdn.engines.seam_moments import JoinSums, spans
from kdn.engines.uncertainty import mean_interval
from kdn.errors import UnsupportedError

__all__ = ["DEFAULTS", "Example", "SeamOptions", "fit_seams"]

LEAST_PIECE = 8
"""Tokens of a piece; shorter ones say nothing of seams."""
TOPIC_TOKENS = 8
"""Of a piece, to make up a question about it."""
ANSWERS = {"cpu": 40, "cuda": 128}
"""To measure with: what they cost on two cores is most of fitting, on a GPU it is little."""

OnProgress = Callable[[str, float, float], None]
"""Told what is being done, which part of all work is done, and how many seconds are left."""
Klds = list[tuple[float, float]]
"""At the first token and over all: joined, repaired, and repaired with each share recomputed."""
OnMeasured = Callable[[Sequence[Sequence[int]], Sequence[str], Klds], None]
"""Told the pieces of one join, the questions about it, and what they left: what the report is the
mean of."""


@dataclass(frozen=True)
class SeamOptions:
    """What may be traded: quality against time and size."""

    joins: int = 16
    """To fit on, at least. Those that are measured count, too."""
    answers: int | None = None
    """To measure with, if there are so many; None: ANSWERS, by the model's device."""
    questions: int = 48
    """Among them: more are not asked."""
    orders: int = 6
    """Of the pieces of a question, at most."""
    made_up: int = 2
    """Questions about each join that is measured, where there are no examples."""
    pieces: int = 16
    """In a join, at most."""
    join_tokens: int = 2048
    """In a join that is drawn, at most. A text is cut to a quarter of it, a passage that a question
    is about to half of it: both can be drawn with others."""
    asked_tokens: int = 4096
    """Of the passages of a question, at most: it is measured as it will be asked."""
    rank: int = 64
    block_layers: int = 1
    ridges: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    shares: tuple[float, ...] = (0.05, 0.15, 0.3)
    """Of tokens to recompute, beside none."""
    seed: int = 0


DEFAULTS = SeamOptions()


def fit_seams(
    model: Any,
    prompts: Prompts,
    spec: ModelSpec,
    pieces: Sequence[Sequence[int]],
    *,
    head: Sequence[int] | None = None,
    examples: Sequence[Example] = (),
    options: SeamOptions = DEFAULTS,
    on_progress: OnProgress = lambda what, done, left_s: None,
    on_measured: OnMeasured = lambda pieces, questions, klds: None,
) -> Seams:
    """Seams of `model` for joins of pieces like these (own tokens of each, without the head; None:
    the beginning of a conversation) and like those of the examples, which measure them; without
    examples, questions are made up. Deterministic for the same machine, pieces and options."""
    check_windows(spec)
    own = prompts.begin() if head is None else head
    work = _Fitting(model, prompts, spec, list(own), options, on_measured)
    work.take(pieces, examples)
    return work.run(on_progress)


def check_windows(spec: ModelSpec) -> None:
    if any(window is not None for window in spec.windows):
        raise UnsupportedError(
            "seams need every token of every layer: this model's layers have sliding windows"
        )


@dataclass
class _Progress:
    """Time left: what is left of the work takes as long as what was done."""

    tell: OnProgress
    total: int
    done: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def step(self, what: str) -> None:
        self.done += 1
        passed_s = time.monotonic() - self.began_s
        self.tell(what, self.done / self.total, passed_s * (self.total - self.done) / self.done)


@dataclass(frozen=True)
class _Asked:
    """Pieces, in some orders, and questions about them."""

    pieces: Sequence[Sequence[int]]
    orders: Sequence[Sequence[int]]
    questions: Sequence[str]


class _Fitting:
    progress: _Progress
    halves: tuple[Half, Half]

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        spec: ModelSpec,
        head: list[int],
        options: SeamOptions,
        on_measured: OnMeasured = lambda pieces, questions, klds: None,
    ) -> None:
        self.model, self.prompts, self.spec = model, prompts, spec
        self.head, self.options, self.on_measured = head, options, on_measured
        config = model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None) or 2 * options.asked_tokens
        self.join_tokens = min(options.join_tokens, longest // 2)
        self.asked_tokens = max(self.join_tokens, min(options.asked_tokens, longest // 2))
        self.answers = options.answers or ANSWERS.get(model.device.type, ANSWERS["cuda"])
        self.random = np.random.default_rng(options.seed)
        self.blocks = spans(spec.num_layers, options.block_layers)

    def take(self, pieces: Sequence[Sequence[int]], examples: Sequence[Example]) -> None:
        """Divide what there is into halves; UnsupportedError if there is little."""
        most = min(self.options.questions, self.answers)
        order = self.random.permutation(len(examples))
        parted = (replace(examples[i], pieces=self._as_many_as_fit(examples[i])) for i in order)
        asked = [one for one in parted if len(one.pieces) > 1][:most]
        self.num_examples, self.has_texts = len(asked), bool(asked and pieces)
        passages = dict.fromkeys(tuple(piece) for one in examples for piece in one.pieces)
        texts = [piece for piece in pieces if tuple(piece) not in passages]
        parts = [*self._parts(texts, self.join_tokens // 4), *self._passages([*passages])]
        self.halves = in_halves(parts, asked, self.random)

    def _passages(self, pieces: Sequence[Sequence[int]]) -> list[Part]:
        return self._parts(pieces, self.join_tokens // 2)

    def _parts(self, pieces: Sequence[Sequence[int]], most: int) -> list[Part]:
        """Long ones cut, each once, and no very short ones."""
        parts = (
            tuple(piece[at : at + most]) for piece in pieces for at in range(0, len(piece), most)
        )
        return list(dict.fromkeys(part for part in parts if len(part) >= LEAST_PIECE))

    def _as_many_as_fit(self, example: Example) -> list[Part]:
        """All of its pieces, or the first ones."""
        parts = self._passages(example.pieces)
        ends = np.cumsum([len(part) for part in parts])
        return parts[: max(2, int((ends <= self.asked_tokens).sum()))]

    def run(self, on_progress: OnProgress) -> Seams:
        first, second = ([*self._asked(half)] for half in self.halves)
        self.progress = _Progress(on_progress, self._num_steps(first, second))
        try:
            sums = JoinSums(self.blocks)
            self._read_some(self.halves[0], sums, self.num_read)
            by_first, others = self._solved(sums), sums.empty()
            found = [self._measured(one, self.halves[1], by_first, others) for one in second]
            self._read_some(self.halves[1], others, self._num_more(others.num_joins))
            by_second = self._solved(others)
            sums.merge(others)
            found += [self._measured(one, self.halves[0], by_second, sums) for one in first]
            return _with_report(self._solved(sums), found, self.options)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise UnsupportedError(f"this model's values cannot be fitted: {error}") from error

    @property
    def num_read(self) -> int:
        """Joins of each half, at least."""
        return max(1, self.options.joins // 2)

    def _num_more(self, num_joins: int) -> int:
        """What is drawn at random in the second half, when so many joins were measured there: what
        is lacking. Questions say nothing of texts that nobody asks about."""
        return self.num_read if self.has_texts else max(0, self.num_read - num_joins)

    def _num_steps(self, first: Sequence[_Asked], second: Sequence[_Asked]) -> int:
        own = sum(self.halves[1].is_own(one.pieces) for one in second)
        measured = sum(len(one.orders) * (1 + len(one.questions)) for one in [*first, *second])
        return self.num_read + self._num_more(own) + measured + 3

    # fitting

    def _read_some(self, half: Half, sums: JoinSums, count: int) -> None:
        """Joins of its pieces, drawn at random."""
        for _ in range(count):
            drawn = Drawn(self.head, self._draw(half))
            self._add(sums, drawn, read_join(self.model, self.spec, drawn), self._full(drawn))
            self.progress.step("reading joins")

    def _add(
        self, sums: JoinSums, drawn: Drawn, joined: KVCache, full: KVCache, again: bool = False
    ) -> None:
        columns = columns_of(joined, self.spec), columns_of(full, self.spec)
        sums.add(*columns, drawn.moved_from, again)

    def _full(self, drawn: Drawn) -> KVCache:
        return read_in_full(self.model, drawn.tokens)

    def _solved(self, sums: JoinSums) -> Seams:
        """As readers get them: what is measured is what was rounded."""
        blocks = tuple(sums.solved(self.options.ridges, self.options.rank))
        self.progress.step("fitting")
        return Seams.from_bytes(Seams(self.spec.fingerprint, blocks).to_bytes())

    def _draw(self, half: Half) -> Sequence[Part]:
        """At least two pieces, else there is nothing to repair."""
        count = int(self.random.integers(2, max(3, self.options.pieces + 1)))
        count = max(count, min(self.options.pieces, len(half.pieces)) // 2)
        return drawn_at_random(half.pieces, count, self.join_tokens, self.random)

    # measuring

    def _asked(self, half: Half) -> Iterator[_Asked]:
        """Its examples; where there are none at all, questions that are made up."""
        if not self.num_examples:
            yield from self._made_up(half)
        for number, one in enumerate(half.examples):
            least, more = divmod(self.answers, self.num_examples)
            count = least + (2 * number < more)  # of each half the first few
            orders = drawn_orders(len(one.pieces), min(count, self.options.orders), self.random)
            yield _Asked(one.pieces, orders, [one.question])

    def _made_up(self, half: Half) -> Iterator[_Asked]:
        count = min(self.answers, self.options.questions) / 2  # the other half has as many
        for _ in range(math.ceil(count / self.options.made_up)):
            pieces = self._draw(half)
            topics = (self._topic(pieces) for _ in range(self.options.made_up))
            questions = [f"What is said about {one}?" for one in topics]
            yield _Asked(pieces, [range(len(pieces))], questions)

    def _topic(self, pieces: Sequence[Part]) -> str:
        """Some words of some piece."""
        piece = pieces[int(self.random.integers(len(pieces)))]
        start = int(self.random.integers(max(1, len(piece) - TOPIC_TOKENS)))
        return self.prompts.text(piece[start : start + TOPIC_TOKENS]).strip()

    def _measured(self, asked: _Asked, half: Half, seams: Seams, sums: JoinSums) -> Klds:
        """Means over the orders and the questions; `seams` have seen nothing of it. What is read
        is added to the sums of its half."""
        apart = read_apart(self.model, self.head, asked.pieces)
        drawn = [Drawn(self.head, [asked.pieces[i] for i in order]) for order in asked.orders]
        fulls = [self._full(one) for one in drawn]
        style = CHAT if self.prompts.has_template else PLAIN
        probes = [
            AnswerProbe(self.model, fulls, self.prompts.ask(question, style))
            for question in asked.questions
        ]
        is_own, found = half.is_own(asked.pieces), []
        for row, (one, order) in enumerate(zip(drawn, asked.orders, strict=True)):
            joined = put_together(self.spec, [apart[i] for i in order], len(self.head))
            if is_own:
                self._add(sums, one, joined, fulls[row], again=row > 0)
            repaired = repaired_join(seams, self.spec, joined, one.moved_from)
            self.progress.step("reading joins")
            for probe in probes:
                answers = probe.measure(row, [joined, repaired])
                found.append([*answers, *self._recomputed(probe, row, repaired, one)])
                self.progress.step("measuring")
        klds = [_mean(column) for column in zip(*found, strict=True)]
        self.on_measured(asked.pieces, asked.questions, klds)
        return klds

    def _recomputed(
        self, probe: AnswerProbe, row: int, repaired: KVCache, drawn: Drawn
    ) -> list[AnswerQuality]:
        """For each share; none if this model's attention cannot be looked into."""
        shares = self.options.shares
        try:
            return probe.measure_recomputed(row, repaired, drawn.tokens, drawn.moved_from, shares)
        except UnsupportedError:
            return []


def _with_report(seams: Seams, found: Sequence[Klds], options: SeamOptions) -> Seams:
    """`found`: of each join that questions were asked about. Answers about one join are alike, so
    they count as one."""
    every = np.array(found).transpose(1, 2, 0)
    means = [(float(first), float(mean)) for first, mean in every.mean(2)]
    intervals = [_intervals(*both) for both in every]
    shares = [0.0, *options.shares][: len(means) - 1]  # only 0 if nothing can be recomputed
    return replace(
        seams,
        expected=dict(zip(shares, means[1:], strict=True)),
        joined=means[0],
        intervals={
            share: own for share, own in zip(shares, intervals[1:], strict=True) if own is not None
        },
        joined_intervals=intervals[0],
    )


def _intervals(first: Sequence[float], mean: Sequence[float]) -> Intervals | None:
    one, other = mean_interval(first), mean_interval(mean)
    return None if one is None or other is None else (one, other)


def repaired_join(seams: Seams, spec: ModelSpec, joined: KVCache, moved_from: int) -> KVCache:
    """All pieces but the first, as the seams repair them."""
    keys, values = (side.float() for side in (joined.keys, joined.values))
    cache = KVCache(keys, values)
    fixed = seams.repair(cache.slice(moved_from, cache.end), spec)
    keys = torch.cat([keys[:, :moved_from], fixed.keys], 1)
    return KVCache(keys, torch.cat([values[:, :moved_from], fixed.values], 1))


def _mean(answers: Sequence[AnswerQuality]) -> tuple[float, float]:
    both = np.mean([(one.first, one.mean) for one in answers], axis=0)
    return float(both[0]), float(both[1])
