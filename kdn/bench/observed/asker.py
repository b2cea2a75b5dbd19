"""A client in a process of its own, which asks when it is told to, and says how long that took.

Run as `python -m kdn.bench.observed.asker`. The first line of standard input has its settings, each
later one makes it ask once; each line of standard output is what came of it, all in JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

QUESTION = "What is the text above about?"


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    import kdn

    watched = settings["watched"]
    with kdn.connect(
        settings["url"],
        model=settings["model"],
        recompute=False,
        request_log_bytes=None if watched else 0,
        tracing=watched,
    ) as client:
        if settings["text"]:
            client.learn(settings["name"], settings["text"])
            client.flush()
        _tell({"ready": True})
        for _ in sys.stdin:
            began_s = time.perf_counter()
            answer = client.ask(settings["name"], QUESTION, max_new_tokens=1)
            "".join(answer)
            took_s = time.perf_counter() - began_s
            _tell({"seconds": took_s, "fetched_bytes": answer.stats.fetched_bytes})


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
