"""URLs of Redis: what they mean, and what is refused by name."""

from __future__ import annotations

import asyncio

import pytest

from kdn.bench.servers import RedisClusterServers, RedisServer, SentinelServers
from kdn.credentials import Credentials
from kdn.errors import UnsupportedError
from kdn.store.redis_address import Address, RedisOptions, parse_redis_url
from kdn.store.redis_connection import open_redis
from kdn.store.redis_topology import slot_of
from tests.servers import emptied


def test_a_url_says_where_and_how() -> None:
    one = parse_redis_url("redis://me:p%40ss@host:7000/3", Credentials())
    assert (one.kind, one.hosts, one.database) == ("single", (Address("host", 7000),), 3)
    assert (one.username, one.password, one.tls) == ("me", "p@ss", False)
    several = parse_redis_url("valkeys+sentinel://[::1],b:7/main?wait=2", Credentials(tls_ca="ca"))
    assert (several.kind, several.service) == ("sentinel", "main")
    assert several.hosts == (Address("::1", 26379), Address("b", 7))
    assert (several.tls, several.tls_ca, several.options.wait) == (True, "ca", 2)
    cluster = parse_redis_url("valkey+cluster://a,b?replicas=1&ttl_s=60", Credentials(token="t"))
    assert (cluster.password, cluster.options) == ("t", RedisOptions(replicas=True, ttl_s=60.0))


def test_no_password_is_shown() -> None:
    address = parse_redis_url("redis://me:secret@host", Credentials())
    assert "secret" not in str(address) + repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://a", "redis://", "redis://a,b", "redis://a:0", "redis://a:99999", "redis://a b",
        "redis://a/x", "redis://a/-1", "redis+cluster://a/1", "redis+sentinel://a",
        "redis+sentinel://a/b/c", "redis+other://a", "redis://a?nothing=1", "redis://a?wait",
        "redis://a?wait=1&wait=2", "redis://a?wait=-1", "redis://a?deadline_s=nan",
        "redis://a?deadline_s=inf", "redis://a?prefix={}", "redis://a?replicas=2", "redis://a?=",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedError):
        parse_redis_url(url, Credentials())


def test_slots_are_those_of_a_cluster(redis_cluster: RedisClusterServers) -> None:
    for key in (b"", b"key", b"{a}b", b"{}b", b"a{b", b"a}b{c}d", b"kdn:{6b6579}:1", bytes(256)):
        assert redis_cluster.servers[0].ask("CLUSTER", "KEYSLOT", key) == slot_of(key)


def test_the_package_redis_reaches_all_of_them(
    redis_server: RedisServer,
    valkey_server: RedisServer,
    redis_cluster: RedisClusterServers,
    redis_sentinel: SentinelServers,
) -> None:
    async def trip(url: str) -> None:
        client = open_redis(url, Credentials())
        try:
            async with asyncio.timeout(10):
                assert await client.set("trip", b"\xff\x00") is True
                assert await client.get("trip") == b"\xff\x00"
                assert await client.delete("trip") == 1
        finally:
            await client.aclose()

    emptied(redis_server)
    for server in (redis_server, valkey_server, redis_cluster, redis_sentinel):
        asyncio.run(trip(server.url))
