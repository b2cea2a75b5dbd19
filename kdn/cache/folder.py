"""Where kdn keeps what it fetched or made on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`KDN_CACHE`, else `kdn` in the user's cache folder."""
    if own := os.environ.get("KDN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdn"
