"""Every metric is named by Prometheus' rules, documented, and really there; so is every one that
the dashboard and the alerts use."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kdn.bench.servers import free_port
from kdn.client.answers import Stats
from kdn.client.metrics import Metrics
from kdn.metrics import CLIENT, COUNTER, EVERY, HISTOGRAM, NODE, STORE, VLLM, Family, series
from tests.metrics_page import PAGE, page
from tests.node.harness import Running, config_for, running, tenant, with_node

ROOT = Path(__file__).parent.parent
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kdn.json"
FAMILIES = [family for families in EVERY.values() for family in families]
USED = re.compile(r"\bkdn_[a-z0-9_]+")
LABELS = {
    "method", "route", "status", "tenant", "work", "version", "tier", "kind", "level", "result",
    "engine", "model_name",
}  # fmt: skip
"""Each has few values, none of them made up by a client."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_name_is_as_prometheus_asks_for(family: Family) -> None:
    assert re.fullmatch(r"kdn_[a-z0-9]+(_[a-z0-9]+)*", family.name)
    assert family.name.endswith("_total") == (family.kind == COUNTER)
    assert not re.search(
        r"_(ms|milliseconds|kb|mb|bits|percent|count|sum|bucket)(_|$)", family.name
    )
    assert family.kind != HISTOGRAM or family.name.endswith("_seconds")
    assert set(family.labels) <= LABELS
    assert family.meaning[0].isupper()
    assert family.meaning.endswith(".")


def test_no_name_is_used_twice() -> None:
    names = [name for family in FAMILIES for name in series(family)]
    assert len(names) == len(set(names))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make metrics`"


def test_a_node_shows_what_is_documented_and_nothing_else(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1)
        _, _, body = await node.ask("GET", "/metrics")
        shown = {family.name: family for family in text_string_to_metric_families(body.decode())}
        for family in (*NODE.values(), *STORE.values()):
            found = shown.pop(family.name.removesuffix("_total"))
            assert (found.type, found.documentation) == (family.kind, family.meaning)
            for sample in found.samples:
                assert set(sample.labels) - {"le"} == set(family.labels)
        assert not shown

    with_node(tmp_path, test)


def test_a_clients_metrics_can_be_registered() -> None:
    metrics = Metrics()
    metrics.count(
        Stats(
            100, 80, 20, fetched_bytes=5000, delivery_s=0.5, avoided_s=2.0,
            level_bytes=(3000, 2000), tier_tokens={"host": 0, "folder": 0, "remote": 80},
        )
    )  # fmt: skip
    assert metrics.saved_s == 1.5
    registry = CollectorRegistry()
    registry.register(metrics)
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    assert {name for name, *_ in found} == set(CLIENT)
    assert found["kdn_client_hit_tokens_total", "remote"] == 80
    assert found["kdn_client_level_bytes_total", "1"] == 2000
    assert found["kdn_client_avoided_seconds_total",] == 2.0


@pytest.mark.parametrize("path", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_only_metrics_that_exist_are_used(path: Path) -> None:
    known = {name for family in FAMILIES for name in series(family)}
    used = set(USED.findall(path.read_text()))
    assert len(used) > 10
    assert used <= known


def test_the_dashboard_is_one_grafana_takes() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert all(
            target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"]
        )
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


promtool = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="needs Debian's package prometheus (make servers)",
)


@promtool
def test_prometheus_takes_the_alerts_and_the_example() -> None:
    for what, path in (("rules", ALERTS), ("config", ALERTS.with_name("prometheus.yml"))):
        flags = ["--lint=all", "--lint-fatal"] if what == "rules" else ["--syntax-only"]
        done = subprocess.run(
            ["promtool", "check", what, *flags, str(path)], capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    names = {"$__rate_interval": "5m", "$instance": ".*"}
    rules = []
    for number, query in enumerate(queries):
        for name, value in names.items():
            query = query.replace(name, value)
        rules.append({"record": f"test:{number}", "expr": query})
    path = tmp_path / "rules.json"  # which is YAML, too
    path.write_text(json.dumps({"groups": [{"name": "test", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_a_real_prometheus_scrapes_a_real_node(tmp_path: Path) -> None:
    """With a token, and with the alerts loaded."""

    async def test() -> None:
        own = tenant("ops", "let-me-in", "operate_tokens")
        async with running(config_for(tmp_path / "node", own)) as node:
            await node.put_chunk(1, token="let-me-in")
            with _prometheus(tmp_path, node.url, "let-me-in") as url:
                query = "kdn_store_puts_total"
                found = await asyncio.to_thread(_result, url, query)
                assert found[0]["value"][1] == "1"
                [up] = await asyncio.to_thread(_result, url, 'up{job="kdn"}')
                assert up["value"][1] == "1"
                rules = await asyncio.to_thread(_get, url, "/api/v1/rules")
                every = [rule for group in rules["groups"] for rule in group["rules"]]
                assert len(every) == ALERTS.read_text().count("- alert:")
                assert {rule["health"] for rule in every} <= {"ok", "unknown"}

    asyncio.run(asyncio.wait_for(test(), 120))


@contextmanager
def _prometheus(folder: Path, target: str, token: str) -> Iterator[str]:
    (folder / "token").write_text(token)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{
            "job_name": "kdn", "authorization": {"credentials_file": str(folder / "token")},
            "static_configs": [{"targets": [target.removeprefix("http://")]}],
        }],
    }  # fmt: skip
    (folder / "prometheus.json").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.json'}",
        f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address={address}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def _result(url: str, query: str) -> list[Any]:
    """When there is one."""
    asked = urllib.parse.urlencode({"query": query})
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            if found := _get(url, f"/api/v1/query?{asked}")["result"]:
                return list(found)
        except OSError:  # it begins
            pass
        time.sleep(0.2)
    raise TimeoutError(query)


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        return json.loads(answer.read())["data"]


def test_vllms_counts_are_the_ones_that_its_sides_count() -> None:
    """By their names in the code: vLLM itself is not needed for that."""
    folder = ROOT / "kdn" / "engines" / "vllm"
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    counted = set(re.findall(r'self\._?counts\[f?"([a-z_]+)', code))
    names = {name.removeprefix("kdn_vllm_").removesuffix("_total") for name in VLLM}
    assert {name.replace("_ms", "_seconds") for name in counted} == names
