"""A delivery between two hosts: real sockets, real TCP, a wire with delay, loss and a rate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.delivery.peer import fill
from tests.delivery.wire import missing, two_hosts
from tests.node.harness import run

BITS_PER_S = 20e6
PORT = 8470
MOST_CHUNKS = 24
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.alone,
]


def inside(namespace: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, sys.executable, "-m", *words]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A node's data folder, and how many bytes each chunk in it takes."""
    folder = tmp_path_factory.mktemp("node")
    return folder, run(fill(folder, MOST_CHUNKS))


def fetched(namespace: str, url: str, num_chunks: int) -> dict[str, Any]:
    command = inside(namespace, "tests.delivery.peer", url, str(num_chunks))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=150)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def node(namespace: str, folder: Path) -> Iterator[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KDN_")}
    environ |= {
        "KDN_NODE_HOST": "10.77.0.1", "KDN_NODE_PORT": str(PORT), "KDN_NODE_INSECURE": "true",
        "KDN_NODE_DATA": str(folder),
    }  # fmt: skip
    command = inside(namespace, "kdn.cli.main", "node")
    with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://10.77.0.1:{PORT}"
        finally:
            process.terminate()


def wait_for(namespace: str, url: str) -> None:
    probe = f"import urllib.request as u; u.urlopen('{url}/healthz', timeout=2)"
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", probe]
    give_up_s = time.monotonic() + 30
    while subprocess.run(command, capture_output=True).returncode:
        assert time.monotonic() < give_up_s, "the node did not start"
        time.sleep(0.2)


def delivered(
    filled: tuple[Path, list[int]], round_trip_s: float, loss: float, num_chunks: int
) -> dict[str, Any]:
    folder, sizes = filled
    size_bytes = sum(sizes[:num_chunks])
    with two_hosts(BITS_PER_S, round_trip_s, loss) as (server, client), node(server, folder) as url:
        wait_for(server, url)
        found = fetched(client, url, num_chunks)
    assert found["right"], found
    assert found["recompute"] == 0
    # What the lookup brought along is not fetched again.
    assert found["fetched_bytes"] >= 0.99 * size_bytes
    found["use"] = 8 * size_bytes / (BITS_PER_S * found["done_s"])
    return found


def test_a_long_round_trip_leaves_no_link_idle(filled: tuple[Path, list[int]]) -> None:
    """Payload alone: from the first byte on, and of all the time from the request on, connecting
    and asking included."""
    found = delivered(filled, 0.1, 0.0, MOST_CHUNKS)
    flowing = found["done_s"] - found["first_byte_s"]
    assert found["use"] * found["done_s"] / flowing >= 0.85, found
    assert found["use"] >= 0.8, found
    assert found["first_byte_s"] >= 0.2  # a round trip to connect, one to ask: the delay is real


@pytest.mark.parametrize(
    ("round_trip_s", "loss", "num_chunks", "use"),
    [(0.001, 0.0, 8, 0.85), (0.2, 0.0, 4, 0.05), (0.05, 0.02, 4, 0.05)],
)
def test_delay_and_loss_cost_time_only(
    filled: tuple[Path, list[int]], round_trip_s: float, loss: float, num_chunks: int, use: float
) -> None:
    found = delivered(filled, round_trip_s, loss, num_chunks)
    assert found["use"] >= use, found
