"""Multiple choice, as in QuALITY: which of four options is the likeliest answer about a story.

A story is longer than what a small model can use. A context is the part of it that has most words
in common with the question and its options: all options count alike, so the part does not tell
which of them is right. Options are scored by the likelihood of their words after the question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdn.bench.tasks.problems import Choose, Problem, Task, Writer, spread
from kdn.errors import FormatError

if TYPE_CHECKING:
    from kdn.bench.tasks.sources import Record

OPTION = re.compile(r"^\s*\(([A-H])\)\s*(.+)$", re.MULTILINE)
PART_CHARS, STEP_CHARS = 3000, 500
_WORD = re.compile(r"[a-z]{4,}")


def task(name: str, records: Sequence[Record], writer: Writer, most: int) -> Task:
    problems = []
    for record in records:
        for number, (question, answers) in enumerate(record.questions):
            text = part_about(question, record.context, PART_CHARS, STEP_CHARS)
            choose = _choose(question, answers[0], writer)
            problems.append(Problem(f"{record.name}.{number}", writer.context(text), (choose,)))
    chance = sum(
        1 / len(OPTION.findall(question)) for one in records for question, _ in one.questions
    )
    return Task(
        name, "choices", "options right",
        f"the {PART_CHARS} characters of the story with most words of the question and its options",
        spread(problems, most), chance=chance / len(problems),
    )  # fmt: skip


def _choose(question: str, answer: str, writer: Writer) -> Choose:
    options = dict(OPTION.findall(question))
    letter = re.match(r"\s*\(?([A-H])\b", answer)
    if len(options) < 2 or letter is None or letter.group(1) not in options:
        raise FormatError(f"expected options and the letter of one, found {question[:60]!r}")
    stem = OPTION.sub("", question).strip()
    row = writer.asked(stem)
    texts = tuple(writer.ids(text.strip()) for text in options.values())
    return Choose(row, texts, list(options).index(letter.group(1)))


def part_about(question: str, text: str, size: int, step: int) -> str:
    """The part of a text with most of the question's words."""
    wanted = set(_WORD.findall(question.lower()))
    starts = range(0, max(1, len(text) - size + 1), step)

    def common(start: int) -> int:
        return len(wanted & set(_WORD.findall(text[start : start + size].lower())))

    best = max(starts, key=common)
    return text[best : best + size]
