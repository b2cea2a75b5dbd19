"""What users give, checked where it comes in: each idea once, for Python and the command line.

Everything here raises `UnsupportedError`, says what was expected and what was found, and costs
nothing: so it is done before a model is loaded, not after.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from kdn.cache.keys import Tokens

MAX_COUNT = 10**9
"""More than anybody means, of tokens, contexts or turns."""
MAX_SEED = 2**32 - 1
MAX_WAIT_S = 3600.0
"""Nothing waits for ever."""
_SHOWN_CHARS = 80
_CLIENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_PART = re.compile(r"[A-Za-z0-9._-]{0,128}")
"""What a name begins with, or nothing."""
NAME_EXPECTED = "expected a name of 1 to 128 letters, digits, '.', '_', '-'"
_BETWEEN_URLS = re.compile(r",(?=\s*https?://)")
_PLOTS = ("", ".png", ".pdf", ".svg")


def shown(value: object) -> str:
    """A value for a message: not all of a long one."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def checked_number(name: str, value: Any, least: float, most: float) -> float:
    """In [least, most]."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not least <= value <= most:  # NaN is in no interval
        raise UnsupportedError(
            f"{name}: expected a number from {least:g} to {most:g}, found {shown(value)}"
        )
    return float(value)


def checked_count(name: str, value: Any, least: int = 1, most: int = MAX_COUNT) -> int:
    """A whole number in [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UnsupportedError(
            f"{name}: expected a whole number from {least} to {most}, found {shown(value)}"
        )
    return value


def checked_deadline(value: Any, name: str = "deadline_s") -> float | None:
    """Seconds from now on; None: as long as it takes."""
    if value is None:
        return None
    if checked_number(name, value, 0, MAX_WAIT_S) == 0:
        raise UnsupportedError(f"{name}: expected more than 0 seconds, found {shown(value)}")
    return float(value)


def checked_text(name: str, value: Any, *, empty: bool = False) -> str:
    """A text with something in it, that can be written as UTF-8 (halves of a pair cannot)."""
    if not isinstance(value, str):
        raise UnsupportedError(f"{name}: expected a text, found {type(value).__name__}")
    if not empty and not value.strip():
        raise UnsupportedError(f"{name}: expected a text, found none")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(f"{name}: expected a text in Unicode: {error.reason}") from None
    return value


def checked_texts(name: str, values: Any) -> list[str]:
    """Several, at least one."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UnsupportedError(f"{name}: expected a list of texts, found {shown(values)}")
    return [checked_text(name, value) for value in values]


def checked_choice(name: str, value: Any, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise UnsupportedError(f"{name}: expected {', '.join(known)}, found {shown(value)}")
    return value


def is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def checked_name(name: str) -> str:
    """Of something learned."""
    if not isinstance(name, str) or not is_name(name):
        raise UnsupportedError(f"{NAME_EXPECTED}, found {shown(name)}")
    return name


def checked_function(name: str, value: Any) -> None:
    """Or none."""
    if value is not None and not callable(value):
        raise UnsupportedError(f"{name}: expected a function, found {shown(value)}")


def checked_client(value: Any) -> str | None:
    """How a client calls itself at nodes, for fair sharing."""
    if value is None or (isinstance(value, str) and _CLIENT.fullmatch(value)):
        return value
    raise UnsupportedError(
        f"client: expected 1 to 64 letters, digits, '.', '_', '-', found {shown(value)}"
    )


def checked_url(url: str) -> str:
    """Of a node. One with a password in it is not shown."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        fits = fits and (parts.port is None or parts.port > 0) and url.isprintable()
        fits = fits and "," not in parts.netloc
    except ValueError:
        fits, parts = False, urlsplit("")
    if "@" in (parts.netloc if fits else url):
        raise UnsupportedError("expected the URL of a node without a user: a token says who asks")
    if not fits:
        raise UnsupportedError(
            f"expected the URL of a node, as http://HOST:PORT, found {shown(url)}"
        )
    return url


def checked_urls(urls: str) -> list[str]:
    """Of several nodes that answer alike, each once: separated by commas."""
    every = [url.strip().rstrip("/") for url in _BETWEEN_URLS.split(urls)]
    return [checked_url(url) for url in dict.fromkeys(every)]


def checked_tokens(name: str, tokens: Any, vocab_size: int) -> Tokens:
    """Token ids that the model has."""
    import numpy as np

    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{name}: expected one row of token ids: {error}") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UnsupportedError(f"{name}: expected one row of token ids, found {ids.dtype}")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        found = f"{ids.min()} to {ids.max()}"
        raise UnsupportedError(f"{name}: expected token ids in [0, {vocab_size}), found {found}")
    return tokens  # type: ignore[no-any-return]


# files


def checked_input(path: Path) -> Path:
    """A file that can be read."""
    try:
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{shown(str(path))}: expected a file: {_reason(error)}") from None


def checked_output(path: Path) -> Path:
    """A file that can be written, when all is done; its folder is made now."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(1, "its folder cannot be written to")
        with suppress(FileNotFoundError):
            path.lstat()  # refuses a name that is too long
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{shown(str(path))}: expected a file to write to: {_reason(error)}"
        ) from None
    return path


def checked_plot(path: Path) -> Path:
    if path.suffix not in _PLOTS:
        raise UnsupportedError(f"{shown(str(path))}: expected a name that ends in .png")
    return checked_output(path)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
