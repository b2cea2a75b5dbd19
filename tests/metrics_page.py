"""Writes docs/metrics.md from `kdn/metrics.py`: `make metrics`."""

from __future__ import annotations

from pathlib import Path

from kdn.metrics import EVERY, HISTOGRAM, Family

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

OPENING = """\
# Metrics

Made by `make metrics` from `kdn/metrics.py`: change it there.

A node shows its metrics at `/metrics`, to tokens with the right `operate`. vLLM shows those of the
connector among its own. A program with a `kdn.connect` client shows them if it registers them:
`prometheus_client.REGISTRY.register(client.metrics)`. Counters count since the process began. With
`--workers`, a node adds up those of all its processes. [observability.md](observability.md) says
what to look at, and how to scrape.

Labels have few values. `tenant` is a name in the operator's file. `route` is one of the node's
routes, or `none`. `work` names a task of kdn's own. Names of contexts, keys of chunks, clients and
texts are never labels.
"""

MORE = {
    "A client": """\
These are also attributes of `client.metrics`; `client.metrics.saved_s` estimates the time that
loading has saved.
""",
    "vLLM": """\
vLLM's log has the same counts under shorter names, in milliseconds where these are in seconds:
`loaded_tokens`, `load_ms`. `engine` and `model_name` are vLLM's own labels.
""",
}


def page() -> str:
    parts = [OPENING]
    for title, families in EVERY.items():
        rows = [_row(family) for family in families]
        parts.append(f"## {title}\n")
        if title in MORE:
            parts.append(MORE[title])
        parts.append(
            "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    meaning = family.meaning
    if family.kind == HISTOGRAM:
        least, most = family.buckets[0], family.buckets[-1]
        meaning += f" Buckets from {least:g} s to {most:g} s."
    return f"| `{family.name}` | {family.kind} | {labels} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page())
