"""What is wrong with a node, in sentences for the people who run it. Pure: a status in, words out.

An `error` needs somebody now: requests fail, or what was put may be lost. A `warning` is something
to look at soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kdn.node.status.traffic import Json

NEARLY = 0.9
"""Of a limit that is hard to pass without somebody being refused."""
LEAST_FREE = 0.03
"""Of a file system."""
BEHIND_OBJECTS = 1000

_ERRORS = {
    "internal": ("error", "{} requests failed by a fault of this node; the log has the tracebacks"),
    "store_error": ("error", "{} requests failed because a store did not answer"),
    "no_space": ("error", "{} uploads found no room"),
    "overloaded": ("warning", "{} requests were refused because the node was overloaded"),
    "centre_unreachable": ("error", "{} requests failed because the centre was out of reach"),
}


class Problem(NamedTuple):
    severity: str
    code: str
    message: str


def problems_of(status: Json, recent_errors: dict[str, int]) -> list[Problem]:
    """The worst first."""
    found = [
        *_processes(status), *_stores(status), *_requests(status, recent_errors),
        *_limits(status), *_region(status),
    ]  # fmt: skip
    return sorted(found, key=lambda one: one.severity != "error")


def _processes(status: Json) -> Iterator[Problem]:
    node = status["node"]
    if node["stopping"]:
        yield Problem("warning", "stopping", "this node is going away")
    missing = node["workers"] - node["workers_answering"]
    if node["workers"] > 1 and missing > 0:
        words = f"{missing} of {node['workers']} workers do not answer"
        yield Problem("error", "workers_missing", words)
    number = sum(status["faults"].values())
    if number:
        works = ", ".join(sorted(status["faults"]))
        yield Problem(
            "warning", "faults", f"{number} faults in the background since start: {works}"
        )


def _stores(status: Json) -> Iterator[Problem]:
    for tier in status["tiers"]:
        if not tier["answers"]:
            words = f"the {tier['name']} tier does not answer; it is tried again every few seconds"
            yield Problem("error", "tier_failing", words)
    damaged = sum(tier["corruptions"] for tier in status["tiers"])
    if damaged:
        words = f"{damaged} damaged objects were found and set aside; check the disk"
        yield Problem("warning", "corruptions", words)
    if not status["known"]["names_answer"]:
        yield Problem("error", "names_failing", "the store of names does not answer")


def _requests(status: Json, recent_errors: dict[str, int]) -> Iterator[Problem]:
    for code, number in recent_errors.items():
        severity, words = _ERRORS[code]
        yield Problem(severity, code, words.format(number) + ", in the last 5 minutes")


def _limits(status: Json) -> Iterator[Problem]:
    for limit in status["limits"]:
        used, most, what = limit["used"], limit["limit"], limit["name"]
        if what == "file_system":
            if most and 1 - used / most < LEAST_FREE:
                yield Problem("error", "disk_full", "the disk of the data folder is nearly full")
        elif not limit["may_fill"] and most and used > NEARLY * most:
            label = what.replace("_", " ")
            yield Problem("warning", "limit_near", f"{label}: {used / most:.0%} of the limit")


def _region(status: Json) -> Iterator[Problem]:
    region = status["region"]
    if region is None:
        return
    if not region["centre_answers"]:
        yield Problem("error", "centre_away", "the centre does not answer")
    elif region["names_late"]:
        words = "names here are older than max_stale_s: reads of names wait for the centre"
        yield Problem("warning", "names_late", words)
    if region["lost_objects"]:
        words = f"{region['lost_objects']} objects were damaged before they reached the centre"
        yield Problem("error", "lost_objects", words)
    if region["refused_objects"]:
        words = f"the centre refused objects {region['refused_objects']} times; see the log"
        yield Problem("warning", "refused_objects", words)
    if region["waiting_objects"] > BEHIND_OBJECTS:
        words = f"{region['waiting_objects']:,} objects wait to be sent to the centre"
        yield Problem("warning", "outbox_long", words)
