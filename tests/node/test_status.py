"""What a node says of itself: right numbers, to the right people, and nothing that is secret."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kdn.background import faults
from kdn.codec.header import Header
from kdn.node.status.counts import merged
from kdn.node.status.history import OWN_CODES, History, Sample
from kdn.node.status.live import MAX_LISTENERS
from kdn.node.status.page import policy_of
from kdn.node.status.problems import problems_of
from kdn.node.status.traffic import BOUNDS_S, Traffic, quantile_s
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import Tier, TieredStore
from tests.node.harness import Running, checksum, chunk_stream, key_of, run, tenant, with_node
from tests.node.processes import processes
from tests.region.regions import centre_and_link, region, until

MODEL = "6d" * 16
PATHS = (
    "/v1/status", "/v1/status/events", "/v1/status/tenants", "/v1/status/tenants/alice",
    "/v1/status/names", "/v1/status/names?tenant=alice", "/v1/status/names/alice/plans",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_faults() -> None:
    """Other tests of this process make some on purpose, and a status tells of all."""
    faults.clear()


async def status_of(node: Running, path: str = "", token: str | None = None) -> Any:
    code, _, body = await node.ask("GET", f"/v1/status{path}", token=token)
    assert code == 200, body
    return json.loads(body)


async def put_name(node: Running, name: str, chunks: range, token: str | None = None) -> None:
    manifest = {"models": {MODEL: {"chunks": [key_of(n).hex() for n in chunks]}}}
    data = json.dumps(manifest).encode()
    assert (await node.ask("PUT", f"/v1/names/{name}", data, token))[0] in (200, 201)


async def counted(node: Running) -> Any:
    """When all models and names are known: that takes a moment."""
    while True:
        told = await status_of(node)
        if told["known"]["models_counted"] == 1 and told["known"]["names_answer"]:
            return told
        await asyncio.sleep(0.02)


# what is known


def test_what_is_held_is_told_by_tier_tenant_and_model(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        sizes = [len(await node.put_chunk(number)) for number in range(5)]
        await put_name(node, "plans", range(5))
        await put_name(node, "plans", range(4))
        told = await counted(node)
        known = told["known"]
        assert [known[name] for name in ("chunks", "profiles", "objects")] == [5, 0, 0]
        assert [known["names"], known["versions"]] == [1, 2]
        assert known["size_bytes"] == sum(sizes)
        assert known["models"] == [{"model": MODEL, "chunks": 5, "size_bytes": sum(sizes)}]
        [tier] = told["tiers"]
        assert (tier["name"], tier["objects"], tier["answers"]) == ("memory", 5, True)
        [one] = told["tenants"]
        assert (one["tenant"], one["chunks"], one["names"]) == ("public", 5, 1)
        assert told["health"] == {"status": "ok", "problems": []}

    with_node(tmp_path, test)


def test_models_follow_what_comes_and_goes(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1)
        assert (await counted(node))["known"]["models"][0]["chunks"] == 1
        for number in range(2, 6):
            await node.put_chunk(number)
        assert (await counted(node))["known"]["models"][0]["chunks"] == 5
        for number in range(1, 6):
            assert (await node.ask("DELETE", f"/v1/chunks/{key_of(number).hex()}"))[0] == 204
        assert (await counted(node))["known"]["models"] == []

    with_node(tmp_path, test)


def test_evictions_say_whose_and_why(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for number in range(10):
            await node.put_chunk(number, 20_000)
        told = await counted(node)
        gone = 10 - told["known"]["chunks"]
        assert gone > 0
        line = {"tier": "memory", "tenant": "public", "why": "room", "number": gone}
        assert told["evictions"] == {"number": gone, "by": [line]}
        assert told["known"]["models"][0]["chunks"] == 10 - gone

    with_node(tmp_path, test, store=lambda: MemoryStore(100_000, open_policy("lru")))


def test_a_name_in_detail(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        sizes = [len(await node.put_chunk(number)) for number in range(3)]
        await put_name(node, "plans", range(2))
        await put_name(node, "plans", range(4))
        told = await status_of(node, "/names/public/plans")
        assert [one["version"] for one in told["versions"]] == [2, 1]
        [model] = told["models"]
        assert (model["chunks"], model["found"], model["tokens"]) == (4, 3, 48)
        assert model["size_bytes"] == model["levels_bytes"][-1] == sum(sizes)
        assert model["levels_bytes"] == sorted(model["levels_bytes"])
        assert len(model["levels_bytes"]) == 3
        for path in ("/names/public/others", "/names/nobody/plans", "/tenants/nobody"):
            assert (await node.ask("GET", f"/v1/status{path}"))[0] == 404

    with_node(tmp_path, test)


def test_names_and_tenants_come_in_pages(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for number in range(5):
            await put_name(node, f"n{number}", range(1), "op")
        found, after = [], ""
        while after is not None:
            page = await status_of(node, f"/names?tenant=alice&limit=2&after={after}", "op")
            found += [one["name"] for one in page["names"]]
            after = page["next"]
        assert found == [f"n{number}" for number in range(5)]
        page = await status_of(node, "/tenants?limit=1", "op")
        assert ([one["tenant"] for one in page["tenants"]], page["next"]) == (["alice"], "alice")
        page = await status_of(node, "/tenants?after=alice", "op")
        assert ([one["tenant"] for one in page["tenants"]], page["next"]) == (["bob"], None)
        for query in ("limit=0", "limit=1001", "after=%3Cscript%3E", "prefix=a%20b"):
            assert (await node.ask("GET", f"/v1/status/names?{query}", token="op"))[0] == 400

    with_node(tmp_path, test, tenant("alice", "op", "operate_tokens"), tenant("bob", "b"))


# traffic


def test_traffic_is_told_by_tenant(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 9000, "alice")
        url = f"/v1/chunks/{key_of(1).hex()}"
        first_level, *_ = Header.parse(stream).level_ends
        for end in (first_level, len(stream)):
            await node.ask("GET", url, token="alice", Range=f"bytes=0-{end - 1}")
        keys = json.dumps({"keys": [key_of(n).hex() for n in (1, 2, 3)]}).encode()
        await node.ask("POST", "/v1/lookup", keys, "alice")
        await node.ask("GET", url, token="bob")
        told = await status_of(node, token="alice")
        alice, bob = sorted(told["tenants"], key=lambda one: str(one["tenant"]))
        traffic = alice["traffic"]
        assert traffic["requests"] == 4
        assert traffic["lookups"] == {"found": 1, "missing": 2}
        assert traffic["reads"] == {"found": 2, "missing": 0}
        assert traffic["hit_ratio"] == pytest.approx(1 / 3, abs=1e-4)
        assert traffic["levels"] == {"1": 1, "3": 1}
        assert traffic["received_bytes"] == len(stream)
        assert traffic["sent_bytes"] > len(stream) + first_level
        assert 0 < traffic["p50_s"] <= traffic["p99_s"]
        assert sum(traffic["tier_hits"].values()) == 2
        assert bob["traffic"]["errors"] == {"not_found": 1}
        assert bob["traffic"]["reads"] == {"found": 0, "missing": 1}
        again = await status_of(node, "/tenants/alice", "alice")
        assert again["traffic"]["requests"] == 4  # looking at it is no traffic
        assert again["traffic"]["sent_bytes"] == traffic["sent_bytes"]

    tenants = tenant("alice", "alice", "operate_tokens"), tenant("bob", "bob")
    with_node(tmp_path, test, *tenants, store=two_tiers)


def two_tiers() -> TieredStore:
    above, below = (MemoryStore(2**24, open_policy("lru")) for _ in range(2))
    return TieredStore([Tier("memory", above, 1.0), Tier("disk", below, 1.0)])


def test_hits_are_told_by_tier(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, token="alice")
        url = f"/v1/chunks/{key_of(1).hex()}"
        await node.ask("GET", url, token="alice")
        [above, _] = node.node.depot.store.tiers
        [owner] = node.node.tenants
        await above.store.delete(owner.store_key("chunks", key_of(1)))
        await node.ask("GET", url, token="alice")
        told = await status_of(node, "/tenants/alice", "alice")
        assert told["traffic"]["tier_hits"] == {"memory": 1, "disk": 1}

    with_node(tmp_path, test, tenant("alice", "alice", "operate_tokens"), store=two_tiers)


def test_deliveries_under_way_are_told(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 400_000)
        path = f"/v1/chunks/{key_of(1).hex()}"
        reading = asyncio.create_task(node.ask("GET", path, Kdn_Client="engine-1"))
        while not (told := await status_of(node))["deliveries"]["longest"]:
            await asyncio.sleep(0.01)
        [one] = told["deliveries"]["longest"]
        assert (one["tenant"], one["client"]) == ("public", "engine-1")
        assert one["asked_bytes"] == len(stream)
        assert 0 <= one["sent_bytes"] < len(stream)
        assert (await reading)[2] == stream
        assert (await status_of(node))["deliveries"] == {"number": 0, "longest": []}

    with_node(tmp_path, test, egress_bits_per_s=4_000_000)


# who may see it


def test_only_operators_see_it(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await put_name(node, "plans", range(1), "publisher")
        for token in ("reader", "publisher", "other", "wrong", None):
            for path in PATHS:
                code, _, body = await node.ask("GET", path, token=token)
                assert code == (401 if token in ("wrong", None) else 403)
                assert set(json.loads(body)) == {"code", "message"}
                assert b"plans" not in body
                assert b"alice" not in body
        for path in PATHS:
            if "events" not in path:
                assert (await node.ask("GET", path, token="operator"))[0] == 200

    with_node(
        tmp_path, test, tenant("alice", "publisher"), tenant("a", "reader", "read_tokens"),
        tenant("b", "other"), tenant("c", "operator", "operate_tokens"),
    )  # fmt: skip


def test_no_token_and_no_secret_is_in_any_answer(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await put_name(node, "plans", range(1), "tok-publisher")
        hashes = [known for known, _, _ in node.node.tenants._hashes]
        for path in ("/", *PATHS):
            if "events" in path:
                continue
            _, headers, body = await node.ask("GET", path, token="tok-operator")
            said = body.decode() + str(headers)
            for secret in ("tok-operator", "tok-publisher", *hashes, "sha256:"):
                assert secret not in said

    tenants = tenant("alice", "tok-publisher"), tenant("c", "tok-operator", "operate_tokens")
    with_node(tmp_path, test, *tenants)


def test_the_page_may_run_its_own_script_and_nothing_else(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        code, headers, body = await node.ask("GET", "/")
        text = body.decode()
        assert code == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        policy = headers["Content-Security-Policy"]
        assert policy == policy_of(text)
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == (
            "nosniff",
            "DENY",
        )
        script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0]
        assert "innerHTML" not in re.sub(r"//.*", "", script)
        assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.findall(r""" on\w+=["']| style=["']""", text)

    with_node(tmp_path, test)


# the stream


async def events(node: Running, number: int, token: str | None = None) -> list[Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    found: list[Any] = []
    async with node.session.get(f"{node.url}/v1/status/events", headers=headers) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        while len(found) < number:
            event = (await answer.content.readuntil(b"\n\n")).decode()
            name, data = event.strip().split("\n")
            assert name == "event: status"
            found.append(json.loads(data.removeprefix("data: ")))
    return found


def test_the_stream_tells_what_changes(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        listening = asyncio.create_task(events(node, 4))
        while not node.node.status._listeners:
            await asyncio.sleep(0.01)
        await node.put_chunk(1)
        first, *others = await listening
        assert "history" in first
        assert all("history" not in one for one in others)
        assert others[-1]["known"]["chunks"] == 1
        assert others[-1]["node"]["now_s"] > first["node"]["now_s"]
        while node.node.status._listeners:
            await asyncio.sleep(0.01)
        assert node.node.status._making is None  # nobody listens: nothing is made

    with_node(tmp_path, test)


def test_listeners_are_bounded_and_let_the_node_stop(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        path = f"{node.url}/v1/status/events"
        opened = [await node.session.get(path) for _ in range(MAX_LISTENERS)]
        assert [one.status for one in opened] == [200] * MAX_LISTENERS
        code, _, body = await node.ask("GET", "/v1/status/events")
        assert (code, json.loads(body)["code"]) == (503, "overloaded")
        node.node.stopping = True
        for one in opened:
            async with asyncio.timeout(5):
                await one.read()  # it ends

    with_node(tmp_path, test)


def test_a_listener_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        big = {"filler": "x" * 4_000_000}

        async def snapshot(history: bool = True) -> Any:
            return big

        node.node.status.snapshot = snapshot
        _, writer = await asyncio.open_connection("127.0.0.1", node.listening.port, limit=1024)
        writer.write(b"GET /v1/status/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: node.node.status._listeners == 1)
        await until(lambda: node.node.status._listeners == 0)
        writer.close()

    with_node(tmp_path, test, write_timeout_s=0.5)


# several processes, and several places


def test_a_node_with_workers_tells_of_all_of_them(tmp_path: Path) -> None:
    async def work() -> None:
        async with processes(tmp_path, {"shutdown_timeout_s": 5.0}, workers=2) as node:
            clients = await node.connect(8)
            stream = chunk_stream(key_of(1), 50_000)
            path = f"/v1/chunks/{key_of(1).hex()}"
            code, _ = await clients[0].ask("PUT", path, stream, Kdn_Checksum=checksum(stream))
            assert code == 201
            for client in clients:
                assert (await client.ask("GET", path))[0] == 200
            for client in clients:
                told = json.loads((await client.ask("GET", "/v1/status"))[1])
                assert told["node"]["workers_answering"] == told["node"]["workers"] == 2
                assert told["known"]["chunks"] == 1
                assert told["traffic"]["reads"] == {"found": 8, "missing": 0}
                assert told["traffic"]["requests"] == 9
                assert told["traffic"]["received_bytes"] == len(stream)
                assert sum(told["traffic"]["tier_hits"].values()) == 8
                assert told["traffic"]["sent_bytes"] >= 8 * len(stream)
            code, page = await clients[0].ask("GET", "/")
            assert (code, page[:15]) == (200, b"<!doctype html>")

    run(work())


def test_a_region_tells_how_far_behind_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "region", link) as node,
        ):
            assert (await status_of(centre))["region"] is None
            link.cut()
            await node.put_chunk(1)
            while (told := await status_of(node))["region"]["centre_answers"]:
                await asyncio.sleep(0.05)
            assert told["node"]["role"] == "region"
            assert told["region"]["waiting_objects"] == 1
            assert told["health"]["status"] == "error"
            assert "centre_away" in [one["code"] for one in told["health"]["problems"]]
            link.mend()
            while (told := await status_of(node))["region"]["waiting_objects"]:
                await asyncio.sleep(0.05)
            while (await status_of(centre))["followers"] == 0:
                await asyncio.sleep(0.05)
            assert (await status_of(centre))["known"]["chunks"] == 1
            [feed] = told["region"]["feeds"]
            assert feed["tenant"] == "public"

    run(work())


# the parts


def test_latencies_are_within_a_quarter_and_grow_old() -> None:
    now_s = [0.0]
    traffic = Traffic(lambda: now_s[0])
    for milliseconds in range(1, 101):
        traffic.answered("a", 200, milliseconds / 1000)
    traffic.answered("a", 0, 500.0)  # cut: it says nothing
    latencies = traffic.told()["tenants"]["a"]["latencies"]
    assert sum(latencies) == 100
    assert quantile_s(latencies, 0.5) == pytest.approx(0.05, rel=0.25)
    assert quantile_s(latencies, 0.99) == pytest.approx(0.099, rel=0.25)
    assert quantile_s([0] * len(BOUNDS_S), 0.5) is None
    for at_s, left in ((61.0, 100), (122.0, 0)):
        now_s[0] = at_s
        assert sum(traffic.told()["tenants"]["a"]["latencies"]) == left


def test_counts_of_processes_are_added() -> None:
    tier = {"name": "disk", "answers": True, "hits": 1, "evicted": [["aa", "room", 1]]}
    one = {
        "tenants": {"a": {"requests": 1, "latencies": [1, 2], "errors": {"x": 1}}},
        "deliveries": [{"seconds": 1.0}], "tiers": [tier], "errors": {"x": 1},
    }  # fmt: skip
    other = {
        "tenants": {"a": {"requests": 2, "latencies": [0, 3], "errors": {}}, "b": {"requests": 5}},
        "deliveries": [{"seconds": 9.0}], "tiers": [{**tier, "answers": False}], "errors": {"y": 2},
    }  # fmt: skip
    assert merged([one, other]) == {
        "tenants": {
            "a": {"requests": 3, "latencies": [1, 5], "errors": {"x": 1}}, "b": {"requests": 5},
        },
        "deliveries": [{"seconds": 9.0}, {"seconds": 1.0}],
        "tiers": [
            {"name": "disk", "answers": False, "hits": 2, "evicted": [["aa", "room", 1]] * 2}
        ],
        "errors": {"x": 1, "y": 2},
    }  # fmt: skip


def test_a_process_that_begins_again_makes_no_rate_negative() -> None:
    history, none = History(), dict.fromkeys(OWN_CODES, 0)
    history._samples.append(Sample(0.0, 1000, 0, 10, 5, 5, none))
    rates = history.rates(Sample(10.0, 200, 50, 20, 6, 5, {**none, "internal": 3}))
    assert rates == {
        "sent_bytes_per_s": 0.0, "received_bytes_per_s": 5.0, "requests_per_s": 1.0,
        "hit_ratio": 1.0, "errors_per_s": 0.3,
    }  # fmt: skip
    assert history.recent_errors(Sample(10.0, 0, 0, 0, 0, 0, {**none, "internal": 3})) == {
        "internal": 3
    }


def test_every_problem_has_a_sentence() -> None:
    limits = [
        {"name": "file_system", "used": 99, "limit": 100, "may_fill": False},
        {"name": "connections", "used": 95, "limit": 100, "may_fill": False},
        {"name": "disk", "used": 100, "limit": 100, "may_fill": True},
    ]
    status = {
        "node": {"stopping": False, "workers": 4, "workers_answering": 3},
        "faults": {"the outbox": 2}, "limits": limits, "known": {"names_answer": False},
        "tiers": [{"name": "disk", "answers": False, "corruptions": 1}],
        "region": {
            "centre_answers": True, "names_late": True, "lost_objects": 1, "refused_objects": 1,
            "waiting_objects": 5000,
        },
    }  # fmt: skip
    found = problems_of(status, dict.fromkeys(OWN_CODES, 7))
    severities = [one.severity for one in found]
    assert severities == sorted(severities)  # errors first
    assert {one.code for one in found} == {
        "workers_missing", "faults", "tier_failing", "corruptions", "names_failing", *OWN_CODES,
        "disk_full", "limit_near", "names_late", "lost_objects", "refused_objects", "outbox_long",
    }  # fmt: skip
    assert all(one.message and "{" not in one.message for one in found)
