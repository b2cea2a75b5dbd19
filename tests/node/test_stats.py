"""Metrics and logs say what happened."""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kdn.errors import UnsupportedError
from kdn.node.logs import log_to
from kdn.node.stats import NodeStats
from kdn.store.base import Stats
from kdn.store.costs import Costs
from tests.node.harness import Running, key_of, with_node


def values(text: str) -> dict[str, float]:
    """`name{labels}` to value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_the_store_counts_are_shown() -> None:
    stats = Stats(3, 100, 1000, hits=7, misses=2, puts=4, evictions=5, cuts=8, corruptions=6)
    found = values(NodeStats().expose(stats).decode())
    assert found["kdn_store_objects{}"] == 3
    assert found["kdn_store_evictions_total{}"] == 5
    assert found["kdn_store_cuts_total{}"] == 8
    assert found["kdn_store_corruptions_total{}"] == 6
    assert found["kdn_store_hits_total{}"] == 7
    assert "kdn_store_requests_total{kind=get}" not in found


def test_what_a_bucket_costs_is_shown() -> None:
    costs = Costs(Counter(get=9, put=2), sent_bytes=70, received_bytes=80)
    found = values(NodeStats().expose(Stats(costs=costs)).decode())
    assert found["kdn_store_requests_total{kind=get}"] == 9
    assert found["kdn_store_requests_total{kind=put}"] == 2
    assert found["kdn_store_sent_bytes_total{}"] == 70
    assert found["kdn_store_received_bytes_total{}"] == 80


def test_metrics_over_the_wire(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        url = f"/v1/chunks/{key_of(1).hex()}"
        await node.ask("GET", url)
        await node.ask("GET", url[:-1] + "f")
        spans = [{"key": key_of(n).hex()} for n in (1, 1, 5)]
        await node.ask("POST", "/v1/read", json.dumps({"spans": spans}).encode())
        await node.ask("PUT", url, b"junk", Kdn_Checksum="0" * 16)
        status, headers, body = await node.ask("GET", "/metrics")
        assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
        found = values(body.decode())
        assert found["kdn_hits_total{}"] == 3
        assert found["kdn_misses_total{}"] == 2
        assert found["kdn_refused_puts_total{}"] == 1
        assert found["kdn_received_bytes_total{tenant=public}"] == len(stream) + 4
        assert found["kdn_sent_bytes_total{tenant=public}"] >= 3 * len(stream)
        assert found["kdn_queue_seconds_count{tenant=public}"] >= 3
        assert found["kdn_connections{}"] == 1
        route = "method=GET,route=/v1/{collection}/{key},status=200"
        assert found[f"kdn_request_seconds_count{{{route}}}"] == 1

    with_node(tmp_path, test)


def test_logs_are_json_lines() -> None:
    stream = io.StringIO()
    log_to(stream, "info")
    log = logging.getLogger("kdn.node.test")
    log.info("hello %s", "you", extra={"size_bytes": 5})
    log.debug("not shown")
    try:
        raise ValueError("oh")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["size_bytes"]) == ("hello you", "info", 5)
    assert "ValueError: oh" in second["trace"]
    with pytest.raises(UnsupportedError, match="loud"):
        log_to(stream, "loud")
