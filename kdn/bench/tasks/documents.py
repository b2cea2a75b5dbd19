"""Questions with short answers over documents, and over passages: F1 of the answer's words.

Of a document, a context is the part around the answer, at the place that has most words in common
with the question. Questions whose answer does not stand in the text are left out, and so are long
answers: a small model does not sum up what it reads. Of passages, those that hold the answer are
kept, with a few others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdn.bench.blend.items import Item
from kdn.bench.blend.scoring import f1
from kdn.bench.tasks.problems import Ask, Problem, Task, Writer, spread
from kdn.errors import FormatError

if TYPE_CHECKING:
    from kdn.bench.tasks.sources import Record

PART_CHARS = 800
NEAR_CHARS = 250
"""On each side of an answer, where words of the question are looked for."""
ANSWER_CHARS = 60
ANSWER_TOKENS = 12
ASKED = (
    "Question: who wrote the play hamlet?\nAnswer: William Shakespeare\n\n"
    "Question: when did the second world war end?\nAnswer: 1945\n\n"
    "Question: where is the eiffel tower?\nAnswer: Paris\n\n"
    "Question: {question}?\nAnswer:"
)
"""Asked in a chat, a model of 135M parameters talks about the question. Shown how it is done, it
answers in a word or two."""
INSTRUCTION = "Answer with a number. "
"""What some files put before a question."""
_TAG = re.compile(r"<[^<>]{1,200}>")
_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"\w{3,}")


def task(name: str, records: Sequence[Record], writer: Writer, most: int) -> Task:
    problems: list[Problem] = []
    for record in records:
        text = _SPACE.sub(" ", _TAG.sub(" ", record.context))
        for number, (question, answers) in enumerate(record.questions):
            part = part_around(text, question, answers)
            if part is not None:
                own = f"{record.name}.{number}"
                problems.append(_problem(own, part, question, answers, writer))
    if not problems:
        raise FormatError(f"{name}: expected questions whose answers stand in their documents")
    return Task(
        name, "documents", "F1",
        f"{PART_CHARS} characters of the document around the answer, tags removed; answers of at "
        f"most {ANSWER_CHARS} characters that stand in the text",
        spread(problems, most), f1, ANSWER_TOKENS,
    )  # fmt: skip


def over_passages(name: str, items: Sequence[Item], writer: Writer, most: int) -> Task:
    problems = [
        _problem(one.name, "\n\n".join(one.pieces), one.question, one.answers, writer)
        for one in items
    ]
    return Task(
        name, "passages", "F1", "the passages that hold the answer, up to four in all",
        spread(problems, most), f1, ANSWER_TOKENS,
    )  # fmt: skip


def _problem(
    name: str, text: str, question: str, answers: Sequence[str], writer: Writer
) -> Problem:
    row = writer.ids(ASKED.format(question=question.removeprefix(INSTRUCTION).rstrip("? ")))
    return Problem(name, writer.context(text), (Ask(row, tuple(answers)),))


def part_around(text: str, question: str, answers: Sequence[str]) -> str | None:
    """PART_CHARS of a text with an answer in it; None if there is none."""
    places = [
        (found.start(), found.end())
        for answer in answers
        if len(answer) <= ANSWER_CHARS
        for found in re.finditer(rf"\b{re.escape(answer.strip())}\b", text)
    ]
    if not places:
        return None
    wanted = set(_WORD.findall(question.lower()))

    def common(place: tuple[int, int]) -> int:
        near = text[max(0, place[0] - NEAR_CHARS) : place[1] + NEAR_CHARS]
        return len(wanted & set(_WORD.findall(near.lower())))

    start, end = max(places, key=common)
    first = max(0, min((start + end - PART_CHARS) // 2, len(text) - PART_CHARS))
    return text[first : first + PART_CHARS]
