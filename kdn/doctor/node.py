"""The node: is it there, how far away, is it what this client expects, and does it work?"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kdn.doctor.check import Finding, Situation, Skip, fail, note, ok
from kdn.errors import KdnError, NotAllowedError, UnavailableError
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.tls import client_tls, explain

T = TypeVar("T")

LIMITS = HttpLimits(connect_s=3.0, silence_s=5.0, deadline_s=8.0)
PINGS = 5
MAX_SKEW_S = 30.0
"""Of clocks: certificates and the ages of names are judged by them."""
LEAST_DAYS = 14
LINK_BYTES, LINK_S = 4 << 20, 3.0
"""A link is measured with so much at most, for so long."""
LISTED = 64
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KEY = re.compile(r"[0-9a-f]{2,128}")


def ask_all(
    situation: Situation, question: Callable[[NodeClient], Awaitable[T]]
) -> list[tuple[str, T]]:
    """Every node's answer. UnavailableError names the one that gives none."""
    own = situation.client.credentials
    tls = client_tls(own.tls_ca)

    async def one(url: str) -> tuple[str, T]:
        node = NodeClient(url, token=own.token, limits=LIMITS, tls=tls)
        try:
            return url, await question(node)
        finally:
            await node.close()

    async def every() -> list[tuple[str, T]]:
        return [await one(url) for url in situation.nodes]

    return asyncio.run(every())


def ask_those_there(
    situation: Situation, question: Callable[[NodeClient], Awaitable[T]]
) -> list[tuple[str, T]]:
    """For checks after the first, which has said that a node is away."""
    try:
        return ask_all(situation, question)
    except UnavailableError:
        raise Skip("the node does not answer") from None


def check_node(situation: Situation) -> Finding:
    async def ping(node: NodeClient) -> float:
        taken = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            await node.ask("GET", "/healthz")
            taken.append(time.perf_counter() - begin)
        return median(taken)

    try:
        found = ask_all(situation, ping)
    except KdnError as error:
        if situation.is_default_place:
            return note("none at the default address", "Start one with `kdn node`, or give --url.")
        return fail(str(error), "Is it running (`kdn node`), is the URL right, is a wall between?")
    return ok(", ".join(f"{url} answers in {1e3 * taken:.1f} ms" for url, taken in found))


def check_node_clock(situation: Situation) -> Finding:
    async def skew(node: NodeClient) -> float | None:
        begin = time.time()
        reply = await node.ask("GET", "/healthz")
        here = (begin + time.time()) / 2
        with suppress(TypeError, ValueError, KeyError):
            return parsedate_to_datetime(reply.headers["Date"]).timestamp() - here
        return None

    found = ask_those_there(situation, skew)
    told = [(url, seconds) for url, seconds in found if seconds is not None]
    for url, seconds in told:
        if abs(seconds) > MAX_SKEW_S:
            return fail(
                f"the clock of {url} is {seconds:+.0f} s from this one",
                "Let both machines follow a time service.",
            )
    if not told:
        return note("not checked: the node does not tell the time")
    return ok(f"within {max(1.0, max(abs(seconds) for _, seconds in told)):.0f} s of the node's")


def check_link(situation: Situation) -> Finding:
    async def throughput(node: NodeClient) -> str:
        page = (await node.ask("GET", "/v1/chunks", query={"limit": str(LISTED)})).json
        listed = page.get("objects", []) if isinstance(page, dict) else []
        got, begin = 0, time.perf_counter()
        for key in _keys(listed):
            reply = await node.ask(
                "GET", f"/v1/chunks/{key}", expect=(200, 404), limit_bytes=LINK_BYTES
            )
            got += len(reply.body) if reply.status == 200 else 0
            if got >= LINK_BYTES or time.perf_counter() - begin > LINK_S:
                break
        taken = time.perf_counter() - begin
        if not got:
            return f"{node.url} not measured: it has no chunk to read"
        return f"{node.url} {8e-6 * got / taken:.0f} Mbit/s ({got / 1e6:.1f} MB read)"

    return ok(", ".join(told for _, told in ask_those_there(situation, throughput)))


