"""Folders that kdn writes to, and what waits in the spool."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from secrets import token_hex

from kdn.cache.folder import cache_folder
from kdn.doctor.check import Finding, Situation, Skip, fail, note, ok
from kdn.files import FILE_MODE, OTHERS, OTHERS_WRITE

LEAST_FREE_BYTES = 1 << 30
SLOW_SYNC_S = 0.2
SYNCS = 5
STUCK_S = 600.0
MAX_SPOOLED = 100_000
"""Files of the spool that are looked at."""


def check_cache_folder(situation: Situation) -> Finding:
    try:
        # Others may see which models are here. They must not be able to put something there.
        return _folder(cache_folder(), OTHERS_WRITE, "Set KDN_CACHE to a folder of your own.")
    except RuntimeError:
        return fail("this user has no home folder", "Set KDN_CACHE to a folder of your own.")


def check_data_folder(situation: Situation) -> Finding:
    """A node's: on a machine that runs none, it may be absent."""
    settings = situation.sound_config.node
    if settings.store and not settings.disk_bytes:
        raise Skip("the node keeps everything in its store")
    if not settings.data.exists() and situation.sound_config.sources["node.data"] == "default":
        return ok("none: no node has run here")
    return _folder(settings.data, OTHERS, "Set node.data to a folder of the node's user.")


def _folder(path: Path, forbidden: int, otherwise: str) -> Finding:
    """`forbidden`: what its mode must not have."""
    if path.exists() and not path.is_dir():
        return fail(f"{path} is not a folder", otherwise)
    here = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not os.access(here, os.W_OK | os.X_OK):
        return fail(f"{here} cannot be written to", otherwise)
    if here == path and (wrong := _mode(path, forbidden)):
        return wrong
    disk = os.statvfs(here)
    free = disk.f_bavail * disk.f_frsize
    if free < LEAST_FREE_BYTES:
        return fail(f"{path}: only {free >> 20} MiB are free", "Make room on this disk.")
    took_s = sync_seconds(here)
    told = f"{path}: {free / 2**30:.0f} GiB free, a write is safe after {1e3 * took_s:.1f} ms"
    if took_s > SLOW_SYNC_S:
        return note(told, "That is slow: a node acknowledges a put only then.")
    return ok(told)


def _mode(path: Path, forbidden: int) -> Finding | None:
    about = path.stat()
    if about.st_uid != os.geteuid():
        return fail(f"{path} belongs to another user", f"chown it, or run as user {about.st_uid}.")
    if about.st_mode & forbidden:
        mode = stat.S_IMODE(about.st_mode)
        return fail(f"{path} is open to others (mode {mode:o})", f"chmod 700 {path}")
    return None


def sync_seconds(folder: Path) -> float:
    """The longest of some small writes until the disk has them. OSError if it cannot do that."""
    path = folder / f".kdn-doctor-{token_hex(8)}"
    taken = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        for _ in range(SYNCS):
            begin = time.perf_counter()
            os.write(fd, bytes(4096))
            os.fsync(fd)
            taken.append(time.perf_counter() - begin)
    finally:
        os.close(fd)
        path.unlink()
    return max(taken)


def check_spool(situation: Situation) -> Finding:
    """Chunks that wait on disk for a node to come back."""
    try:
        root = cache_folder() / "spool"
    except RuntimeError:
        raise Skip("this user has no home folder") from None
    if not root.is_dir():
        return ok("empty")
    waiting = []
    for path in root.glob("*/*/*.chunk"):
        try:
            waiting.append(path.stat())
        except FileNotFoundError:  # it was sent just now
            continue
        if len(waiting) == MAX_SPOOLED:
            break
    if not waiting:
        return ok("empty")
    size = sum(one.st_size for one in waiting)
    age_s = time.time() - min(one.st_mtime for one in waiting)
    told = f"{len(waiting)} chunks ({size / 1e6:.1f} MB) wait in {root}"
    if age_s < STUCK_S:
        return ok(f"{told}, for {age_s:.0f} s at most")
    return fail(
        f"{told}, some for {age_s / 60:.0f} minutes",
        "Is their node there, and may the token publish? If not: rm -r that folder.",
    )
