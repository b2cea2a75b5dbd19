"""LongEval's lines: a record of names and numbers, and which number belongs to a name.

The file's own form ("line NAME: REGISTER_CONTENT is <NUMBER>", up to 680 of them) is beyond a model
of 135M parameters: of 20 lines it finds one number in five. Where the number stands right behind
the name, it finds most of them. So a context is some consecutive lines of the file, each shortened
to "line NAME: <NUMBER>", and a question is the beginning of one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kdn.bench.tasks.problems import Ask, Problem, Task, Writer
from kdn.errors import FormatError

if TYPE_CHECKING:
    from kdn.bench.tasks.sources import Record

LINE = re.compile(r"line (\S+): REGISTER_CONTENT is <(\d+)>")
NUM_LINES = 40
QUESTIONS = 8
"""About each context."""
ANSWER_TOKENS = 7

Line = tuple[str, str]


def task(name: str, records: Sequence[Record], writer: Writer, most: int) -> Task:
    parts = _parts(records)[:most]
    if not parts:
        raise FormatError(f"{name}: expected a record of at least {NUM_LINES} lines")
    return Task(
        name, "lines", "numbers right",
        f"{NUM_LINES} consecutive lines, shortened to 'line NAME: <NUMBER>'; a line is asked for "
        f"by its beginning, {QUESTIONS} of each context",
        [_problem(part, part_lines, writer) for part, part_lines in parts],
        is_number, ANSWER_TOKENS, until=">", chance=1 / NUM_LINES,
    )  # fmt: skip


def _parts(records: Sequence[Record]) -> list[tuple[str, list[Line]]]:
    """The first lines of every record, then the next ones: records differ more than their parts."""
    found = []
    for record in records:
        own = LINE.findall(record.context)
        for number, at in enumerate(range(0, len(own) - NUM_LINES + 1, NUM_LINES)):
            found.append((number, f"{record.name}+{at}", own[at : at + NUM_LINES]))
    return [(name, own) for _, name, own in sorted(found, key=lambda one: one[0])]


def _problem(name: str, own: Sequence[Line], writer: Writer) -> Problem:
    """Asks for lines that are evenly spaced, beginning with another one in each context."""
    text = "\n".join(f"line {line}: <{number}>" for line, number in own)
    first = sum(name.encode()) % (NUM_LINES // QUESTIONS)
    asked = [own[int(i)] for i in np.arange(first, NUM_LINES, NUM_LINES // QUESTIONS)]
    questions = [Ask(writer.ids(f"line {line}: <"), (number,)) for line, number in asked]
    return Problem(name, writer.context(text), tuple(questions))


def is_number(answer: str, expected: Sequence[str]) -> float:
    """Whether it is the expected number, digit by digit."""
    return float(answer in expected)
