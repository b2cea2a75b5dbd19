"""The store in Redis and Valkey: the contract over real servers, and what is special to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kdn.bench.servers import RedisClusterServers, RedisServer, SentinelServers
from kdn.credentials import Credentials
from kdn.store.base import Store
from kdn.store.redis import open_redis_store
from tests.servers import emptied
from tests.store.contract import StoreContract, closing


class RedisContract(StoreContract):
    evicts = False  # the server does
    counts = False
    url: str

    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with closing(open_redis_store(self.url, Credentials())) as store:
            yield store


class TestRedis(RedisContract):
    @pytest.fixture(autouse=True)
    def _serve(self, redis_server: RedisServer) -> None:
        emptied(redis_server)
        self.url = redis_server.url


class TestValkey(RedisContract):
    @pytest.fixture(autouse=True)
    def _serve(self, valkey_server: RedisServer) -> None:
        emptied(valkey_server)
        self.url = valkey_server.url.replace("redis://", "valkey://")


class TestCluster(RedisContract):
    """Of six, with a replica to wait for."""

    @pytest.fixture(autouse=True)
    def _serve(self, redis_cluster: RedisClusterServers) -> None:
        emptied(*(redis_cluster.servers[at] for at in redis_cluster.masters()))
        self.url = redis_cluster.url + "?wait=1"


class TestClusterReplicas(RedisContract):
    """Replicas are read from."""

    @pytest.fixture(autouse=True)
    def _serve(self, redis_cluster: RedisClusterServers) -> None:
        emptied(*(redis_cluster.servers[at] for at in redis_cluster.masters()))
        self.url = redis_cluster.url + "?replicas=1"


class TestSentinel(RedisContract):
    @pytest.fixture(autouse=True)
    def _serve(self, redis_sentinel: SentinelServers) -> None:
        emptied(redis_sentinel.servers[redis_sentinel.master()])
        self.url = redis_sentinel.url
