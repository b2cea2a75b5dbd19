"""Hostile bytes on the wire: no fault, no hang, and nothing learned about another tenant.

Every case is sent to two nodes by a tenant who owns nothing: at one of them another tenant owns
what is asked for, at the other nobody does. The answers must be the same, byte for byte.
KDN_FUZZ_CASES=10000 for a long run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node.harness import Running, checksum, config_for, key_of, run, running, tenant

CASES = int(os.environ.get("KDN_FUZZ_CASES", "600"))
AT_ONCE = 200
KEYS = [key_of(number).hex() for number in range(1, 6)]
NAMES = ["handbook", "n", "a.b"]
ALLOWED = {100, *range(200, 431), 503, 507}
ETAG = re.compile(rb'"etag":"\w+"')
DATE = re.compile(rb"\r\nDate: [^\r]*")
BOBS = (b"PUT", b"DELETE", b"/v1/names", b"/v1/objects", b"/v1/stats")
"""What Bob's own writes change, which run at the same time; `test_tenants.py` asks these, too."""
TOKEN = "Authorization: Bearer token-b"


def key(rng: random.Random) -> str:
    good = rng.choice(KEYS)
    return rng.choice(
        [good, good, good, good[:-1], good.upper(), "", "%00", "..", good * 9, "\xe9"]
    )


def path(rng: random.Random) -> str:
    collection = rng.choice(["chunks", "chunks", "profiles", "objects", "names", "chunkS", ""])
    thing = rng.choice(NAMES) if collection == "names" else key(rng)
    query = rng.choice([
        "", "", "?", "?limit=2", "?limit=-1", "?after=zz", "?chunks=true", "?%", "?a=b&a=c",
        "?version=99999999999999999999", "?version=\u0663",
    ])  # fmt: skip
    return rng.choice([
        f"/v1/{collection}/{thing}{query}", f"/v1/{collection}{query}",
        f"/v1/names/{thing}/history", "/v1/lookup", "/v1/read", "/metrics", "/v1/stats", "/", "*",
        "//", "/v1/chunks/../names", "http://other/v1/names", "/" + "a" * 9000,
        f"/v1/chunks/{thing}#x",
    ])  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> object:
    """Anything that JSON can say, biased to what the node asks for."""
    leaf = [
        None, True, -1, 0, 5, 2**63, 2**70, 1e308, -0.0, "", "x", rng.choice(KEYS), key(rng), [],
        {},
    ]  # fmt: skip
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(leaf)
    if rng.random() < 0.4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    members = ["keys", "spans", "key", "start", "end", "etag", "collection", "head_bytes", "models",
               "chunks", "profile", "aa"]  # fmt: skip
    return {rng.choice(members): value(rng, depth + 1) for _ in range(rng.randrange(5))}


def body(rng: random.Random) -> bytes:
    spans = [{"key": k, "start": rng.randrange(9), "end": rng.choice([None, 9, 10**18])}
             for k in KEYS]  # fmt: skip
    good = rng.choice([{"keys": KEYS}, {"spans": spans}, {"models": {"aa": {"chunks": KEYS}}}])
    text = json.dumps(good if rng.random() < 0.5 else value(rng)).encode()
    return rng.choice([
        text, text, text[: rng.randrange(len(text) + 1)], text + b"}", b"\x00" * 50,
        b"[" * 3000, rng.randbytes(200), b'{"keys":' + b"9" * 5000 + b"}",
        text.decode().encode("utf-16"),
    ])  # fmt: skip


