"""What `kdn bench codec` has measured so far, in the file of `--json`: a run that was stopped goes
on from there.

The file is always a whole document. While a run goes on it also holds `unfinished`: contexts of
rows that need more of them. What is there counts only if it was measured with the same settings, on
the same machine and by the same code; else the file is moved aside, and measuring begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from kdn.bench.codec_report import document
from kdn.bench.figures import CodecRow
from kdn.engines.quality import Quality
from kdn.files import write_whole

FILE_MODE = 0o644
SAME = ("settings", "calibration", "hardware")
"""Members of a document that must be equal for its rows to count. (The settings have a digest of
the code, so the commit does not matter.)"""

RowKey = tuple[str, str, int]
"""Text, codec, level."""


@dataclass(frozen=True)
class Point:
    """One outcome and what it did to the model."""

    size_bytes: int
    quality: Quality
    encode_s: float
    decode_s: float
    prefill_s: float


class Saved:
    """Rows and points by what they are of. Without a path, they are only kept in memory."""

    def __init__(self, path: Path | None, extra: Mapping[str, Any]) -> None:
        self.rows: dict[RowKey, CodecRow] = {}
        self.points: dict[RowKey, dict[int, Point]] = {}
        """Of rows that are not complete, by where the context begins."""
        self.note = ""
        """What was found in the file, for the user."""
        self._path, self._extra = path, dict(extra)
        if path is not None and path.is_file() and path.stat().st_size:
            self._resume(path)

    def has(self, key: RowKey, start: int) -> bool:
        return key in self.rows or start in self.points.get(key, {})

    def add(self, key: RowKey, start: int, point: Point) -> list[Point]:
        """All points of this row by now."""
        group = self.points.setdefault(key, {})
        group[start] = point
        self._write()
        return list(group.values())

    def complete(self, key: RowKey, row: CodecRow) -> None:
        self.rows[key] = row
        self.points.pop(key, None)
        self._write()

    def finish(self, order: Sequence[RowKey]) -> list[CodecRow]:
        """These rows. The file has them first, then those of codecs that were asked for earlier."""
        rows = {key: self.rows[key] for key in order}
        self.rows = rows | self.rows
        self._write()
        return list(rows.values())

    def _write(self) -> None:
        if self._path is None:
            return
        told = document(list(self.rows.values()), self._extra)
        if self.points:
            told["unfinished"] = [
                {"key": key, "start": start, **_as_json(point)}
                for key, group in self.points.items()
                for start, point in group.items()
            ]
        data = (json.dumps(told, indent=1) + "\n").encode()
        aside = self._path.with_name(f".{self._path.name}.part")
        write_whole(self._path, data, aside, mode=FILE_MODE)

    def _resume(self, path: Path) -> None:
        try:
            told = json.loads(path.read_bytes())
            why = ", ".join(f"other {name}" for name in SAME if not self._agrees(told, name))
            if not why:
                self._take(told)
                self.note = f"{path}: has {len(self.rows)} rows already; delete it to begin anew"
                return
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            self.rows, self.points = {}, {}
            why = "no report of this benchmark"
        before = path.with_name(f"{path.name}.before")
        path.replace(before)
        self.note = f"{path}: {why}; it is now {before}"

    def _agrees(self, told: Mapping[str, Any], name: str) -> bool:
        here: dict[str, Any] = json.loads(json.dumps(self._extra[name]))
        return dict(told[name]) | {"commit": ""} == here | {"commit": ""}

    def _take(self, told: Mapping[str, Any]) -> None:
        rows = [CodecRow(**row) for row in told["rows"]]
        self.rows = {(row.text, row.codec, row.level): row for row in rows}
        for one in told.get("unfinished", []):
            text, codec, level = one["key"]
            self.points.setdefault((text, codec, level), {})[one["start"]] = _from_json(one)
        self._extra["levels"] = {**told["levels"], **self._extra["levels"]}


def _as_json(point: Point) -> dict[str, Any]:
    told = {item.name: getattr(point, item.name) for item in fields(point)}
    quality = {name: values.tolist() for name, values in vars(point.quality).items()}
    return {**told, "quality": quality}


def _from_json(told: Mapping[str, Any]) -> Point:
    quality = Quality(**{name: np.asarray(told["quality"][name]) for name in _QUALITY})
    return Point(**{**{item.name: told[item.name] for item in fields(Point)}, "quality": quality})


_QUALITY = tuple(item.name for item in fields(Quality))
