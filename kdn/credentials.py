"""Tokens and secrets: read from a file, the environment or an argument, checked, and never shown.

A command line is seen by every user of a machine (`ps`) and lands in logs, so nothing here comes
from one: flags and vLLM's settings name files. Messages say where a value came from and what is
wrong with it, and never the value. `config.py` says which source wins.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kdn.errors import UnsupportedError

logger = logging.getLogger(__name__)

MAX_TOKEN_CHARS = 1024
_TOKEN = re.compile(r"[\x21-\x7e]+")
"""What may stand in a header: a line break in a token would begin another header."""


@dataclass(frozen=True)
class Credentials:
    """What a client proves itself with at nodes, and what it trusts there."""

    token: str | None = field(default=None, repr=False)
    """The tenant's; None: no tenants there."""
    secret: bytes | None = field(default=None, repr=False)
    """Names chunks; None: the public one. Never sent anywhere."""
    tls_ca: str | None = None
    """A PEM file: the authority that signed the nodes' certificates; None: those of the system."""


def token_from(value: str | None, path: str | Path | None, name: str = "token") -> str | None:
    """Given as it is or in a file; None if in neither way. `name` is the setting's."""
    _only_one(value, path, name)
    if value is not None:
        return _checked_token(value, name)
    if path is None:
        return None
    found = read_private(path, f"{name}_file", MAX_TOKEN_CHARS)
    return _checked_token(found.decode("latin-1"), f"{name}_file {path}")


def secret_from(value: bytes | None, path: str | Path | None, name: str = "secret") -> bytes | None:
    """As `token_from`."""
    from kdn.cache.keys import MAX_SECRET_BYTES

    _only_one(value, path, name)
    if value is not None:
        if not isinstance(value, bytes):
            raise UnsupportedError(f"{name}: expected bytes, found {type(value).__name__}")
        if not 1 <= len(value) <= MAX_SECRET_BYTES:
            raise UnsupportedError(
                f"{name}: expected 1 to {MAX_SECRET_BYTES} bytes, found {len(value)}"
            )
        return value
    return None if path is None else read_private(path, f"{name}_file", MAX_SECRET_BYTES)


def read_private(path: str | Path, name: str, most_bytes: int) -> bytes:
    """A file's content without the line break at its end, which editors and `echo` leave there."""
    if not isinstance(path, str | Path) or not str(path):
        raise UnsupportedError(f"{name}: expected a path, found {path!r}")
    try:
        # Not blocking: a pipe that nobody writes to would be waited for until the end of time.
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise UnsupportedError(f"{name} {path}: expected a plain file")
            data = file.read(most_bytes + 3)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{name} {path}: {_reason(error)}") from None
    warn_if_shared(about.st_mode, name, path)
    data = data.removesuffix(b"\n").removesuffix(b"\r") if data.endswith(b"\n") else data
    if not data:
        raise UnsupportedError(f"{name} {path}: the file is empty")
    if len(data) > most_bytes:
        raise UnsupportedError(f"{name} {path}: expected at most {most_bytes} bytes, found more")
    return data


def warn_if_shared(mode: int, name: str, path: str | Path) -> None:
    """Not refused: containers get their secrets in files that everybody inside may read."""
    if mode & stat.S_IROTH:
        logger.warning("%s %s: every user of this machine may read it (chmod 600)", name, path)


def _only_one(value: object, path: object, name: str) -> None:
    if value is not None and path is not None:
        raise UnsupportedError(f"expected {name} or {name}_file, found both")


def _checked_token(token: str, name: str) -> str:
    if not isinstance(token, str):
        raise UnsupportedError(f"{name}: expected text, found {type(token).__name__}")
    if not _TOKEN.fullmatch(token) or len(token) > MAX_TOKEN_CHARS:
        raise UnsupportedError(
            f"{name}: expected 1 to {MAX_TOKEN_CHARS} visible ASCII characters, without spaces"
        )
    return token


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "cannot be read"
