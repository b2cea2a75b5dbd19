"""A client of the package `redis` for whatever a URL names (`redis_address.py`).

Names and counts, which are small, are kept through it. The bytes of chunks go their own way
(`redis_wire.py`). Every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kdn.credentials import Credentials
from kdn.errors import UnsupportedError
from kdn.store.redis_address import CLUSTER, SENTINEL, RedisAddress, parse_redis_url

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    RedisClient: TypeAlias = Redis | RedisCluster

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Before another attempt, after a connection is lost or a Cluster has redirected."""
MAX_CONNECTIONS = 512


def open_redis(url: str, credentials: Credentials) -> RedisClient:
    """Nothing is connected yet. Close it with `aclose`."""
    return client_of(parse_redis_url(url, credentials))


def client_of(address: RedisAddress) -> RedisClient:
    """Answers are bytes."""
    try:
        import redis.asyncio as redis
        from redis.asyncio.cluster import ClusterNode
        from redis.asyncio.sentinel import Sentinel
    except ImportError as error:
        raise UnsupportedError(
            "Redis and Valkey need a package: pip install 'kdn[redis]'"
        ) from error

    settings = _settings(address)
    if address.kind == CLUSTER:
        nodes = [ClusterNode(host.host, host.port) for host in address.hosts]
        return redis.RedisCluster(startup_nodes=nodes, **settings)
    if address.kind == SENTINEL:
        waits = {name: value for name, value in settings.items() if not name.endswith("word")}
        waits.pop("username")
        sentinel = Sentinel(address.hosts, sentinel_kwargs=waits, **settings)  # type: ignore[no-untyped-call]
        found: Redis = sentinel.master_for(address.service)
        return _closing_all(found, sentinel.sentinels)
    [host] = address.hosts
    return redis.Redis(host=host.host, port=host.port, db=address.database, **settings)


def _closing_all(client: Redis, others: Sequence[Redis]) -> Redis:
    """A master's client knows nothing of those that were asked who the master is."""
    close = client.aclose

    async def aclose(close_connection_pool: bool | None = None) -> None:
        await close(close_connection_pool)
        for other in others:
            await other.aclose()

    client.aclose = aclose  # type: ignore[method-assign]
    return client


def _settings(address: RedisAddress) -> dict[str, Any]:
    from redis.asyncio.retry import Retry
    from redis.backoff import ExponentialWithJitterBackoff

    # Each pause is half of the longest one on average.
    pauses = ExponentialWithJitterBackoff(cap=LONGEST_PAUSE_S, base=FIRST_PAUSE_S)
    settings: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "socket_timeout": address.options.silence_s,
        "socket_connect_timeout": address.options.connect_s,
        "max_connections": MAX_CONNECTIONS,
        "retry": Retry(pauses, 1 + int(2 * address.options.deadline_s / LONGEST_PAUSE_S)),
    }
    if address.tls:
        settings |= {"ssl": True, "ssl_ca_certs": address.tls_ca}
    return settings
