"""Where kdn keeps what it fetched or made on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """`KDN_CACHE`, else `kdn` in the user's cache folder."""
    if own := os.environ.get("KDN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdn"


def write_private(path: Path, data: bytes) -> None:
    """For this user alone, aside and renamed: a reader sees all of it or nothing. OSError if that
    cannot be."""
    for folder in (cache_folder(), path.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    number, aside = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".part", dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
