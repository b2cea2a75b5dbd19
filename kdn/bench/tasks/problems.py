"""What a model is asked: a context that is read once, and questions about it.

There are three kinds of questions. `Ask` wants an answer in words, `Choose` the most likely of some
options, and `Follow` how likely the text is that really follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdn.cache.keys import TokenIds
from kdn.engines.prompts import CHAT, PLAIN, Prompts

Row = tuple[int, ...]
Score = Callable[[str, Sequence[str]], float]
"""How right an answer is, 0 to 1, beside those that are expected."""


@dataclass(frozen=True)
class Ask:
    row: Row
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Choose:
    row: Row
    options: tuple[Row, ...]
    right: int


@dataclass(frozen=True)
class Follow:
    row: Row


Question = Ask | Choose | Follow


@dataclass(frozen=True)
class Problem:
    name: str
    tokens: TokenIds
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Task:
    """Problems of one kind, from one file."""

    name: str
    kind: str
    metric: str
    cut: str
    """How contexts were made of what the file holds."""
    problems: Sequence[Problem] = field(repr=False)
    score: Score | None = None
    """Of `Ask`."""
    most_tokens: int = 0
    """Of an answer."""
    until: str = "\n"
    """Ends an answer: a small model goes on with something else."""
    chance: float | None = None
    """What a model that knows nothing scores; None: about 0."""

    @property
    def num_items(self) -> int:
        return sum(len(one.questions) for one in self.problems)


def spread(problems: Sequence[Problem], most: int) -> list[Problem]:
    """At most so many, from all parts of a file."""
    if len(problems) <= most:
        return list(problems)
    return [problems[int(at)] for at in np.linspace(0, len(problems) - 1, most)]


class Writer:
    """Texts as a model reads them: behind the head of a conversation, and questions by its chat
    template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._prompts = tokenizer, Prompts(tokenizer)
        self._style = CHAT if self._prompts.has_template else PLAIN

    def context(self, text: str) -> TokenIds:
        return np.asarray(self._prompts.learn(text)[0], dtype=np.uint32)

    def asked(self, question: str, begun: str = "") -> Row:
        """A question, and how the answer begins: a small model then says what is asked for instead
        of talking about it."""
        return (*self._prompts.ask(question, self._style), *self.ids(begun))

    def ids(self, text: str) -> Row:
        """Of a text that stands behind another."""
        found = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tuple(int(token) for token in found)

    def head(self) -> Row:
        """What every context begins with."""
        return tuple(self._prompts.first_tokens())
