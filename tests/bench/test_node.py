"""The raw-socket client against scripted servers, the arithmetic, and the whole command, small."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from kdn.bench import node, node_servers
from kdn.bench.node_attack import Attacked, Neighbourhood
from kdn.bench.node_attacker import Attack
from kdn.bench.node_fairness import Fairness, FairnessLoad, quantile, shares_of, spread
from kdn.bench.node_load import Crowd, SlowReaders, Speed
from kdn.bench.node_report import plot, print_report
from kdn.bench.node_servers import PACKAGES, absent, make_objects
from kdn.bench.node_wire import (
    BatchConnection,
    Dialect,
    KdnDialect,
    NginxDialect,
    RedisDialect,
    WireError,
    drive,
    redis_command,
)
from kdn.bench.servers import ServerError
from kdn.codec.format import Bitstream
from kdn.protocol import frames

KEYS = ["0a" * 16, "0b" * 16]
OBJECTS = {KEYS[0]: b"first object", KEYS[1]: b"the second"}
Scripted = Callable[[bytes], tuple[str, int]]


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A server that takes one connection and says these bytes, a few at a time."""
    threads = []

    def start(answer: bytes) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            # A client that has seen enough leaves.
            with suppress(OSError), listener, listener.accept()[0] as connection:
                connection.settimeout(10)
                connection.recv(65536)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(0, len(answer), 7):
                    connection.sendall(answer[at : at + 7])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

        threads.append(Thread(target=serve))
        threads[-1].start()
        address: tuple[str, int] = listener.getsockname()
        return address

    yield start
    for thread in threads:
        thread.join(10)


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(body)) + body


def framed(number: int, key: str, data: bytes, status: int = frames.OK) -> bytes:
    from xxhash import xxh3_64_intdigest

    checksum = xxh3_64_intdigest(data)
    head = frames.Frame(
        number, status, bytes.fromhex(key), b"e", b"", len(data), 0, len(data), 0.0, checksum
    )
    return frames.pack(head) + data


ANSWERS: list[tuple[Dialect, bytes]] = [
    (KdnDialect(), http(b"".join(framed(i, key, OBJECTS[key]) for i, key in enumerate(KEYS)))),
    (NginxDialect(), b"".join(map(http, OBJECTS.values()))),
    (RedisDialect(), b"".join(b"$%d\r\n%b\r\n" % (len(data), data) for data in OBJECTS.values())),
]


@pytest.mark.parametrize(("dialect", "answer"), ANSWERS, ids=["kdn", "nginx", "redis"])
def test_the_same_client_reads_every_dialect(
    scripted: Scripted, dialect: Dialect, answer: bytes
) -> None:
    connection = BatchConnection(scripted(answer), dialect, OBJECTS, batch=2, batches=1, compare=2)
    with closing(connection):
        drive([connection])
    assert connection.received_bytes == sum(map(len, OBJECTS.values()))
    assert connection.raw_bytes == len(answer)
    assert len(connection.latencies_s) == 1


@pytest.mark.parametrize(("dialect", "answer"), ANSWERS, ids=["kdn", "nginx", "redis"])
def test_other_bytes_are_noticed(scripted: Scripted, dialect: Dialect, answer: bytes) -> None:
    if isinstance(dialect, KdnDialect):
        changed = http(framed(0, KEYS[0], b"first 0bject") + framed(1, KEYS[1], OBJECTS[KEYS[1]]))
    else:
        changed = answer.replace(b"first object", b"first 0bject")
    connection = BatchConnection(scripted(changed), dialect, OBJECTS, batch=2, batches=1, compare=2)
    with closing(connection), pytest.raises(WireError, match="other bytes"):
        drive([connection])


@pytest.mark.parametrize(
    ("dialect", "answer", "message"),
    [
        (NginxDialect(), http(b"first object") + http(b"short"), "expected 10 bytes"),
        (NginxDialect(), http(b"", "404 Not Found"), "404"),
        (NginxDialect(), b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", "Content-Length"),
        (RedisDialect(), b"$-1\r\n", "expected a value"),
        (RedisDialect(), b"-ERR no\r\n", "expected a value"),
        (RedisDialect(), b"$12\r\nfirst", "closed"),
        (KdnDialect(), http(framed(0, KEYS[0], b"", 404) + bytes(200)), "status 404"),
    ],
)
def test_wrong_answers_are_named(
    scripted: Scripted, dialect: Dialect, answer: bytes, message: str
) -> None:
    connection = BatchConnection(scripted(answer), dialect, OBJECTS, batch=2, batches=1, compare=9)
    with closing(connection), pytest.raises(WireError, match=message):
        drive([connection])


def test_more_than_was_asked_for_is_an_error(scripted: Scripted) -> None:
    answer = ANSWERS[1][1] + b"more"
    connection = BatchConnection(scripted(answer), NginxDialect(), OBJECTS, batch=2, batches=1)
    with closing(connection), pytest.raises(WireError, match="nobody asked"):
        _read_to_the_end(connection, len(answer))


def _read_to_the_end(connection: BatchConnection, num_bytes: int) -> None:
    connection.fill()
    while connection.raw_bytes < num_bytes:
        connection.receive(memoryview(bytearray(64)))


def test_redis_commands_are_counted_in_bytes() -> None:
    assert redis_command(b"GET", "ä".encode()) == b"*2\r\n$3\r\nGET\r\n$2\r\n\xc3\xa4\r\n"


def test_objects_are_chunks_of_exactly_this_size() -> None:
    objects = make_objects(5000, 3, seed=1)
    assert len(objects) == 3
    assert objects == make_objects(5000, 3, seed=1)
    assert objects != make_objects(5000, 3, seed=2)
    for key, data in objects.items():
        assert len(data) == 5000
        stream = Bitstream.parse(data)
        stream.verify()
        assert stream.info.chunk_key.hex() == key


def test_what_is_absent_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_servers, "find_program", lambda name: None)
    told = absent()
    assert set(told) == set(PACKAGES)
    assert "apt-get install redis-server" in told["redis"]


