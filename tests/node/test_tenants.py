"""Tenants: tokens, namespaces, quotas, rates; "not yours" and "not there" are the same answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kdn.config import TenantSettings
from kdn.depot.tenants import tenants_of
from kdn.node.answers import Refusal
from kdn.node.app import ROUTES
from kdn.node.tenants import RateLimit, Right, Tenants, new_token, token_hash
from kdn.protocol.frames import split
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import (
    Running,
    checksum,
    chunk_stream,
    closed,
    connect,
    key_of,
    request,
    run,
    tenant,
    with_node,
)

ANN, BOB = tenant("ann", "token-a"), tenant("bob", "token-b")
KEY = key_of(1).hex()
QUESTIONS = [
    ("GET", f"/v1/chunks/{KEY}", None),
    ("HEAD", f"/v1/chunks/{KEY}", None),
    ("DELETE", f"/v1/chunks/{KEY}", None),
    ("GET", f"/v1/chunks?prefix={KEY}", None),
    ("GET", "/v1/names/n", None),
    ("GET", "/v1/names/n?version=1", None),
    ("GET", "/v1/names/n/history", None),
    ("GET", "/v1/names", None),
    ("DELETE", "/v1/names/n", None),
    ("DELETE", "/v1/names/n?chunks=true", None),
    ("POST", "/v1/lookup", json.dumps({"keys": [KEY]}).encode()),
    ("POST", "/v1/read", json.dumps({"spans": [{"key": KEY}]}).encode()),
    ("GET", "/v1/stats", None),
    ("GET", "/v1/names/changes?after=0", None),
    ("GET", "/v1/names/changes?after=1751364000000000", None),
]


def test_not_yours_is_not_there(tmp_path: Path) -> None:
    """Bob's answers are byte for byte those he got before Ann put anything."""

    async def test(node: Running) -> None:
        async def answers() -> list[tuple[int, dict[str, str], bytes]]:
            found = []
            for method, path, body in QUESTIONS:
                status, headers, said = await node.ask(method, path, body, "token-b")
                # How often names changed is told to all, not whose.
                kept = {n: text for n, text in headers.items() if n not in ("Date", "Kdn-Sequence")}
                found.append((status, kept, said))
            return found

        before = await answers()
        await node.put_chunk(1, token="token-a")
        manifest = json.dumps({"models": {"aa": {"chunks": [KEY]}}}).encode()
        assert (await node.ask("PUT", "/v1/names/n", manifest, "token-a"))[0] == 201
        assert await answers() == before
        assert (await node.ask("GET", f"/v1/chunks/{KEY}", token="token-a"))[0] == 200
        assert (await node.ask("GET", "/v1/names/n", token="token-a"))[0] == 200

    with_node(tmp_path, test, ANN, BOB)


def test_the_same_key_of_two_tenants(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        url = f"/v1/chunks/{KEY}"
        for seed, token in ((1, "token-a"), (2, "token-b")):
            body = chunk_stream(key_of(1), seed=seed)
            assert (await node.ask("PUT", url, body, token, Kdn_Checksum=checksum(body)))[0] == 201
        assert (await node.ask("GET", url, token="token-b"))[2] == chunk_stream(key_of(1), seed=2)
        assert (await node.ask("DELETE", url, token="token-b"))[0] == 204
        assert (await node.ask("GET", url, token="token-a"))[2] == chunk_stream(key_of(1), seed=1)
        await node.put_chunk(2, token="token-b", Kdn_Parent=KEY)
        body = json.dumps({"keys": [key_of(2).hex()]}).encode()
        _, _, answer = await node.ask("POST", "/v1/lookup", body, "token-b")
        ((frame, _),) = split(answer)
        assert frame.parent.hex() == KEY  # as the tenant says it, not as the store does

    with_node(tmp_path, test, ANN, BOB)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic token-a", "token-a",
     f"Bearer {token_hash('token-a')}", "Bearer token-a token-a", "Bearer \u00e9"],
)  # fmt: skip
def test_without_a_valid_token(tmp_path: Path, authorization: str | None) -> None:
    async def test(node: Running) -> None:
        headers = {} if authorization is None else {"Authorization": authorization}
        for path in (f"/v1/chunks/{KEY}", "/v1/names", "/metrics", "/nothing", "/v1/stats"):
            async with node.session.get(node.url + path, headers=headers) as answer:
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                assert (await answer.json())["code"] == "unauthorized"
        for path in ("/healthz", "/v1/openapi.json"):
            assert (await node.ask("GET", path))[0] == 200

    with_node(tmp_path, test, ANN, BOB)


