"""Answers questions over pieces in every way, and holds each against one reading of everything."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from kdn.bench.blend.answering import Together
from kdn.bench.blend.desk import Asked, Desk
from kdn.bench.blend.methods import FULL, HEADLESS, NOTHING, Method
from kdn.bench.blend.pieces import Prompt
from kdn.bench.blend.rows import Outcome
from kdn.bench.blend.scoring import ANSWER_TOKENS, Reading, Score, f1, score, until_end
from kdn.blend.pieces import Join
from kdn.cache.spec import ModelSpec
from kdn.engines.growing import Room


class Delivery(NamedTuple):
    size_bytes: int
    seconds: float


class Joiner(Protocol):
    """Learns pieces, and delivers them joined, with one codec."""

    codec: str

    async def learn(self, prompt: Prompt, headless: bool) -> None:
        """Each of the prompt's pieces by itself, behind the head; `headless`: without it, too."""
        ...

    async def forget(self, prompt: Prompt, headless: bool) -> None:
        """The same again."""
        ...

    def join(self, prompt: Prompt) -> Join: ...

    async def deliver(self, prompt: Prompt, what: str, room: Room) -> Delivery:
        """One of the kinds that `methods.py` names, into the first tokens of `room`."""
        ...


class Timings:
    """Where the seconds of a run went."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began_s


class Truth(NamedTuple):
    """What every way is held against."""

    reading: Reading
    said: str
    gold: Sequence[str]


class _Found(NamedTuple):
    """Of one method."""

    method: Method
    delivery: Delivery
    asked: Asked
    scored: Score


class Bench:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: ModelSpec,
        joiners: Sequence[Joiner],
        methods: Sequence[Method],
        timings: Timings | None = None,
    ) -> None:
        self.model, self.tokenizer, self.spec = model, tokenizer, spec
        self.joiners, self.methods = joiners, methods
        self.timings = Timings() if timings is None else timings

    def desk(self, join: Join, num_asked: int) -> Desk:
        return Desk(self.model, self.spec, join, num_asked)

    async def measure(
        self,
        prompt: Prompt,
        gold: Sequence[str],
        every: bool = True,
        orders: Sequence[Sequence[int]] = (),
    ) -> list[Outcome]:
        """One question, in all ways; without those that are measured seldom, unless `every`. Its
        pieces are learned once, and joined in each of these orders; none: in their own."""
        methods = [one for one in self.methods if every or not one.seldom]
        headless = any(one.delivered == HEADLESS for one in methods)
        prompts = [prompt.reordered(order) for order in orders] or [prompt]
        truths: list[tuple[Truth, float]] = []
        outcomes: list[Outcome] = []
        for joiner in self.joiners:
            with self.timings.of(f"learning, {joiner.codec}"):
                await joiner.learn(prompt, headless)
            for number, asked in enumerate(prompts):
                desk = self.desk(joiner.join(asked), len(asked.question))
                if len(truths) == number:
                    with self.timings.of("full reading"):
                        truths.append(self._truth(desk, asked, gold))
                truth, full_s = truths[number]
                outcomes.append(self._full(joiner.codec, asked, truth, full_s))
                outcomes += await self._joined(joiner, desk, asked, truth, methods)
            await joiner.forget(prompt, headless)
        return outcomes

    def _truth(self, desk: Desk, prompt: Prompt, gold: Sequence[str]) -> tuple[Truth, float]:
        """And how long the full reading took to its first token."""
        began_s = time.perf_counter()
        desk.read_all()
        read_s = time.perf_counter() - began_s
        asked = desk.ask(FULL, prompt.question)
        reading = Reading.of(self.model, asked.logits, asked.past)
        said = self._text(until_end(self.model, reading.answer))
        return Truth(reading, said, gold), read_s + asked.seconds

    def _full(self, codec: str, prompt: Prompt, truth: Truth, full_s: float) -> Outcome:
        computed = len(prompt.tokens) + len(prompt.question)
        own = f1(truth.said, truth.gold)
        return Outcome(FULL, codec, 0.0, 0.0, True, 1.0, own, full_s, computed, 0)

    async def _joined(
        self,
        joiner: Joiner,
        desk: Desk,
        prompt: Prompt,
        truth: Truth,
        methods: Sequence[Method],
    ) -> list[Outcome]:
        together = Together(
            self.model, self.spec, len(methods),
            len(prompt.tokens) + len(prompt.question) + ANSWER_TOKENS, ANSWER_TOKENS,
        )  # fmt: skip
        found: list[_Found] = []
        for kind in dict.fromkeys(method.delivered for method in methods):
            if kind == NOTHING:
                continue
            with self.timings.of(f"delivering, {joiner.codec}"):
                delivery = await joiner.deliver(prompt, kind, desk.given)
            for method in (one for one in methods if one.delivered == kind):
                with self.timings.of(method.label):
                    asked = desk.ask(method, prompt.question)
                with self.timings.of("scoring"):
                    scored = score(self.model, truth.reading, asked.logits, asked.past)
                    row = together.add(asked.past, scored.begun)
                assert row == len(found)
                found.append(_Found(method, delivery, asked, scored))
        with self.timings.of("answering"):
            answers = together.finish()
        return [
            self._outcome(one, joiner.codec, truth, answer)
            for one, answer in zip(found, answers, strict=True)
        ]

    def _outcome(self, found: _Found, codec: str, truth: Truth, answer: Sequence[int]) -> Outcome:
        method, delivery, asked, scored = found
        text = self._text(until_end(self.model, answer))
        return Outcome(
            method, codec, scored.kld_first, scored.kld, scored.same_first,
            f1(text, [truth.said]), f1(text, truth.gold), delivery.seconds + asked.seconds,
            asked.computed_tokens, delivery.size_bytes,
        )  # fmt: skip

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