def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="there is no such setting"),
        node_servers.start_kdn(tmp_path / "node", {"no_such": 1}),
    ):
        pass


@pytest.mark.parametrize(
    ("part", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_quantiles(part: float, expected: int) -> None:
    assert quantile(list(range(100, 0, -1)), part) == expected


def test_shares_and_their_spread() -> None:
    assert shares_of([30, 10]) == [0.75, 0.25]
    assert spread([0.75, 0.25]) == pytest.approx(2.0)
    assert spread([1.0, 0.0]) == float("inf")


def fairness(loaded_p99_s: float, shares: list[float]) -> Fairness:
    return Fairness(0.001, 0.002, 0.01, loaded_p99_s, 0.05, 100, 1.0, shares, shares)


def attacked(
    p99_s: float = 0.02, hits: float = 0.75, failures: int = 0, rss_bytes: int = 2**29
) -> Attacked:
    return Attacked(
        0.005, 0.01, 0.006, p99_s, 0.01, 0.02, 0.8, hits, 100, failures, 2**27, rss_bytes, {}
    )


@pytest.mark.parametrize(
    ("kdn", "errors", "loaded_p99_s", "shares", "attack", "failing"),
    [
        (7.01, 0, 0.05, [0.5, 0.5], attacked(), set()),
        (6.9, 0, 0.04, [0.5, 0.5], attacked(), {"speed"}),
        (9.0, 1, 0.04, [0.5, 0.5], attacked(), {"many clients"}),
        (9.0, 0, 0.06, [0.5, 0.5], attacked(), {"light client"}),
        (9.0, 0, 0.04, [0.53, 0.47], attacked(), {"heavy clients"}),
        (9.0, 0, 0.04, [0.5, 0.5], attacked(p99_s=0.0201), {"latency under attack"}),
        (9.0, 0, 0.04, [0.5, 0.5], attacked(failures=1), {"latency under attack"}),
        (9.0, 0, 0.04, [0.5, 0.5], attacked(hits=0.74), {"hits under attack"}),
        (9.0, 0, 0.04, [0.5, 0.5], attacked(rss_bytes=2**31), {"memory under attack"}),
    ],
)
def test_each_bar_can_fail(
    kdn: float,
    errors: int,
    loaded_p99_s: float,
    shares: list[float],
    attack: Attacked,
    failing: set[str],
) -> None:
    speeds = {
        "kdn": {65536: [Speed(kdn, 1.0)] * 3},
        "redis": {65536: [Speed(value, 1.0) for value in (1.0, 10.0, 12.0)]},
    }
    told = node.document(
        speeds, Crowd(200, errors, "", 1.0), SlowReaders(200, 10, 5, 25, Speed(1.0, 1.0)),
        {"fair": fairness(loaded_p99_s, shares)}, attack, node.NodeWorkload(),
    )  # fmt: skip
    assert {name for name, passed in told["passes"].items() if not passed} == failing
    assert told["bytes_per_s"] == pytest.approx({"kdn": kdn, "redis": 10.0})
    assert told["of_redis"]["all"] == pytest.approx(kdn / 10)
    assert told["slow_readers"]["growth_bytes_per_reader"] == pytest.approx(0.1)


def test_the_whole_command_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes: a node, and whatever else is installed."""
    load = FairnessLoad(
        bits_per_s=10**8, depth=4, heavy=2, uneven_depths=(1, 4), samples=20, rounds=1,
        loaded_s=2.0, uneven_s=0.5, pause_s=0.002,
    )  # fmt: skip
    neighbourhood = Neighbourhood(
        memory_bytes=8 * 2**20, disk_bytes=16 * 2**20, clients=2, contexts=8, chunks=4,
        chunk_bytes=16384, samples=40, rounds=1, seconds=5.0, pause_s=0.002,
        attack=Attack(silent=4, lookups=1, floods=1),
    )  # fmt: skip
    plan = node.NodeWorkload(
        sizes_bytes=(65536, 262144), set_bytes=2**20, repeats=1, window_s=0.1, clients=20,
        slow_bytes=2**22, slow_s=0.2, load=load, orders=("fair",), neighbourhood=neighbourhood,
    )  # fmt: skip
    results = node.bench(plan, 0, Console(stderr=True))
    found = {"kdn", *(name for name in PACKAGES if name not in absent())}
    assert set(results["bytes_per_s"]) == found
    assert all(value > 0 for value in results["bytes_per_s"].values())
    assert results["passes"]["many clients"]
    fair: dict[str, Any] = results["fairness"]["fair"]
    assert sum(fair["shares"]) == pytest.approx(1)
    assert spread(fair["shares"]) < 0.5
    # Of a client with a quarter of the requests, first in first out would make a fifth.
    assert fair["uneven_shares"][0] == pytest.approx(0.5, abs=0.15)
    attack: dict[str, Any] = results["attack"]
    assert attack["failures"] == 0
    assert attack["attacked_hits"] > 0.5
    assert results["passes"]["memory under attack"]
    assert {"silent bodies", "lookups", "names", "puts"} <= set(attack["attack"])
    json.dumps(results)
    plot(tmp_path / "node.png", results)
    assert (tmp_path / "node.png").stat().st_size > 1000
    print_report(Console(width=160), results)
    told = capsys.readouterr().out
    assert "Batch reads over loopback" in told
    assert "A tenant beside one that attacks" in told
