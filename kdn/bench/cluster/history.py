"""What clients did to names, and whether a store that keeps its promises could have answered so.

The centre numbers the versions of a name, so the order in which changes took effect is known. What
is left to check is that no operation saw, or made, a version that time forbids:

- **latest**: reads of the latest and acknowledged writes are linearizable. If one ended before
  another began, the later has no older version; a write has a newer one. A version is not read
  before its write began, and each has one value for ever.
- **monotonic**: no client sees an older version than one it has seen or made before, whichever
  regions it asks.
- **stale**: a default read does not miss a version that was acknowledged, or read by somebody, more
  than `max_stale_s` before it began.
- **lost**: every acknowledged version is in the centre's history at the end, with its etag.

A write whose answer did not come may have happened or not: it counts if somebody has read it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

WRITE, LATEST, DEFAULT = "write", "latest", "default"


@dataclass(frozen=True)
class Operation:
    """Seconds are of one clock. Of a read without a name, version and value are 0 and None."""

    client: int
    region: int
    kind: str
    name: str
    began_s: float
    ended_s: float
    done: bool
    """It was answered: a read with something, a write with its version."""
    version: int = 0
    value: str | None = None
    """Of a write: what was to be written."""
    etag: str | None = None


@dataclass(frozen=True)
class Violation:
    rule: str
    """latest, monotonic, stale or lost."""
    what: str
    operations: tuple[Operation, ...] = ()


def check(operations: Sequence[Operation], max_stale_s: float) -> list[Violation]:
    """All that is wrong; empty if nothing is."""
    found: list[Violation] = []
    for name in sorted({one.name for one in operations}):
        of_name = [one for one in operations if one.name == name]
        found += check_values(of_name)
        found += check_latest(of_name)
        found += check_stale(of_name, max_stale_s)
    return found + check_monotonic(operations)


def check_values(operations: Sequence[Operation]) -> list[Violation]:
    """Of one name: each version has one value, which one write began to write before."""
    found = []
    writes = {one.value: one for one in operations if one.kind == WRITE}
    values: dict[int, Operation] = {}
    versions: dict[str | None, Operation] = {}
    for one in operations:
        if not one.done or not one.version:
            continue
        first = values.setdefault(one.version, one)
        again = versions.setdefault(one.value, one)
        if first.value != one.value or first.etag != one.etag or again.version != one.version:
            found.append(Violation("latest", "a version has two values", (first, again, one)))
        write = writes.get(one.value)
        if write is None:
            found.append(Violation("latest", "nobody wrote this", (one,)))
        elif one.ended_s < write.began_s:
            found.append(Violation("latest", "read before it was written", (write, one)))
        elif write.done and write.version != one.version:
            found.append(Violation("latest", "another version was acknowledged", (write, one)))
    return found


def check_latest(operations: Sequence[Operation]) -> list[Violation]:
    """Of one name: what ended before is not newer than what began after. Among those that ended
    before an operation, only the newest matters."""
    some = [one for one in operations if one.done and one.kind in (WRITE, LATEST)]
    ended = sorted(some, key=lambda one: one.ended_s)
    found, at, newest = [], 0, None
    for one in sorted(some, key=lambda one: one.began_s):
        while at < len(ended) and ended[at].ended_s < one.began_s:
            if newest is None or ended[at].version > newest.version:
                newest = ended[at]
            at += 1
        least = 0 if newest is None else newest.version + (one.kind == WRITE)
        if newest is not None and one.version < least:
            found.append(Violation("latest", f"older than {least}", (newest, one)))
    return found


def check_stale(operations: Sequence[Operation], max_stale_s: float) -> list[Violation]:
    """Of one name."""
    return [
        Violation("stale", f"{age_s:.3f} s old", (one,))
        for one, age_s in ages(operations)
        if age_s > max_stale_s
    ]


def ages(operations: Sequence[Operation]) -> list[tuple[Operation, float]]:
    """Of one name: how long before each default read began a newer version was known to somebody;
    0 if none was."""
    known = sorted((one for one in operations if one.done), key=lambda one: one.version)
    versions = [one.version for one in known]
    # first[i]: when anything of the versions from i on was first known.
    first = [float("inf")] * (len(known) + 1)
    for i in range(len(known) - 1, -1, -1):
        first[i] = min(first[i + 1], known[i].ended_s)
    return [
        (one, max(0.0, one.began_s - first[bisect_left(versions, one.version + 1)]))
        for one in operations
        if one.done and one.kind == DEFAULT
    ]


def check_monotonic(operations: Iterable[Operation]) -> list[Violation]:
    by_client: defaultdict[tuple[int, str], list[Operation]] = defaultdict(list)
    for one in operations:
        if one.done:
            insort(by_client[one.client, one.name], one, key=lambda one: one.began_s)
    return [
        Violation("monotonic", "older than before", (before, after))
        for some in by_client.values()
        for before, after in pairwise(some)
        if after.version < before.version
    ]


def check_kept(
    operations: Iterable[Operation], kept: Mapping[str, Mapping[int, str]], max_versions: int
) -> list[Violation]:
    """`kept`: of each name the etags by version, of the last `max_versions`."""
    found = []
    for one in operations:
        if one.kind == WRITE and one.done:
            etags = kept.get(one.name, {})
            is_forgotten = one.version <= max(etags, default=0) - max_versions
            if not is_forgotten and etags.get(one.version) != one.etag:
                found.append(Violation("lost", "an acknowledged version is gone", (one,)))
    return found
