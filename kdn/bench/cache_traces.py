"""Request traces as sequences of block chains, whatever format they were recorded in.

Two formats are read, told apart by their fields:
- one request per line: `timestamp` (ms), `input_length` (tokens) and `hash_ids`, one per block of
  512 tokens, the last one perhaps partly filled (the Mooncake traces);
- one session per line: `block_size` and `requests`, each with `t` (s from the session's start),
  `in` (tokens) and `hash_runs`, runs of ids of its full blocks; an entry of type `subagent` holds
  `requests` of its own. Ids are local to a session. Sessions have no common clock: each begins at
  a random moment of the first hour, and their requests are merged by time. Blocks of 64 tokens are
  joined by four into chunks of the size that kdn stores; a last one that is not full has no id.

A block's id stands for the whole prefix up to its end.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdn.cache.keys import CHUNK_TOKENS
from kdn.errors import FormatError

MOONCAKE_BLOCK_TOKENS = 512
SESSION_STARTS_S = 3600.0


@dataclass(frozen=True)
class RecordedRequest:
    """`blocks` are indices into the trace's blocks, from the first of the prompt on."""

    time_s: float
    num_tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class RequestTrace:
    name: str
    block_tokens: int
    requests: list[RecordedRequest]
    parents: list[int | None]
    """Of each distinct block, the one before it."""

    @property
    def footprint_blocks(self) -> int:
        return len(self.parents)


class _Numbering:
    """Chains of outside ids to indices 0, 1, ... : a block is its id after its parent."""

    def __init__(self) -> None:
        self._index: dict[tuple[int | None, Any], int] = {}
        self.parents: list[int | None] = []

    def chain(self, ids: Iterator[Any]) -> list[int]:
        blocks: list[int] = []
        parent: int | None = None
        for name in ids:
            block = self._index.setdefault((parent, name), len(self.parents))
            if block == len(self.parents):
                self.parents.append(parent)
            blocks.append(block)
            parent = block
        return blocks


def load_trace(path: Path, seed: int = 0) -> RequestTrace:
    """Read a trace (.jsonl or .jsonl.gz); `seed` chooses when sessions begin."""
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    lines = list(_lines(path))
    try:
        if "hash_ids" in lines[0]:
            return _mooncake(name, lines)
        return _sessions(name, lines, random.Random(seed))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: expected a request trace, found {error!r}") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except (OSError, EOFError, ValueError) as error:
        raise FormatError(f"{path}: expected lines of JSON, found {error}") from error


def _mooncake(name: str, lines: list[dict[str, Any]]) -> RequestTrace:
    numbering = _Numbering()
    requests = [
        RecordedRequest(
            line["timestamp"] / 1000, line["input_length"], numbering.chain(iter(line["hash_ids"]))
        )
        for line in lines
    ]
    requests.sort(key=lambda request: request.time_s)
    return RequestTrace(name, MOONCAKE_BLOCK_TOKENS, requests, numbering.parents)


def _sessions(name: str, lines: list[dict[str, Any]], rng: random.Random) -> RequestTrace:
    numbering = _Numbering()
    requests: list[RecordedRequest] = []
    for session, line in enumerate(lines):
        group = CHUNK_TOKENS // line["block_size"]
        start_s = rng.uniform(0, SESSION_STARTS_S)
        for time_s, entry in _flat(line["requests"], start_s):
            ids = [first + k for first, count in entry["hash_runs"] for k in range(count)]
            joined = zip(*(ids[k::group] for k in range(group)), strict=False)
            chain = numbering.chain((session, *block) for block in joined)
            requests.append(RecordedRequest(time_s, entry["in"], chain))
    requests.sort(key=lambda request: request.time_s)
    return RequestTrace(name, CHUNK_TOKENS, requests, numbering.parents)


def _flat(entries: list[dict[str, Any]], start_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Requests with their times, those of subagents among them."""
    for entry in entries:
        if entry["type"] == "subagent":
            yield from _flat(entry["requests"], start_s + entry["t"])
        else:
            yield start_s + entry["t"], entry
