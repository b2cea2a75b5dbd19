"""Question sets to join pieces for: JSON lines, plain or gzip.

A line holds a question, its answers, and the passages that were retrieved for it:

    {"question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}, ...]}

Other fields are left alone. A line that is anything else is refused with its number: a question
that silently went missing would change every figure.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kdn.checked import shown
from kdn.errors import FormatError, LimitError

MAX_FILE_BYTES = 256 << 20
"""Of text, unpacked."""
MAX_PIECES = 256
"""Of one question."""

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """A question over several pieces."""

    name: str
    question: str
    answers: tuple[str, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Story:
    """A text, and multiple-choice questions about it, each with its options in it."""

    name: str
    text: str
    questions: tuple[str, ...]


def set_name(path: Path) -> str:
    """What rows call a set: `musique` for `data/musique.jsonl.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def load_items(path: Path, num_items: int, num_pieces: int) -> list[Item]:
    """The first `num_items` questions, each with at most `num_pieces` pieces: those marked as gold
    are kept, the others as far as they fit, all in their order."""
    return load_each(path, num_items, lambda line, name: _item(line, name, num_pieces))


def apart(items: Sequence[Item], others: Sequence[Item]) -> list[Item]:
    """`items` without the questions and the pieces that are among `others`."""
    questions = {one.question for one in others}
    known = {piece for one in others for piece in one.pieces}
    left = [
        replace(one, pieces=tuple(piece for piece in one.pieces if piece not in known))
        for one in items
        if one.question not in questions
    ]
    return [one for one in left if one.pieces]


def load_stories(path: Path, num_stories: int) -> list[Story]:
    """Lines with a `context` and `questions`, each of these a `question` with its options."""
    return load_each(path, num_stories, _story)


def load_each(path: Path, most: int, parse: Callable[[Mapping[str, Any], str], T]) -> list[T]:
    found: list[T] = []
    for number, line in enumerate(unpacked(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
            if not isinstance(parsed, dict):
                raise FormatError(f"expected a JSON object, found {shown(parsed)}")
            found.append(parse(parsed, str(parsed.get("id", number))[:128]))
        except (ValueError, RecursionError, FormatError) as error:
            raise FormatError(f"{path}, line {number}: {error}") from None
        if len(found) == most:
            return found
    if not found:
        raise FormatError(f"{path}: expected lines with questions, found none")
    return found


def unpacked(path: Path) -> str:
    """No more of it than MAX_FILE_BYTES is ever in memory."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path}: expected JSON lines, plain or gzip: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise LimitError(f"{path}: more than {MAX_FILE_BYTES} bytes of text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: expected UTF-8: {error}") from error


def _item(line: Mapping[str, Any], name: str, num_pieces: int) -> Item:
    answers = tuple(text_of(one, "an answer") for one in list_of(line, "answers"))
    chunks = list_of(line, "chunks")
    if not chunks or not answers:
        raise FormatError("expected at least one chunk and one answer")
    pieces = [_piece(chunk) for chunk in chunks]
    gold = [bool(chunk.get("gold")) for chunk in chunks]
    kept = sorted(sorted(range(len(pieces)), key=lambda i: (not gold[i], i))[:num_pieces])
    question = text_of(line.get("question"), "'question'")
    return Item(name, question, answers, tuple(pieces[i] for i in kept))


def _piece(chunk: object) -> str:
    if not isinstance(chunk, dict):
        raise FormatError(f"expected chunks of a 'title' and a 'text', found {shown(chunk)}")
    text = text_of(chunk.get("text"), "a chunk's 'text'")
    title = chunk.get("title", "")
    if not isinstance(title, str):
        raise FormatError(f"expected a chunk's 'title' to be text, found {shown(title)}")
    return f"{title}\n{text}" if title else text


def _story(line: Mapping[str, Any], name: str) -> Story:
    text, questions = text_of(line.get("context"), "'context'"), tuple(_questions(line))
    if not questions:
        raise FormatError("expected at least one question")
    return Story(name, text, questions)


def _questions(line: Mapping[str, Any]) -> Iterator[str]:
    for one in list_of(line, "questions"):
        if not isinstance(one, dict):
            raise FormatError(f"expected questions to be objects, found {shown(one)}")
        yield text_of(one.get("question"), "'question'")


def text_of(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise FormatError(f"expected {what} to be text, found {shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"expected {what} to be text, found half of a character") from None
    return value


def list_of(line: Mapping[str, Any], field: str) -> list[Any]:
    value = line.get(field)
    if not isinstance(value, list) or len(value) > MAX_PIECES:
        raise FormatError(f"expected {field!r} to be a list of at most {MAX_PIECES}")
    return value
