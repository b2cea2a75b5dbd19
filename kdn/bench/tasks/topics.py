"""LongChat's topics: a record of conversations, and what the first of them was about.

The file has up to 25 conversations in a record. A context is NUM_TOPICS consecutive ones of them,
with the file's own words around them and its own question. The answer is begun as a list: a model
of 135M parameters then names the topics in their order, while by itself it often names the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdn.bench.blend.scoring import words_of
from kdn.bench.tasks.problems import Ask, Problem, Task, Writer, spread
from kdn.errors import FormatError

if TYPE_CHECKING:
    from kdn.bench.tasks.sources import Record

NUM_TOPICS = 2
ANSWER_TOKENS = 16
BEGUN = "The topics we discussed, in order:\n\n1."
_START, _END = "Now the record start. ", " Now the record ends."
_CONVERSATION = re.compile(r"(?=USER: I would like to discuss the topic of )")
_COUNT = re.compile(r"on \d+ different topics")


def task(name: str, records: Sequence[Record], writer: Writer, most: int) -> Task:
    problems = [one for record in records for one in _problems(record, writer)]
    if not problems:
        raise FormatError(f"{name}: expected records of at least {NUM_TOPICS} conversations")
    return Task(
        name, "topics", "topics right",
        f"{NUM_TOPICS} consecutive conversations of a record; the file's first question, and how "
        "the answer begins",
        spread(problems, most), names_topic, ANSWER_TOKENS, chance=1 / NUM_TOPICS,
    )  # fmt: skip


def _problems(record: Record, writer: Writer) -> list[Problem]:
    head, found, told = record.context.partition(_START)
    own = [one for one in _CONVERSATION.split(told.removesuffix(_END)) if one.strip()]
    if not found or len(own) != len(record.topics):
        raise FormatError(f"{record.name}: expected {len(record.topics)} conversations in a record")
    head = _COUNT.sub(f"on {NUM_TOPICS} different topics", head)
    question = Ask(writer.asked(record.questions[0][0], BEGUN), ())
    problems = []
    for at in range(0, len(own) - NUM_TOPICS + 1, NUM_TOPICS):
        text = f"{head}{_START}{''.join(own[at : at + NUM_TOPICS])}{_END}"
        asked = Ask(question.row, (record.topics[at],))
        problems.append(Problem(f"{record.name}+{at}", writer.context(text), (asked,)))
    return problems


def names_topic(answer: str, expected: Sequence[str]) -> float:
    """Whether it is the expected topic, whatever its case, punctuation and articles."""
    return float(any(words_of(answer) == words_of(one) for one in expected))
