"""How much of the machine's processors a process has, where a container's quota says so."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def usable_cores(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Cores that this process may keep busy all the time: those that it may run on, or fewer by
    what its control groups (version 1 or 2) give it."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    quota = min(_quotas(groups, own_group), default=math.inf)
    return allowed if quota >= allowed else max(1, math.floor(quota))


def _quotas(groups: Path, own_group: Path) -> Iterator[float]:
    """In cores, of this process's control group and its parents. In a container the root is often
    its own group, whatever the process is told."""
    names = {Path("/")}
    with suppress(OSError, ValueError):
        for line in own_group.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):  # version 1 has other trees, too
                names |= {Path(own), *Path(own).parents}
    for name in names:
        inside = str(name).lstrip("/")
        for place in (groups / inside, groups / "cpu" / inside, groups / "cpu,cpuacct" / inside):
            with suppress(OSError, ValueError):
                yield _quota(place)


def _quota(group: Path) -> float:
    """OSError or ValueError if it has none."""
    if (told := group / "cpu.max").is_file():
        quota, period = told.read_text().split()  # "max" is no number
    else:
        quota = (group / "cpu.cfs_quota_us").read_text()
        period = (group / "cpu.cfs_period_us").read_text()
    cores = int(quota) / int(period) if int(period) > 0 else 0.0
    return cores if cores > 0 else math.inf
