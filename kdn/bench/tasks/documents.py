"""Questions with short answers over documents, and over passages: F1 of the answer's words.

A model of 135M parameters does not answer such questions from a text: shown three examples, it gave
short answers, out of what it knows anyway, with an F1 of .07 on 14 Natural Questions. What it can
do is to recall what it read. So a question is followed by the words that lead up to the answer in
the text, and the model goes on from there.

Of a document, a context is the part around the answer, at the place that has most words in common
with the question. Questions whose answer does not stand in the text are left out, and so are long
answers. Of passages, those that hold the answer are kept, with a few others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdn.bench.blend.items import Item
from kdn.bench.blend.scoring import f1, words_of
from kdn.bench.tasks.problems import Ask, Problem, Task, Writer, spread
from kdn.errors import FormatError

if TYPE_CHECKING:
    from kdn.bench.tasks.sources import Record

PART_CHARS = 1600
NEAR_CHARS = 250
"""On each side of an answer, where words of the question are looked for."""
LEAD_WORDS = 8
ANSWER_CHARS = 60
ANSWER_TOKENS = 12
_TAG = re.compile(r"<[^<>]{1,200}>")
_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"\w{3,}")


@dataclass(frozen=True)
class Place:
    """Where an answer stands in a text."""

    text: str
    start: int
    end: int

    @property
    def answer(self) -> str:
        return self.text[self.start : self.end]

    @property
    def lead(self) -> list[str]:
        """The words before it."""
        return self.text[: self.start].split()[-LEAD_WORDS:]

    def common(self, words: set[str]) -> int:
        """How many of some words are near."""
        near = self.text[max(0, self.start - NEAR_CHARS) : self.end + NEAR_CHARS]
        return len(words & set(_WORD.findall(near.lower())))

    def part(self, size: int) -> str:
        """So many characters of the text, with the answer in their middle."""
        first = max(0, min((self.start + self.end - size) // 2, len(self.text) - size))
        return self.text[first : first + size]


def task(name: str, records: Sequence[Record], writer: Writer, most: int) -> Task:
    problems: list[Problem] = []
    for record in records:
        text = _SPACE.sub(" ", _TAG.sub(" ", record.context))
        for number, (question, answers) in enumerate(record.questions):
            place = place_of(text, question, answers)
            if place is not None:
                part, own = place.part(PART_CHARS), f"{record.name}.{number}"
                problems.append(_problem(own, part, question, place, writer))
    return _task(name, "documents", f"{PART_CHARS} characters around the answer", problems, most)


def over_passages(name: str, items: Sequence[Item], writer: Writer, most: int) -> Task:
    problems = []
    for one in items:
        text = "\n\n".join(one.pieces)
        place = place_of(text, one.question, one.answers)
        if place is not None:
            problems.append(_problem(one.name, text, one.question, place, writer))
    cut = "the passages that hold the answer, with others up to four"
    return _task(name, "passages", cut, problems, most)


def _task(name: str, kind: str, cut: str, problems: Sequence[Problem], most: int) -> Task:
    if not problems:
        raise FormatError(f"{name}: expected questions whose answers stand in their text")
    cut += (
        f"; of answers of at most {ANSWER_CHARS} characters, the {LEAD_WORDS} words before them "
        "are told with the question"
    )
    return Task(name, kind, "F1", cut, spread(problems, most), begun_f1, ANSWER_TOKENS)


def _problem(name: str, text: str, question: str, place: Place, writer: Writer) -> Problem:
    row = writer.asked(question, " ".join(place.lead))
    return Problem(name, writer.context(text), (Ask(row, (place.answer,)),))


def place_of(text: str, question: str, answers: Sequence[str]) -> Place | None:
    """Where an answer stands near the question's words; None if it stands nowhere."""
    wanted = set(_WORD.findall(question.lower()))
    places = [
        Place(text, *found.span())
        for answer in answers
        if len(answer) <= ANSWER_CHARS
        for found in re.finditer(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text)
    ]
    led = [place for place in places if len(place.lead) == LEAD_WORDS]
    return max(led, key=lambda place: place.common(wanted), default=None)


def begun_f1(answer: str, expected: Sequence[str]) -> float:
    """Of as many words as are expected: what follows is more of the text."""
    words = words_of(answer)
    return max(f1(" ".join(words[: len(words_of(one))]), [one]) for one in expected)
