"""Scripts on the one server that holds all names: the server, the master behind Sentinel, or the
shard of a Cluster that has their slot, wherever that is at the moment.

A write and the `WAIT` for its replicas go over one connection: on another one, `WAIT` would speak
of other writes. What fails in a way that may pass (a lost connection, a failover, a slot that
moves) is tried again until the deadline: every write can be sent twice (`redis_scripts.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kdn.credentials import Credentials
from kdn.errors import NoSpaceError, StoreError, UnsupportedError
from kdn.store.redis_address import CLUSTER, parse_redis_url
from kdn.store.redis_connection import client_of

PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.3
INFO_S = 60.0
"""How long it is believed whether a server evicts names."""


class RedisPrimary:
    def __init__(self, url: str, credentials: Credentials) -> None:
        address = parse_redis_url(url, credentials)
        self.name = str(address)
        self.options = address.options
        self.tag = f"{address.options.prefix}:{{{address.options.prefix}:names}}"
        """Every key begins with it."""
        self._is_cluster = address.kind == CLUSTER
        self._client: Any = client_of(address)
        self._checked_s = -INFO_S

    async def read(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        return await self._try(lambda connection: self._eval(connection, script, keys, args))

    async def write(
        self, script: str, keys: Sequence[str], *args: Any, may_be_evicted: bool = False
    ) -> bytes:
        """What a script answers, when as many replicas have it as the options say; StoreError if
        they have not in time: then it may have happened. UnsupportedError where the server might
        evict what must not be."""

        async def work(connection: Any) -> bytes:
            if not may_be_evicted:
                await self._check_evictions(connection)
            answer: bytes = await self._eval(connection, script, keys, args)
            await self._wait(connection)
            return answer

        found: bytes = await self._try(work)
        return found

    async def _eval(
        self, connection: Any, script: str, keys: Sequence[str], args: Sequence[Any]
    ) -> Any:
        full = [f"{self.tag}:{key}" for key in keys]
        return await _ask(connection, "EVAL", script, len(full), *full, *args)

    async def _wait(self, connection: Any) -> None:
        replicas = self.options.wait
        if replicas is None:
            told = _info(await _ask(connection, "INFO", "replication"))
            replicas = min(1, int(told.get("connected_slaves", 0)))
        if not replicas:
            return
        wait_ms = int(1000 * self.options.wait_s)
        reached = await _ask(connection, "WAIT", replicas, wait_ms)
        if reached < replicas:
            raise StoreError(f"{self.name}: {reached} of {replicas} replicas have it")

    async def _check_evictions(self, connection: Any) -> None:
        """UnsupportedError if the server may evict names."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._checked_s < INFO_S:
            return
        told = _info(await _ask(connection, "INFO", "memory"))
        policy = told.get("maxmemory_policy", "")
        if int(told.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise UnsupportedError(
                f"{self.name} evicts any key when it is full (maxmemory-policy {policy}), names as "
                "well: set volatile-lru there, and ttl_s in the URL, or keep names elsewhere"
            )
        self._checked_s = now_s

    # connections

    async def _try(self, work: Any) -> Any:
        from redis import exceptions as wrong

        loop, pause_s = asyncio.get_running_loop(), PAUSE_S
        end_s = loop.time() + self.options.deadline_s
        while True:
            try:
                async with asyncio.timeout_at(end_s), self._connection() as connection:
                    return await work(connection)
            except wrong.OutOfMemoryError as error:
                raise NoSpaceError(f"{self.name}: {error}") from error
            except (wrong.AuthenticationError, wrong.NoPermissionError) as error:
                raise StoreError(f"{self.name}: {error}") from error
            except (wrong.RedisError, OSError, TimeoutError) as error:
                if loop.time() + pause_s >= end_s or not _may_pass(error):
                    raise StoreError(f"{self.name}: {error or type(error).__name__}") from error
                await self._learn(error)
            await asyncio.sleep(random.uniform(0.5, 1) * pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _learn(self, error: Exception) -> None:
        """Where the names' slot is now, if it may have moved."""
        if self._is_cluster:
            self._client._initialize = True  # at the next use

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """One connection for oneself. One that was left in the middle of an answer is closed."""
        if self._is_cluster:
            await self._client.initialize()
            node = self._client.get_node_from_key(self.tag)
            connection, release = node.acquire_connection(), node.release
        else:
            pool = self._client.connection_pool
            connection, release = await pool.get_connection(), pool.release
        try:
            yield connection
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            released = release(connection)
            if released is not None:
                await released

    async def close(self) -> None:
        await self._client.aclose()


async def _ask(connection: Any, *command: Any) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _may_pass(error: Exception) -> bool:
    """Not a mistake of ours, but something that a failover or a reshard brings along."""
    from redis import exceptions as wrong

    passing = (
        wrong.ConnectionError, wrong.TimeoutError, wrong.ReadOnlyError, wrong.BusyLoadingError,
        wrong.TryAgainError, wrong.ClusterDownError, wrong.MovedError, wrong.AskError,
        wrong.RedisClusterException, wrong.MasterDownError, OSError, TimeoutError,
    )  # fmt: skip
    return isinstance(error, passing)


def _info(answer: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in answer.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, _, value in lines}
