"""`kdn doctor`: all checks in order, their lines, the JSON, and the exit code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kdn.doctor.check import FAIL, Check, Result, Situation, examine
from kdn.doctor.disk import check_cache_folder, check_data_folder, check_spool
from kdn.doctor.machine import (
    check_clock,
    check_cores,
    check_packages,
    check_python,
    check_shared_memory,
    check_vllm,
)
from kdn.doctor.model import check_gpu, check_profile, check_quality
from kdn.doctor.node import (
    check_link,
    check_node,
    check_node_clock,
    check_store,
    check_tls,
    check_versions,
)
from kdn.doctor.place import check_place
from kdn.doctor.settings import check_configuration, check_credentials

CHECKS = (
    Check("python", check_python),
    Check("packages", check_packages),
    Check("vllm", check_vllm),
    Check("cores", check_cores),
    Check("gpu", check_gpu, deadline_s=300.0),  # kernels are compiled the first time
    Check("shared memory", check_shared_memory),
    Check("clock", check_clock),
    Check("configuration", check_configuration),
    Check("credentials", check_credentials),
    Check("cache folder", check_cache_folder, deadline_s=30.0),
    Check("data folder", check_data_folder, deadline_s=30.0),
    Check("spool", check_spool),
    Check("node", check_node, deadline_s=30.0),
    Check("tls", check_tls),
    Check("node clock", check_node_clock, deadline_s=15.0),
    Check("versions", check_versions, deadline_s=15.0),
    Check("store", check_store, deadline_s=15.0),
    Check("link", check_link, deadline_s=30.0),
    Check("place", check_place, deadline_s=30.0),
    Check("profile", check_profile, deadline_s=300.0),  # reads all weights the first time
    Check("quality", check_quality, deadline_s=300.0),
)


def run(
    situation: Situation,
    json_file: Path | None,
    say: Callable[[str], object],
    checks: Sequence[Check] | None = None,
) -> list[str]:
    """The names of those that failed."""
    results: list[Result] = []
    with _quiet():
        for check in CHECKS if checks is None else checks:
            results.append(examine(check, situation))
            say(results[-1].line())
    failed = [one.name for one in results if one.status == FAIL]
    say(f"{len(results)} checks, {len(failed) or 'none'} failed")
    if json_file is not None:
        told = {"sound": not failed, "checks": [one.as_json() for one in results]}
        json_file.write_text(json.dumps(told, indent=1) + "\n")
    return failed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without kdn's own warnings: the checks say the same, once."""
    log = logging.getLogger("kdn")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
