"""Logs as JSON lines: time, level, event, and whatever fields the event has."""

from __future__ import annotations

import json
import logging
import sys
from typing import IO

from kdn.errors import UnsupportedError

LEVELS = ("debug", "info", "warning", "error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to(stream: IO[str] | None, level: str) -> logging.Handler:
    """Send kdn's log lines there (standard error if None)."""
    if level not in LEVELS:
        raise UnsupportedError(f"log_level: expected one of {', '.join(LEVELS)}, found {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("kdn", "aiohttp", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("kdn").setLevel(level.upper())
    return handler