def headers(rng: random.Random, sent: bytes) -> list[str]:
    size = len(sent)
    asked = rng.choice(["0-", "5-4", "-0", "-5", "a-b", "0-1,2-3", "9" * 30 + "-", "-"])
    odd = [
        f"Range: bytes={asked}",
        "Range: lines=1-2", "If-Range: junk", 'If-None-Match: "x", *', "If-Match: *", 'If-Match: "',
        "Kdn-Checksum: 0000000000000000", "Kdn-Checksum: x", "Kdn-Etag: 00", "Kdn-Parent: ..",
        "Kdn-Saved-Seconds: nan", "Kdn-Saved-Seconds: 1e400", "Kdn-Client: a b", "Kdn-Client: c1",
        "Expect: 100-continue", "Expect: x", "Content-Encoding: gzip", "Content-Encoding: br",
        "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Connection: close",
        "Connection: upgrade", "Upgrade: websocket", f"Content-Length: {size}",
        "Content-Length: -1", "Content-Length: 99999999999999999999", f"Content-Length: {size + 5}",
        "Content-Length: 0x5",
        f"X: {'y' * 9000}", ": nameless", "No colon", "Bad\x00: x", " folded: x", "Cookie: a=b",
        "Content-Type: text/plain", "Accept-Encoding: gzip", "Host: other",
        "Authorization: Basic x",
    ]  # fmt: skip
    lines = [] if rng.random() < 0.1 else [f"Content-Length: {size}"]
    lines += rng.sample(odd, rng.choice([0, 0, 1, 1, 2, 4]))
    lines += [f"H{i}: v" for i in range(rng.choice([0, 0, 0, 0, 0, 200]))]
    rng.shuffle(lines)
    return ["Host: x", TOKEN, *lines] if rng.random() < 0.95 else lines


def request(rng: random.Random) -> bytes:
    method = rng.choice(["GET", "GET", "GET", "HEAD", "PUT", "POST", "POST", "DELETE", "PATCH",
                         "OPTIONS", "CONNECT", "get", "\x00", "TRACE"])  # fmt: skip
    version = rng.choice(["HTTP/1.1"] * 12 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9", "junk", ""])
    sent = body(rng) if method in ("PUT", "POST") or rng.random() < 0.1 else b""
    head = "\r\n".join([f"{method} {path(rng)} {version}", *headers(rng, sent), "", ""])
    return head.encode("utf-8", "surrogateescape") + sent


def plausible(rng: random.Random) -> bytes:
    """What a client might really send, with at most one oddity."""
    thing, name = rng.choice(KEYS), rng.choice(NAMES)
    spans = [
        {"key": k, "start": rng.randrange(9), "end": rng.choice([None, 9, 10**18])} for k in KEYS
    ]
    method, where, sent = rng.choice([
        ("GET", f"/v1/chunks/{thing}", None), ("HEAD", f"/v1/chunks/{thing}", None),
        ("DELETE", f"/v1/chunks/{thing}", None), ("GET", "/v1/chunks?limit=2", None),
        ("POST", "/v1/lookup", {"keys": rng.choices(KEYS, k=4)}), ("GET", "/v1/stats", None),
        ("POST", "/v1/lookup", {"keys": KEYS, "head_bytes": rng.choice([0, 9, 65536, 65537])}),
        ("POST", "/v1/read", {"spans": spans}), ("GET", "/metrics", None),
        ("GET", f"/v1/names/{name}", None), ("PUT", f"/v1/names/{name}", {"a": value(rng)}),
        ("DELETE", f"/v1/names/{name}?chunks=true", None), ("GET", "/v1/names?prefix=n", None),
        ("PUT", f"/v1/objects/{thing}", {"anything": 1}),
    ])  # fmt: skip
    text = b"" if sent is None else json.dumps(sent).encode()
    odd = [
        "Range: bytes=0-9", "Range: bytes=9-", "Range: bytes=-1", 'If-None-Match: "00"',
        "If-Match: *", "If-None-Match: *", "Kdn-Client: c1", "Kdn-Etag: 00", 'If-Range: "x"',
        f"Kdn-Checksum: {checksum(text)}", "Kdn-Parent: aa", "Expect: 100-continue",
    ]  # fmt: skip
    lines = ["Host: x", TOKEN, f"Content-Length: {len(text)}", *rng.sample(odd, rng.randrange(4))]
    return "\r\n".join([f"{method} {where} HTTP/1.1", *lines, "", ""]).encode() + text


def garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 2000))


def truncated(rng: random.Random) -> bytes:
    data = request(rng)
    return data[: rng.randrange(1, len(data))]


def flipped(rng: random.Random) -> bytes:
    data = bytearray(request(rng))
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def pipelined(rng: random.Random) -> bytes:
    return b"".join(request(rng) for _ in range(rng.randrange(2, 5)))


