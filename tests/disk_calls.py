"""What a program really asks of the disk, in order: for tests of durability.

The calls are passed on; only those are seen that go through Python's `os`, so not SQLite's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = tuple[object, ...]


class DiskCalls(list[Call]):
    """`("sync", PATH, BYTES)`, of a folder without bytes; `("rename", OLD, NEW)`;
    `("mkdir", PATH)`; `("unlink", PATH)`; and what a test adds itself. Only of paths in `root`, to
    which they are relative."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._root = root
        for name in ("fsync", "fdatasync"):
            self._watch(monkeypatch, name, self._synced)
        for name in ("rename", "replace"):
            self._watch(monkeypatch, name, lambda old, new: self._note("rename", old, new))
        for name in ("mkdir", "unlink"):
            self._watch(monkeypatch, name, lambda path, *_, name=name, **__: self._note(name, path))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, note: Callable[..., None]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            done = real(*args, **named)
            note(*args, **named)
            return done

        monkeypatch.setattr(os, name, call)

    def _synced(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        about = os.fstat(fd)
        self._note("sync", path, *([] if os.path.isdir(path) else [about.st_size]))

    def _note(self, what: str, *places: Any) -> None:
        paths = [one if isinstance(one, int) else Path(one).absolute() for one in places]
        if isinstance(paths[0], Path) and paths[0].is_relative_to(self._root):
            self.append((what, *(str(p.relative_to(self._root)) if isinstance(p, Path) else p
                                 for p in paths)))  # fmt: skip