MAY = {
    "list_objects": "rpo", "get_object": "rpo", "put_object": "po", "delete_object": "po",
    "lookup": "rpo", "read": "rpo", "list_names": "rpo", "get_name": "rpo", "put_name": "po",
    "delete_name": "po", "get_history": "rpo", "get_stats": "rpo", "get_openapi": "rpo",
    "get_health": "rpo", "get_metrics": "o", "estimate": "rpo", "get_changes": "rpo",
    "get_status": "o", "get_events": "o", "list_tenants": "o", "get_tenant": "o",
    "list_tenants_names": "o", "get_names_status": "o", "get_dashboard": "rpo",
}  # fmt: skip
"""Which tokens (read, publish, operate) each handler is for. Written out: the route table must not
be what it is compared with."""


def test_what_each_right_may_do(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for method, path, handler, _ in ROUTES:
            where = re.sub(r"\{collection:[^}]*\}", "chunks", path)
            where = where.format(key=KEY, name="n", tenant="ann") if "{" in where else where
            for token in "rp" if where.endswith("/events") else "rpo":  # those have no end
                body = b"{}" if method in ("PUT", "POST") else None
                status, _, said = await node.ask(method, where, body, token)
                if token in MAY[handler.__name__]:
                    assert status not in (401, 403, 405), (method, where, token, said)
                else:
                    assert (status, json.loads(said)["code"]) == (403, "forbidden")
                    assert "this token may" in json.loads(said)["message"]

    kinds = {"read_tokens": "r", "tokens": "p", "operate_tokens": "o"}
    tokens = {kind: (token_hash(token),) for kind, token in kinds.items()}
    with_node(tmp_path, test, TenantSettings("ann", **tokens))


def test_a_read_token_changes_nothing(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, token="p")
        url = f"/v1/chunks/{KEY}"
        assert (await node.ask("GET", url, token="r"))[2] == stream
        assert (await node.ask("DELETE", url, token="r"))[0] == 403
        other = chunk_stream(key_of(1), seed=9)
        etag = (await node.ask("HEAD", url, token="r"))[1]["ETag"]
        sent = {"Kdn_Checksum": checksum(other), "If_Match": etag}
        assert (await node.ask("PUT", url, other, "r", **sent))[0] == 403
        assert (await node.ask("GET", url, token="p"))[2] == stream

    tokens = {"tokens": (token_hash("p"),), "read_tokens": (token_hash("r"),)}
    with_node(tmp_path, test, TenantSettings("ann", **tokens))


def test_quota(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async def put(number: int, token: str = "t") -> int:
            body = chunk_stream(key_of(number), 4000)
            url = f"/v1/chunks/{key_of(number).hex()}"
            status, _, said = await node.ask("PUT", url, body, token, Kdn_Checksum=checksum(body))
            assert status != 507 or json.loads(said)["code"] == "quota_exceeded"
            return status

        assert [await put(n) for n in (1, 2, 3)] == [201, 201, 507]
        assert await put(1) == 200  # already there: costs nothing
        assert await put(3, "o") == 201  # another tenant has room
        assert (await node.ask("DELETE", f"/v1/chunks/{key_of(1).hex()}", token="t"))[0] == 204
        assert await put(3) == 201
        stats = json.loads((await node.ask("GET", "/v1/stats", token="t"))[2])
        assert stats["objects"] == 2
        assert stats["size_bytes"] <= stats["quota_bytes"] == 10000
        large = json.dumps({"text": "x" * 5000}).encode()
        assert (await node.ask("PUT", "/v1/names/n", large, "t"))[0] == 507

    with_node(tmp_path, test, tenant("t", "t", quota_bytes=10000), tenant("other", "o"))


def test_the_quota_is_checked_before_the_body(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for path, size_bytes in ((f"/v1/chunks/{KEY}", 20_000), ("/v1/names/n", 20_000)):
            reader, writer = await connect(node)
            sent = ("Authorization: Bearer t", f"Content-Length: {size_bytes}")
            sent += ("Kdn-Checksum: 0011223344556677", "Expect: 100-continue")
            writer.write(request(path, *sent, method="PUT"))
            answer = await closed(reader, 5)
            assert answer.startswith(b"HTTP/1.1 507")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "quota_exceeded"
            writer.close()

    with_node(tmp_path, test, tenant("t", "t", quota_bytes=10_000))


def test_evicted_bytes_are_free_again(tmp_path: Path) -> None:
    """The store makes room behind the quota's back: it is recounted before a refusal."""

    async def test(node: Running) -> None:
        for number in range(8):
            await node.put_chunk(number, 4000, token="t")

    def small() -> MemoryStore:
        return MemoryStore(12000, open_policy("lru"))

    with_node(tmp_path, test, tenant("t", "t", quota_bytes=30000), store=small)


def test_request_rate(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        answers = [await node.ask("GET", "/v1/names", token="t") for _ in range(8)]
        assert [status for status, _, _ in answers[:3]] == [200] * 3
        refused = [answer for answer in answers if answer[0] == 429]
        assert refused
        assert int(refused[0][1]["Retry-After"]) >= 1
        assert json.loads(refused[0][2])["code"] == "rate_limited"
        assert (await node.ask("GET", "/v1/names", token="o"))[0] == 200
        assert (await node.ask("GET", "/healthz"))[0] == 200

    with_node(tmp_path, test, tenant("t", "t", requests_per_s=3), tenant("other", "o"))


def test_the_bucket_by_the_clock() -> None:
    now_s = 0.0

    def take(limit: RateLimit) -> None:
        run(limit.take())

    limit = RateLimit(0.5, lambda: now_s)
    take(limit)
    with pytest.raises(Refusal) as caught:
        take(limit)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "2")
    now_s = 1.9
    with pytest.raises(Refusal):
        take(limit)
    now_s = 2.0
    take(limit)
    now_s = 1000.0  # it holds no more than one request however long it rested
    take(limit)
    with pytest.raises(Refusal):
        take(limit)
    unlimited = RateLimit(0, lambda: now_s)
    assert all(unlimited.take_now() for _ in range(1000))


def test_tokens_are_found_by_hash() -> None:
    token, hashed = new_token()
    assert token not in hashed
    assert len(token) >= 40
    assert new_token()[0] != token
    surrogates = b"\xdd\xff".decode(errors="surrogateescape")
    known = tenants_of([TenantSettings("x", (token_hash("other"), hashed))])
    tenants = Tenants(known, lambda: 0.0)
    assert tenants.authenticate(f"Bearer {token}")[0].name == "x"
    assert tenants.authenticate("bearer other")[1] is Right.PUBLISH
    with pytest.raises(Refusal):
        tenants.authenticate(f"Bearer {hashed}")
    with pytest.raises(Refusal):
        tenants.authenticate(f"Bearer {surrogates}")


def test_a_tenant_called_public_is_not_everybody() -> None:
    assert Tenants(tenants_of([]), lambda: 0.0).open
    tenants = Tenants(tenants_of([TenantSettings("public")]), lambda: 0.0)
    assert not tenants.open
    with pytest.raises(Refusal):
        tenants.authenticate(None)


def test_a_bad_client_id(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        assert (await node.ask("GET", "/v1/names", Kdn_Client="worker-1"))[0] == 200
        assert (await node.ask("GET", "/v1/names", Kdn_Client="a b"))[0] == 400
        assert (await node.ask("GET", "/v1/names", Kdn_Client="x" * 65))[0] == 400

    with_node(tmp_path, test)
