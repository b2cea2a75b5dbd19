"""`kdn explain --request ID`: what was decided for one request, and why, from the request log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kdn.errors import UnsupportedError
from kdn.request_log import default_path, find, newest

NEWEST = 5
Told = dict[str, Any]

REASONS = {
    "miss": "nobody has them",
    "lookup late": "nobody answered in time whether they have them",
    "refused": "a place refused to be asked",
    "gone": "they were found, and then nobody had them any more",
    "damaged": "they arrived damaged",
    "not decodable": "they arrived, and could not be decoded",
    "silent": "no byte came for long",
    "deadline": "the deadline came first",
    "no time": "no time was left to ask anybody",
    "read sooner": "the model reads them sooner than the link brings them",
}


def explain(request_id: str, log: Path | None) -> None:
    path = default_path() if log is None else log
    found = find(path, request_id)
    if not found:
        others = newest(path, NEWEST)
        known = f"; the newest there are {', '.join(others)}" if others else ""
        raise UnsupportedError(f"{path} says nothing of the request {request_id!r}{known}")
    console = Console(highlight=False, soft_wrap=True)
    for record in found:
        for line in described(record):
            console.print(plain(line), markup=False)


def described(record: Told) -> Iterator[str]:
    """The first line tells when; those after it, if there are any, tell more."""
    at = time.strftime("%H:%M:%S", time.localtime(record.get("time", 0)))
    how = _EVENTS.get(str(record.get("event")))
    try:
        first, *more = [str(record)] if how is None else list(how(record))
    except (KeyError, TypeError, ValueError, IndexError):  # written by another kdn
        first, more = str(record), []
    yield f"{at}  {first}"
    yield from (f"          {line}" for line in more)


def _know(record: Told) -> Iterator[str]:
    held = f", {record['held']} chunks of them held by this host" if record["held"] else ""
    late = "; nobody answered in time, so more may be known" if record["late"] else ""
    yield (
        f"looked up {record['tokens']:,} tokens: {record['known_tokens']:,} are known in "
        f"{record['chunks']} chunks{held} ({_seconds(record['seconds'])}){late}"
    )


def _deliver(record: Told) -> Iterator[str]:
    deadline = record["deadline_s"]
    by = "without a deadline" if deadline is None else f"by a deadline of {_seconds(deadline)}"
    yield (
        f"delivered tokens {record['start']:,} to {record['end']:,} in {record['chunks']} chunks "
        f"({record['first']} to {record['last']}), {by}: took {_seconds(record['seconds'])}"
    )
    if record["held"]:
        yield f"held by this host: the first {record['held']} chunks"
    if "planned" in record:
        again = f", planned {record['plans']} times" if record["plans"] > 1 else ""
        yield f"planned levels: {_levels(record['planned'], record['held'])}{again}"
    yield f"levels in the cache: {_levels(record['levels'])}"
    for source in record.get("sources", ()):
        yield (
            f"from {source['name']}: {source['bytes'] / 1e6:.2f} MB, "
            f"{source['tokens']:,} tokens mostly from there"
        )
    yield from _left(record.get("why", ()), record["held"] if "planned" in record else 0)
    if record.get("failures"):
        yield f"requests that failed: {record['failures']}"
    yield from (f"trouble: {one}" for one in record.get("troubles", ()))


def _left(why: Sequence[Sequence[Any]], first: int) -> Iterator[str]:
    """What is left to the model, and the reason."""
    for reason, count in why:
        if reason is not None:
            said = REASONS.get(reason, reason)
            yield f"the model reads {_chunks(first, count)}: {reason} ({said})"
        first += count


def _publish(record: Told) -> Iterator[str]:
    yield (
        f"published the chunk {record['chunk']}, tokens {record['start']:,} to "
        f"{record['end']:,}: {record['said']}"
    )


def _accepted(record: Told) -> Iterator[str]:
    yield f"the place has the chunk {record['chunk']}"


def _refused(record: Told) -> Iterator[str]:
    yield f"the chunk {record['chunk']} was given up: {record['why']}"


_EVENTS: dict[str, Callable[[Told], Iterator[str]]] = {
    "know": _know,
    "deliver": _deliver,
    "publish": _publish,
    "accepted": _accepted,
    "refused": _refused,
}


def _levels(told: Sequence[Sequence[Any]], first: int = 0) -> str:
    """As "3 levels for chunks 0 to 13, 4 for chunk 14"."""
    parts = []
    for levels, count in told:
        what = "none" if levels == 0 else f"{levels}"
        parts.append(f"{what} for {_chunks(first, count)}")
        first += count
    return ", ".join(parts)


def _chunks(first: int, count: int) -> str:
    return f"chunk {first}" if count == 1 else f"chunks {first} to {first + count - 1}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def plain(line: str) -> str:
    """What a terminal can show, whatever a node has said."""
    return "".join(one if one.isprintable() else "?" for one in line)
