"""Files of questions and texts, told apart by what stands in them, and made into tasks.

A file of JSON lines has a `context` and `questions` with `answers` in each line, or one `question`
with `answers` and `chunks`. Anything else is a text, for perplexity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdn.bench.blend.items import list_of, load_each, load_items, set_name, text_of
from kdn.bench.tasks import choices, documents, following, lines, topics
from kdn.bench.tasks.problems import Task, Writer
from kdn.calibrate.corpus import load_text
from kdn.errors import FormatError, UnsupportedError

KINDS = ("lines", "topics", "choices", "documents", "passages", "perplexity")
MAX_CONTEXTS = 10_000
MAX_PIECES = 4
"""Of a question over passages, those that hold the answer among them."""


@dataclass(frozen=True)
class Record:
    """A line of a file."""

    name: str
    context: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    topics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A file, and what can be asked of it."""

    name: str
    kind: str
    make: Callable[[Writer, int], Task]
    """A task of at most so many contexts."""


def open_source(path: Path) -> Source:
    """Reads the whole file: what is wrong with it is said before anything is measured."""
    name = set_name(path)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        text = load_text(path)
        return Source(text.name, "perplexity", lambda w, n: following.task(text, w, n))
    if "chunks" in load_each(path, 1, lambda line, _: line)[0]:
        items = load_items(path, MAX_CONTEXTS, MAX_PIECES)
        return Source(name, "passages", lambda w, n: documents.over_passages(name, items, w, n))
    records = load_each(path, MAX_CONTEXTS, _record)
    kind, make = _told_apart(records)
    return Source(name, kind, lambda w, n: make(name, records, w, n))


def open_sources(paths: Iterable[Path], kinds: Sequence[str]) -> list[Source]:
    """Those of the given kinds."""
    found = [one for one in map(open_source, paths) if one.kind in kinds]
    if not found:
        raise UnsupportedError(f"data: expected files with tasks of {', '.join(kinds)}, as --data")
    if len({one.name for one in found}) < len(found):
        raise UnsupportedError("data: expected files of different names")
    return found


Make = Callable[[str, Sequence[Any], Writer, int], Task]


def _told_apart(records: Sequence[Record]) -> tuple[str, Make]:
    first = records[0]
    if lines.LINE.search(first.context):
        return "lines", lines.task
    if first.topics:
        return "topics", topics.task
    if choices.OPTION.search(first.questions[0][0]):
        return "choices", choices.task
    return "documents", documents.task


def _record(line: Mapping[str, Any], name: str) -> Record:
    questions = tuple(map(_question, list_of(line, "questions")))
    if not questions:
        raise FormatError("expected at least one question")
    told = list_of(line, "topics") if "topics" in line else ()
    names = tuple(text_of(one, "a topic") for one in told)
    return Record(name, text_of(line.get("context"), "'context'"), questions, names)


def _question(one: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(one, dict):
        raise FormatError("expected questions to be objects")
    answers = tuple(text_of(answer, "an answer") for answer in list_of(one, "answers"))
    if not answers:
        raise FormatError("expected at least one answer")
    return text_of(one.get("question"), "'question'"), answers
