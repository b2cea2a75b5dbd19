"""Where kdn keeps what it fetched or made on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from kdn.files import FOLDER_MODE, write_whole


def cache_folder() -> Path:
    """`KDN_CACHE`, else `kdn` in the user's cache folder."""
    if own := os.environ.get("KDN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdn"


def write_private(path: Path, data: bytes) -> None:
    """For this user alone, aside and renamed: a reader sees all of it or nothing. OSError if that
    cannot be."""
    for folder in (cache_folder(), path.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    write_whole(path, data, path.with_name(f".{path.name}-{os.getpid()}.part"))
