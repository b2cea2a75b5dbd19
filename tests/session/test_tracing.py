"""One request, from a session through a real node on real HTTP: one trace, one id, and why."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn import tracing
from kdn.cache.keys import cut
from kdn.delivery.publish import Values
from kdn.delivery.sink import HostSink
from kdn.node.logs import log_to
from kdn.request_log import find
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from tests.node.harness import Running, key_of, tenant, with_node
from tests.session.test_session import TINY, TOKENS, values
from tests.traces import Recorded, recorded, trace_of

READ, LOOKUP, PUT = "POST /v1/read", "POST /v1/lookup", "PUT /v1/{collection}/{key}"


async def served(session: Session) -> None:
    """Everything that a request does: publish, know, deliver."""
    chunks = cut(TOKENS, session.namespace)
    with tracing.request("engine", "r-1"):
        for chunk in chunks:
            session.publish(chunk, Values(values(chunks)), exact_until=None)
    assert await session.publisher.flush(30.0)
    with tracing.request("engine", "r-2"):
        known = await session.know(TOKENS)
        sink = HostSink.of(session.codec, known.chunks, torch.float32)
        got = await session.deliver(known.chunks, sink, known=known)
    assert got.num_ready == len(chunks)


def over_http(folder: Path, test: Callable[[Session, Running], Coroutine[Any, Any, Any]]) -> Any:
    async def work(node: Running) -> Any:
        own = SessionSettings(
            (node.url,), codec="exact", host_bytes=0, spool_bytes=0,
            request_log=folder / "requests.jsonl",
        )  # fmt: skip
        async with Session(own, TINY.spec, torch.float32) as session:
            return await test(session, node)

    return with_node(folder / "node", work)


def test_a_request_is_one_trace_from_the_client_to_the_node(tmp_path: Path) -> None:
    async def test(session: Session, node: Running) -> None:
        await served(session)

    with recorded() as spans:
        over_http(tmp_path, test)
    delivery = {trace_of(span) for span in spans.spans if _of(span, "r-2")}
    publishing = {trace_of(span) for span in spans.spans if _of(span, "r-1")}
    assert len(delivery) == len(publishing) == 1
    assert delivery != publishing
    assert _parents(spans, "r-2") == {
        "engine": {""},
        "kdn.know": {"engine"},
        "kdn.lookup": {"kdn.know"},
        LOOKUP: {"kdn.lookup"},
        "kdn.deliver": {"engine"},
        "kdn.plan": {"kdn.deliver"},
        "kdn.fetch": {"kdn.deliver"},
        READ: {"kdn.fetch"},
        "kdn.decode": {"kdn.deliver"},
    }
    assert _parents(spans, "r-1") == {
        "engine": {""},
        "kdn.encode": {"engine"},
        "kdn.publish": {"engine"},
        PUT: {"kdn.publish"},
    }
    [node_span, *_] = spans.named(READ)
    assert node_span.attributes is not None
    assert node_span.attributes["kdn.tenant"] == "public"
    assert node_span.attributes["kdn.status"] == 200


def test_what_the_host_holds_is_handed_over_in_a_span(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o700)

    async def test(session: Session, node: Running) -> None:
        own = replace(session.settings, host_bytes=1 << 24, host_folder=tmp_path / "host")
        async with Session(own, TINY.spec, torch.float32) as other:
            await served(other)

    with recorded() as spans:
        over_http(tmp_path, test)
        assert spans.parent_of(spans.one("kdn.hand_over")) == "kdn.deliver"


def _of(span: Any, request_id: str) -> bool:
    return bool(span.attributes.get("kdn.request") == request_id)


def _parents(spans: Recorded, request_id: str) -> dict[str, set[str]]:
    """Of each name of a span, the names of parents."""
    found: dict[str, set[str]] = {}
    for span in spans.spans:
        if _of(span, request_id):
            found.setdefault(span.name, set()).add(spans.parent_of(span))
    return found


class _Blocked:
    """A machine without OpenTelemetry."""

    def find_spec(self, name: str, *_: object) -> None:
        assert name.split(".")[0] != "opentelemetry", f"{name} was imported"


def test_off_all_goes_on_without_opentelemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "opentelemetry":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Blocked(), *sys.meta_path])

    async def test(session: Session, node: Running) -> None:
        await served(session)

    over_http(tmp_path, test)


def test_the_nodes_log_and_the_request_log_know_the_id(tmp_path: Path) -> None:
    async def test(session: Session, node: Running) -> None:
        await served(session)
        strange = {"X_Kdn_Request": "a b", "traceparent": "00-zz"}
        status, _, _ = await node.ask("GET", f"/v1/chunks/{key_of(9).hex()}", **strange)
        assert status == 404

    stream = io.StringIO()
    log_to(stream, "info")
    over_http(tmp_path, test)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    asked = {(one["method"], one["path"]): one.get("request") for one in lines if "path" in one}
    assert asked["POST", "/v1/lookup"] == "r-2"
    assert asked["POST", "/v1/read"] == "r-2"
    assert asked["GET", f"/v1/chunks/{key_of(9).hex()}"] is None
    assert {who for (method, _), who in asked.items() if method == "PUT"} == {"r-1"}
    told = [one["event"] for one in find(tmp_path / "requests.jsonl", "r-2")]
    assert told == ["know", "deliver"]
    told = [one["event"] for one in find(tmp_path / "requests.jsonl", "r-1")]
    assert sorted(told) == ["accepted"] * 3 + ["publish"] * 3


def test_a_plain_get_is_in_the_trace_too(tmp_path: Path) -> None:
    parent = f"00-{'1' * 32}-{'2' * 16}-01"

    async def test(node: Running) -> None:
        await node.put_chunk(1)
        path = f"/v1/chunks/{key_of(1).hex()}"
        headers = {"traceparent": parent, "X_Kdn_Request": "r-3"}
        assert (await node.ask("GET", path, **headers))[0] == 200

    with recorded() as spans:
        with_node(tmp_path, test)
        one = spans.one("GET /v1/{collection}/{key}")
        assert trace_of(one) == int("1" * 32, 16)
        assert _of(one, "r-3")


def test_strangers_leave_no_spans(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        status, _, _ = await node.ask(
            "GET", "/v1/names", traceparent=f"00-{'1' * 32}-{'2' * 16}-01"
        )
        assert status == 401

    with recorded() as spans:
        with_node(tmp_path, test, tenant("a", "token"))
        assert not spans.spans
