"""A client in a process of its own, which asks when it is told to, and says how long that took.

Run as a file: the first line of standard input has its settings, each later one makes it ask once;
each line of standard output is what came of it, all in JSON. Whatever libraries print goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

QUESTION = "What is the text above about?"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    import kdn
    from kdn.defaults import REQUEST_LOG_BYTES
    from kdn.request_log import default_path

    watched, name = settings["watched"], settings["name"]
    with kdn.connect(
        settings["url"],
        model=settings["model"],
        recompute=False,
        request_log_bytes=REQUEST_LOG_BYTES if watched else 0,
        tracing=watched,
    ) as client:
        client.learn(name, settings["text"])
        client.flush()
        _tell(answers, {"ready": True})
        before_bytes = _size(default_path())
        for _ in sys.stdin:
            began_s = time.perf_counter()
            answer = client.ask(name, QUESTION, max_new_tokens=1)
            "".join(answer)
            told: dict[str, Any] = {"seconds": time.perf_counter() - began_s}
            told["fetched_bytes"] = answer.stats.fetched_bytes
            told["logged_bytes"] = _size(default_path()) - before_bytes
            _tell(answers, told)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _tell(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main()
