"""What was measured so far, in a file that the next run goes on from.

A context is measured once: it is found again by its task, its name, and a digest of all that a
model is given. A file of another model, codec or quality is refused, never mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kdn.bench.report import write_json
from kdn.bench.tasks.measure import WayResult
from kdn.bench.tasks.problems import Problem, Task
from kdn.errors import FormatError, UnsupportedError

MAX_BYTES = 256 << 20


@dataclass
class Found:
    path: Path | None
    settings: Mapping[str, Any]
    contexts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """By task and digest."""

    @classmethod
    def opened(cls, path: Path | None, settings: Mapping[str, Any]) -> Found:
        """With what an earlier run left in the file, if there is one."""
        found = cls(path, settings)
        if path is not None and path.exists() and path.stat().st_size:
            for one in _read(path, settings):
                found.contexts[one["task"], one["digest"]] = one
        return found

    def of(self, task: Task, problem: Problem) -> dict[str, Any] | None:
        return self.contexts.get((task.name, digest_of(problem)))

    def add(self, task: Task, problem: Problem, results: Iterable[WayResult]) -> None:
        digest = digest_of(problem)
        ways = {
            one.way: {
                "bytes": one.size_bytes, "scores": list(one.scores),
                "agreements": list(one.agreements), "answers": list(one.shown),
            }
            for one in results
        }  # fmt: skip
        self.contexts[task.name, digest] = {
            "task": task.name, "name": problem.name, "digest": digest,
            "tokens": len(problem.tokens), "ways": ways,
        }  # fmt: skip

    def save(self, extra: Mapping[str, Any]) -> None:
        """Whoever reads the file sees one state or the next."""
        if self.path is not None:
            aside = self.path.with_name(f".{self.path.name}.partial")
            contexts = list(self.contexts.values())
            write_json(aside, {"settings": self.settings, **extra, "contexts": contexts})
            aside.replace(self.path)


def digest_of(problem: Problem) -> str:
    digest = blake2b(problem.tokens.tobytes(), digest_size=12)
    digest.update(repr(problem.questions).encode())
    return digest.hexdigest()


def _read(path: Path, settings: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = json.loads(path.read_text())
        told, contexts = document["settings"], document["contexts"]
        for one in contexts:
            _check(one)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"json: {path} holds no results of this benchmark: {error}") from error
    for name, value in settings.items():
        if told.get(name) != value:
            raise UnsupportedError(
                f"json: {path} was measured with another {name}: choose another file"
            )
    return list(contexts)


def _check(one: Any) -> None:
    texts = (one["task"], one["name"], one["digest"])
    figures = [(way["bytes"], *way["scores"], *way["agreements"]) for way in one["ways"].values()]
    if not all(isinstance(text, str) for text in texts) or not figures:
        raise ValueError("expected a task, a name, a digest and ways")
    if not all(isinstance(number, int | float) for own in figures for number in own):
        raise ValueError("expected numbers")
