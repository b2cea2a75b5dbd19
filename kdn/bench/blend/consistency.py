"""Whether joining changes what a model chooses: multiple-choice questions about the same pieces, in
several orders.

Accuracy can look stable while single choices flip. So each choice is compared with that of the full
reading of the same order; and of each question it is told whether all orders led to one choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kdn.bench.blend.items import Story
from kdn.bench.blend.measure import Bench, Joiner
from kdn.bench.blend.methods import FIRST, FULL, HEADLESS, NOTHING, Method
from kdn.bench.blend.pieces import Prompt, ids_of
from kdn.errors import FormatError

NUM_PIECES = 8
PIECE_TOKENS = 192
MAX_OPTIONS = 8
SHARES = (0.0, 0.15)
"""Of tokens computed anew, in the methods that are asked."""
_OPTION = re.compile(r"^\s*\(([A-H])\)", re.MULTILINE)
ASKED = "{question}\n\nAnswer with the letter of the right option."


@dataclass(frozen=True)
class Choices:
    """A question, as what the model reads before it names a letter, and the letters' tokens."""

    question: tuple[int, ...]
    letters: tuple[int, ...]

    @classmethod
    def of(cls, question: str, tokenizer: Any) -> Choices:
        found = list(dict.fromkeys(_OPTION.findall(question)))[:MAX_OPTIONS]
        if len(found) < 2:
            raise FormatError("expected a question with options (A), (B) and so on")
        asked = Prompt.of_texts([], ASKED.format(question=question), tokenizer).question
        begun = [*asked.tolist(), *ids_of("(", tokenizer).tolist()]
        letters = tuple(int(ids_of(letter, tokenizer)[-1]) for letter in found)
        return cls(tuple(begun), letters)

    def chosen(self, logits: torch.Tensor) -> int:
        return int(logits[list(self.letters)].argmax())


@dataclass(frozen=True)
class Choice:
    question: str
    order: int
    method: Method
    codec: str
    chosen: int
    read: int
    """What the full reading of this order chose."""


def orders_of(count: int, num_orders: int) -> list[tuple[int, ...]]:
    """As it is, reversed, and shuffled, always the same ones."""
    rng = np.random.default_rng(0)
    orders = [tuple(range(count)), tuple(reversed(range(count)))]
    while len(orders) < num_orders:
        orders.append(tuple(int(i) for i in rng.permutation(count)))
    return orders[:num_orders]


def prompt_of(story: Story, tokenizer: Any) -> Prompt:
    """Its beginning, in pieces of equal length."""
    tokens = ids_of(story.text, tokenizer)[: NUM_PIECES * PIECE_TOKENS]
    count = max(1, len(tokens) // PIECE_TOKENS)
    empty = Prompt.of_texts([], "?", tokenizer)
    return Prompt(empty.head, tuple(np.array_split(tokens, count)), empty.question)


async def choices_of(
    bench: Bench, joiner: Joiner, story: Story, num_questions: int, num_orders: int
) -> list[Choice]:
    """All questions in all orders. Pieces are learned once; what was delivered of them serves every
    question."""
    prompt = prompt_of(story, bench.tokenizer)
    asked = [Choices.of(one, bench.tokenizer) for one in story.questions[:num_questions]]
    with bench.timings.of("consistency: learning"):
        await joiner.learn(prompt, headless=False)
    found: list[Choice] = []
    for number, order in enumerate(orders_of(len(prompt.pieces), num_orders)):
        with bench.timings.of("consistency"):
            found += await _in_order(bench, joiner, prompt.reordered(order), asked, story, number)
    await joiner.forget(prompt, headless=False)
    return found


async def _in_order(
    bench: Bench, joiner: Joiner, prompt: Prompt, asked: Sequence[Choices], story: Story, order: int
) -> list[Choice]:
    longest = max(len(one.question) for one in asked)
    desk = bench.desk(joiner.join(prompt), longest)

    def chosen(method: Method) -> list[int]:
        return [one.chosen(desk.ask(method, one.question).logits) for one in asked]

    desk.read_all()
    read = chosen(FULL)
    found = {FULL: read}
    methods = [one for one in bench.methods if _is_asked(one)]
    for kind in dict.fromkeys(one.delivered for one in methods):
        await joiner.deliver(prompt, kind, desk.given)
        found |= {one: chosen(one) for one in methods if one.delivered == kind}
    return [
        Choice(f"{story.name}/{number}", order, method, joiner.codec, one, read[number])
        for method, choices in found.items()
        for number, one in enumerate(choices)
    ]


def _is_asked(method: Method) -> bool:
    return method.delivered not in (NOTHING, FIRST, HEADLESS) and method.share in SHARES


def summary(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Of each method and codec: how often the choice is that of the full reading, and how often one
    question had one answer in every order."""
    groups: dict[tuple[Method, str], list[Choice]] = {}
    for one in choices:
        groups.setdefault((one.method, one.codec), []).append(one)
    return [
        {
            "method": method.name,
            "share": method.share,
            "codec": codec,
            "same_choice": float(np.mean([one.chosen == one.read for one in group])),
            "same_in_orders": float(np.mean(list(_same_in_orders(group)))),
            "choices": len(group),
        }
        for (method, codec), group in groups.items()
    ]


def _same_in_orders(group: Sequence[Choice]) -> Iterator[bool]:
    by_question: Mapping[str, set[int]] = {one.question: set() for one in group}
    for one in group:
        by_question[one.question].add(one.chosen)
    return (len(chosen) == 1 for chosen in by_question.values())