def chunked(rng: random.Random) -> bytes:
    parts = rng.choice(
        [b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n\r\n", b"0\r\n"]
    )
    head = ["POST /v1/read HTTP/1.1", "Host: x", TOKEN, "Transfer-Encoding: chunked", "", ""]
    return "\r\n".join(head).encode() + parts


KINDS: list[Callable[[random.Random], bytes]] = [plausible] * 5 + [request] * 3
KINDS += [garbage, truncated, flipped, pipelined, chunked]


async def send(node: Running, data: bytes) -> bytes:
    """All that the node says until it closes the connection: it must, and soon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.listening.port)
    try:
        writer.write(data)
        async with asyncio.timeout(15):
            return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]


def test_no_fault_no_hang_no_leak(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenants = [tenant("ann", "token-a"), tenant("bob", "token-b")]
    settings = {"idle_timeout_s": 0.4, "body_timeout_s": 0.4, "shutdown_timeout_s": 2.0}
    empty = config_for(tmp_path / "empty", *tenants, **settings)
    owned = config_for(tmp_path / "owned", *tenants, **settings)

    async def work() -> None:
        async with running(empty) as nobodys, running(owned) as anns:
            for number in range(1, 6):
                await anns.put_chunk(number, token="token-a")
            for name in NAMES:
                manifest = json.dumps({"models": {"aa": {"chunks": KEYS}}}).encode()
                await anns.ask("PUT", f"/v1/names/{name}", manifest, "token-a")
            for first in range(0, CASES, AT_ONCE):
                cases = range(first, min(first + AT_ONCE, CASES))
                await asyncio.gather(*(compare(nobodys, anns, number) for number in cases))
                await forget_all(nobodys, anns)
            for number in range(1, 6):
                url = f"/v1/chunks/{key_of(number).hex()}"
                assert (await anns.ask("GET", url, token="token-a"))[0] == 200
            assert nobodys.node.num_requests == anns.node.num_requests == 0

    assert logging.getLogger("kdn").propagate  # otherwise a fault would not be seen below
    with caplog.at_level(logging.ERROR):
        run(work(), deadline_s=30 + CASES / 5)
    assert [record.getMessage() for record in caplog.records] == []


async def compare(nobodys: Running, anns: Running, number: int) -> None:
    """Send one case to both."""
    rng = random.Random(number)
    data = rng.choice(KINDS)(rng)
    answers = await asyncio.gather(send(nobodys, data), send(anns, data))
    for answer in answers:
        assert set(statuses(answer)) <= ALLOWED, (number, data[:500], answer[:500])
    if not any(word in data for word in BOBS):
        one, two = (DATE.sub(b"", answer) for answer in answers)
        assert one == two, (number, data[:500])


async def forget_all(*nodes: Running) -> None:
    """What Bob's requests happened to make is removed, so that no case depends on another."""
    for node in nodes:
        for name in NAMES:
            await node.ask("DELETE", f"/v1/names/{name}", token="token-b")


def test_every_question_about_anothers_name_is_answered_alike(tmp_path: Path) -> None:
    """Names one by one, as Bob may have made some in the fuzzed run."""
    tenants = [tenant("ann", "token-a"), tenant("bob", "token-b")]

    async def work() -> None:
        async with (
            running(config_for(tmp_path / "empty", *tenants)) as nobodys,
            running(config_for(tmp_path / "owned", *tenants)) as anns,
        ):
            await anns.ask("PUT", "/v1/names/n", b"{}", "token-a")
            asked = [
                ("GET", "/v1/names/n"), ("GET", "/v1/names/n/history"), ("DELETE", "/v1/names/n"),
                ("GET", "/v1/names?prefix=n"), ("PUT", "/v1/names/n"), ("GET", "/v1/names/n"),
                ("DELETE", "/v1/names/n?chunks=true"),
            ]  # fmt: skip
            for method, where in asked:
                sent = b"{}" if method == "PUT" else None
                one = await nobodys.ask(method, where, sent, "token-b", If_None_Match="*")
                two = await anns.ask(method, where, sent, "token-b", If_None_Match="*")
                assert one[0] == two[0]
                assert re.sub(rb'"etag":"\w+"', b"", one[2]) == re.sub(
                    rb'"etag":"\w+"', b"", two[2]
                )

    run(work())