def _keys(listed: Any) -> list[str]:
    """Of the largest chunks first, among those that may be read whole."""
    sizes = {
        one["key"]: one["size_bytes"]
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict)
        and isinstance(one.get("key"), str)
        and _KEY.fullmatch(one["key"])
        and isinstance(one.get("size_bytes"), int)
        and one["size_bytes"] <= LINK_BYTES
    }
    return sorted(sizes, key=lambda key: -sizes[key])


def check_store(situation: Situation) -> Finding:
    """What is behind the node, or the place itself where there is none."""

    async def held(node: NodeClient) -> str:
        try:
            await node.ask("GET", "/healthz")
        except UnavailableError:
            raise Skip("the node does not answer") from None
        told = (await node.ask("GET", "/v1/stats")).json
        objects, size = (_count(told, name) for name in ("objects", "size_bytes"))
        waiting = _count(told, "waiting_objects")
        more = f", {waiting} wait for the centre" if waiting else ""
        return f"{node.url}: {objects} objects, {size / 1e9:.2f} GB{more}"

    try:
        found = ask_all(situation, held)
    except NotAllowedError as error:
        return fail(str(error), "Give the tenant's token: --token-file, KDN_CLIENT_TOKEN_FILE.")
    except KdnError as error:
        return fail(str(error), "The node's log says what its store lacks.")
    return ok(", ".join(told for _, told in found))


def _count(told: Any, name: str) -> int:
    found = told.get(name) if isinstance(told, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def check_versions(situation: Situation) -> Finding:
    """The node describes its protocol; so does this kdn."""
    from kdn.node.openapi import document

    async def described(node: NodeClient) -> Any:
        return (await node.ask("GET", "/v1/openapi.json")).json

    own = document()
    for url, told in ask_those_there(situation, described):
        if not isinstance(told, dict) or not isinstance(told.get("paths"), dict):
            return fail(f"{url} does not describe itself as a kdn node", "Is the URL right?")
        theirs, ours = _version(told), _version(own)
        if theirs != ours:
            return fail(f"{url} speaks protocol {theirs}, this kdn {ours}", "Update the older one.")
        if lacks := sorted(set(own["paths"]) - set(told["paths"])):
            return fail(f"{url} is older: it lacks {', '.join(lacks)}", "Update the node.")
        if more := sorted(set(told["paths"]) - set(own["paths"])):
            return note(f"{url} is newer: it also has {', '.join(more)[:200]}")
    return ok(f"node and client speak protocol {_version(own)}")


def _version(told: dict[str, Any]) -> str:
    info = told.get("info")
    return str(info.get("version"))[:20] if isinstance(info, dict) else "unknown"


def check_tls(situation: Situation) -> Finding:
    own = situation.client.credentials
    told = []
    for url in situation.nodes:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme != "https":
            if own.token and host not in LOOPBACK:
                advice = "Set tls_cert and tls_key at the node, and use https."
                return fail(f"the token travels to {host} in the clear", advice)
            told.append(f"{host}: none")
            continue
        context = client_tls(own.tls_ca) or ssl.create_default_context()
        try:
            with (
                socket.create_connection((host, parts.port or 443), LIMITS.connect_s) as plain,
                context.wrap_socket(plain, server_hostname=host) as wrapped,
            ):
                certificate = wrapped.getpeercert() or {}
        except ssl.SSLError as error:
            return fail(f"{url}: {explain(error)}", "")
        except OSError:
            raise Skip("the node does not answer") from None
        left_s = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
        days = int(left_s // 86400)
        if days < LEAST_DAYS:
            return fail(f"the certificate of {host} ends in {days} days", "Renew it at the node.")
        told.append(f"{host}: valid for {days} days")
    return ok(", ".join(told))
