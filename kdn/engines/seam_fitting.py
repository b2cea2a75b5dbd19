"""Fits seams: draws joins of pieces, reads them both ways, solves for the map, and measures it.

1. Some pieces are kept apart. Joins of the others are drawn at random and read twice, piece by
   piece and in full (`join_reading.py`); only sums over their tokens are kept (`seam_moments.py`).
2. Each layer gets the ridge that predicts best on every fourth join, left out for that; then all
   joins count. Why a map of low rank for each layer alone: docs/decisions/0008-blending.md.
3. Joins of the pieces kept apart are repaired, and questions about them answered, with some tokens
   recomputed and with none: the divergence from the full reading is what the seams promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kdn.blend.seams import Block, Seams
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.join_quality import AnswerProbe, AnswerQuality
from kdn.engines.join_reading import Drawn, columns_of, drawn_at_random, read_in_full, read_join
from kdn.engines.prompts import CHAT, PLAIN, Prompts
from kdn.engines.seam_moments import Moments, block_columns, fit_block, left_over, spans
from kdn.errors import UnsupportedError

LEAST_PIECES = 6
LEAST_TOKENS = 1024
LEAST_PIECE = 8
"""Tokens of a piece; shorter ones say nothing of seams."""
KEPT_APART = 0.3
"""Part of the pieces."""
ASKED = 0.5
"""Part of the examples, at most: figures of a few questions say little, and some passages are
enough to fit on."""
CHECKED_EVERY = 4
TOPIC_TOKENS = 8
"""Of a piece, to make up a question about it."""

OnProgress = Callable[[str, float, float], None]
"""Told what is being done, which part of all work is done, and how many seconds are left."""


@dataclass(frozen=True)
class SeamOptions:
    """What may be traded: quality against time and size."""

    joins: int = 16
    questions: int = 24
    """To measure with. They differ by as much as their mean: with fewer, chance decides."""
    made_up: int = 3
    """About each join that is measured, where there are no examples."""
    pieces: int = 16
    """In a join, at most."""
    join_tokens: int = 2048
    """In a join, at most. A piece is cut to a quarter of it."""
    rank: int = 64
    block_layers: int = 1
    ridges: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    shares: tuple[float, ...] = (0.05, 0.15, 0.3)
    """Of tokens to recompute, beside none."""
    seed: int = 0


DEFAULTS = SeamOptions()


@dataclass(frozen=True)
class Example:
    """A question, and the pieces (their own tokens) that it is asked about."""

    question: str
    pieces: Sequence[Sequence[int]]


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
) -> Seams:
    """Seams of `model` for joins of pieces like these (own tokens of each, without the head; None:
    the beginning of a conversation). Some of the examples measure them, the pieces of the others
    are fitted on, too; without examples, questions are made up. Deterministic for the same machine,
    pieces and options."""
    check_windows(spec)
    own = prompts.begin() if head is None else head
    work = _Fitting(model, prompts, spec, list(own), options)
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


class _Fitting:
    progress: _Progress

    def __init__(
        self, model: Any, prompts: Prompts, spec: ModelSpec, head: list[int], options: SeamOptions
    ) -> None:
        self.model, self.prompts, self.spec = model, prompts, spec
        self.head, self.options = head, options
        config = model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None) or 2 * options.join_tokens
        self.join_tokens = min(options.join_tokens, longest // 2)
        self.random = np.random.default_rng(options.seed)
        self.fitted_on: list[list[int]] = []
        self.kept_apart: list[list[int]] = []
        self.asked: list[Example] = []
        """Kept apart, too."""

    def take(self, pieces: Sequence[Sequence[int]], examples: Sequence[Example]) -> None:
        """Decide what is fitted on and what is kept apart; UnsupportedError if there is little."""
        shuffled = [examples[index] for index in self.random.permutation(len(examples))]
        apart = min(self.options.questions, round(ASKED * len(shuffled)))
        asked = [replace(one, pieces=self._parts(one.pieces)) for one in shuffled[:apart]]
        self.asked = [one for one in asked if len(one.pieces) > 1]
        others = [piece for one in shuffled[apart:] for piece in one.pieces]
        seen = {tuple(piece) for one in self.asked for piece in one.pieces}
        parts = [part for part in self._parts([*pieces, *others]) if tuple(part) not in seen]
        tokens = sum(map(len, parts))
        if len(parts) < LEAST_PIECES or tokens < LEAST_TOKENS:
            raise UnsupportedError(
                f"seams need at least {LEAST_TOKENS:,} tokens of text in {LEAST_PIECES} pieces "
                f"(long ones are cut into several), found {tokens:,} in {len(parts)}: give more"
            )
        order = [parts[index] for index in self.random.permutation(len(parts))]
        apart = 0 if self.asked else max(2, round(KEPT_APART * len(parts)))
        self.kept_apart, self.fitted_on = order[:apart], order[apart:]

    def _parts(self, pieces: Sequence[Sequence[int]]) -> list[list[int]]:
        """Long ones cut, each once, and no very short ones."""
        most = self.join_tokens // 4
        parts = [
            list(piece[at : at + most]) for piece in pieces for at in range(0, len(piece), most)
        ]
        unique = {tuple(part): part for part in parts if len(part) >= LEAST_PIECE}
        return list(unique.values())

    def run(self, on_progress: OnProgress) -> Seams:
        asked = 2 * len(self.asked) or self._made_up_joins * (1 + self.options.made_up)
        self.progress = _Progress(on_progress, self.options.joins + 1 + asked)
        try:
            blocks = tuple(self._fit())
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise UnsupportedError(f"this model's values cannot be fitted: {error}") from error
        self.progress.step("fitting")
        # As readers get them: what is measured is what was rounded.
        seams = Seams.from_bytes(Seams(self.spec.fingerprint, blocks).to_bytes())
        return self._measured(seams)

    # fitting

    def _fit(self) -> Iterator[Block]:
        for sums, checked in zip(*self._read_joins(), strict=True):
            every = sums.centred()
            weight = 1 / every.deviation  # all columns count alike, whatever their size
            yield fit_block(every, weight, self._ridge(sums, checked, weight), self.options.rank)

    def _ridge(self, sums: Moments, checked: Moments, weight: torch.Tensor) -> float:
        """The one that predicts best what is checked, fitted on the others."""
        if not checked.count:
            return self.options.ridges[-1]
        rest = sums.without(checked).centred()
        return min(
            self.options.ridges,
            key=lambda one: left_over(
                fit_block(rest, weight, one, self.options.rank), checked, weight
            ),
        )

    def _read_joins(self) -> tuple[list[Moments], list[Moments]]:
        """Sums of all joins by block, and of those that the ridge is chosen on."""
        every: list[Moments] = []
        checked: list[Moments] = []
        layers = spans(self.spec.num_layers, self.options.block_layers)
        for number in range(self.options.joins):
            drawn = self._draw(self.fitted_on)
            joined, full = self._read(drawn)
            for index, span in enumerate(layers):
                own = [block_columns(one, span, drawn.moved_from) for one in (joined, full)]
                if not number:
                    origin = own[0].mean(0)
                    every.append(Moments.zeros(span, origin))
                    checked.append(Moments.zeros(span, origin))
                every[index].add(*own)
                if number % CHECKED_EVERY == CHECKED_EVERY - 1:
                    checked[index].add(*own)
            self.progress.step("reading joins")
        return every, checked

    def _draw(self, pieces: Sequence[Sequence[int]]) -> Drawn:
        """At least two pieces, else there is nothing to repair."""
        count = int(self.random.integers(2, max(3, self.options.pieces + 1)))
        count = max(count, min(self.options.pieces, len(pieces)) // 2)
        return drawn_at_random(
            self.head, pieces, count, self.join_tokens + len(self.head), self.random
        )

    def _read(self, drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
        joined = columns_of(read_join(self.model, self.spec, drawn), self.spec)
        return joined, columns_of(read_in_full(self.model, drawn.tokens), self.spec)

    # measuring

    def _measured(self, seams: Seams) -> Seams:
        found: list[list[AnswerQuality]] = []
        for drawn, questions in self._joins_to_measure():
            joined = read_join(self.model, self.spec, drawn)
            full = read_in_full(self.model, drawn.tokens)
            repaired = repaired_join(seams, self.spec, joined, drawn.moved_from)
            self.progress.step("reading joins")
            for question in questions:
                probe = AnswerProbe(self.model, full, question)
                own = [probe.measure(joined), probe.measure(repaired)]
                found.append([*own, *self._recomputed(probe, repaired, drawn)])
                self.progress.step("measuring")
        joined_klds, *klds = [_mean(column) for column in zip(*found, strict=True)]
        shares = [0.0, *self.options.shares]  # without the latter, if it cannot be recomputed
        return replace(seams, expected=dict(zip(shares, klds, strict=False)), joined=joined_klds)

    def _recomputed(
        self, probe: AnswerProbe, repaired: KVCache, drawn: Drawn
    ) -> list[AnswerQuality]:
        """For each share; none if this model's attention cannot be looked into."""
        try:
            return probe.measure_recomputed(
                repaired, drawn.tokens, drawn.moved_from, self.options.shares
            )
        except UnsupportedError:
            return []

    @property
    def _made_up_joins(self) -> int:
        return -(-self.options.questions // self.options.made_up)

    def _joins_to_measure(self) -> Iterator[tuple[Drawn, list[list[int]]]]:
        """Joins of what was kept apart, with questions about each."""
        style = CHAT if self.prompts.has_template else PLAIN
        for one in self.asked:
            yield self._drawn_as_it_is(one), [self.prompts.ask(one.question, style)]
        for _ in range(0 if self.asked else self._made_up_joins):
            drawn = self._draw(self.kept_apart)
            topics = [self._topic(drawn) for _ in range(self.options.made_up)]
            yield drawn, [self.prompts.ask(f"What is said about {one}?", style) for one in topics]

    def _drawn_as_it_is(self, example: Example) -> Drawn:
        """In its own order, as many pieces as fit."""
        room = self.join_tokens
        ends = np.cumsum([len(piece) for piece in example.pieces])
        count = max(2, int((ends <= room).sum()))
        return Drawn(self.head, example.pieces[:count])

    def _topic(self, drawn: Drawn) -> str:
        """Some words of some piece."""
        piece = drawn.pieces[int(self.random.integers(len(drawn.pieces)))]
        start = int(self.random.integers(max(1, len(piece) - TOPIC_TOKENS)))
        return self.prompts.text(piece[start : start + TOPIC_TOKENS]).strip()


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
