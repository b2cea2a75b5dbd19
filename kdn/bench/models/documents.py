"""Documents to train on, to calibrate with, and kept out of both.

A document is a file, or one line of a .jsonl file. Documents of one kind (a .jsonl file, or the
plain files of one folder) are shared out among the three, each document to one: so all three have
the same kinds of text, and nothing that is measured on was seen before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kdn.calibrate.corpus import Text, load_contexts, load_text
from kdn.errors import FormatError
from kdn.files import write_whole

OTHER, CALIBRATION = 0.1, 0.3
"""Shares of each kind's characters; the rest is trained on."""
LEAST_CHARACTERS = 50_000
"""Of each part. What it really takes shows when windows are cut."""


@dataclass(frozen=True)
class Split:
    """Three parts without a document in common, each in an order of its own."""

    training: list[Text]
    calibration: list[Text]
    other: list[Text]

    def digest(self) -> str:
        found = blake2b(digest_size=12)
        for part in (self.training, self.calibration, self.other):
            for text in part:
                found.update(_order(text))
            found.update(b"|")
        return found.hexdigest()


def read_documents(paths: Sequence[Path]) -> dict[str, list[Text]]:
    """By kind."""
    kinds: dict[str, list[Text]] = {}
    for path in paths:
        is_lines = path.name.removesuffix(".gz").endswith(".jsonl")
        found = load_contexts(path) if is_lines else [load_text(path)]
        kinds.setdefault(str(path if is_lines else path.parent), []).extend(found)
    return kinds


def split(kinds: dict[str, list[Text]]) -> Split:
    """By digests of contents: the same documents are always parted the same way, and a document
    that is there twice counts once."""
    parts: tuple[list[Text], ...] = ([], [], [])
    known: set[bytes] = set()
    for kind in kinds.values():
        chosen = {_order(text): text for text in kind if text.content.strip()}
        chosen = {order: text for order, text in chosen.items() if order not in known}
        known |= set(chosen)
        total, seen = sum(len(text.content) for text in chosen.values()), 0
        for _, text in sorted(chosen.items()):
            # By its middle: a long one goes where most of it falls.
            middle = (seen + len(text.content) / 2) / total
            parts[_part(middle)].append(text)
            seen += len(text.content)
    other, calibration, training = (sorted(part, key=_order) for part in parts)
    for name, part in (("train on", training), ("calibrate with", calibration), ("keep", other)):
        if (found := sum(len(text.content) for text in part)) < LEAST_CHARACTERS:
            raise FormatError(
                f"expected at least {LEAST_CHARACTERS:,} characters of text to {name}, found "
                f"{found:,}: give more documents"
            )
    return Split(training, calibration, other)


def _part(middle: float) -> int:
    return 0 if middle < OTHER else 1 if middle < OTHER + CALIBRATION else 2


def _order(text: Text) -> bytes:
    return blake2b(text.content.encode(), digest_size=12).digest()


def write_lines(path: Path, texts: Sequence[Text]) -> Path:
    """As `kdn calibrate --text` reads them."""
    lines = [json.dumps({"context": text.content}, ensure_ascii=False) for text in texts]
    write_whole(path, ("\n".join(lines) + "\n").encode(), path.with_suffix(".writing"))
    return path
