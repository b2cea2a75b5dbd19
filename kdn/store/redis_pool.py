"""Connections to Redis servers, kept and used again. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import NamedTuple

from aiohappyeyeballs import start_connection

from kdn.errors import NotAllowedError, StoreError
from kdn.store.redis_address import CLUSTER, SENTINEL, Address, RedisAddress
from kdn.store.redis_exchange import RedisConnection
from kdn.store.redis_wire import Command, CutError, ErrorReply, Job, Reply
from kdn.store.tls import client_tls, explain

CONNECTIONS = 32
"""To one server."""
CLOSE_S = 1.0
NEXT_ADDRESS_S = 0.25
"""After so long without an answer, the next address of a name is tried beside it."""
TRANSIENT = ("TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "UNBLOCKED", "BUSY")
"""Errors that another server, or some patience, may do away with."""
NOT_ALLOWED = ("NOAUTH", "WRONGPASS", "NOPERM")


class Role(Enum):
    MASTER = "master"
    REPLICA = "replica"
    GUIDE = "guide"
    """Is asked where others are: a Sentinel, or any server of a Cluster."""


class Server(NamedTuple):
    address: Address
    role: Role


class Pools:
    """Of all servers of one address."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._tls = (
            (client_tls(address.tls_ca) or ssl.create_default_context()) if address.tls else None
        )
        self._pools: dict[Server, _Pool] = {}
        self._closed = False

    async def ask(self, server: Server, jobs: Sequence[Job], *, asking: bool = False) -> None:
        """CutError if the server is not there, or goes; then some jobs may be answered."""
        if self._closed:
            raise StoreError(f"{self._address}: the store was closed")
        options = self._address.options
        silence_s = options.silence_s
        if any(job.writes for job in jobs):  # a server that waits for replicas says nothing
            silence_s = max(silence_s, options.wait_s + 1)
        try:
            async with self._pool(server).leased(self, server) as connection:
                await connection.ask(jobs, silence_s, asking=asking)
        except CutError as error:
            raise CutError(f"{server.address}: {error}") from error
        except (OSError, TimeoutError) as error:
            raise CutError(f"{server.address}: {explain(error)}") from error

    async def connect(self, server: Server, pool: _Pool) -> RedisConnection:
        (host, port), loop = server.address, asyncio.get_running_loop()
        async with asyncio.timeout(self._address.options.connect_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = await start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)
            _, connection = await loop.create_connection(
                lambda: RedisConnection(pool.lost),
                sock=sock,
                ssl=self._tls,
                server_hostname=host if self._tls else None,
            )
            pool.open.add(connection)
            await self._greet(connection, server)
        return connection

    async def _greet(self, connection: RedisConnection, server: Server) -> None:
        commands = self._greeting(server.role)
        job = Job(b"", commands)
        await connection.ask([job], self._address.options.connect_s)
        for reply in job.replies:
            if isinstance(reply, ErrorReply):
                connection.abort()
                reply = self._without_password(reply)
                if reply.code in TRANSIENT:
                    raise CutError(reply.text[:200])
                raise refusal(server.address, reply)
        if commands[-1] == (b"ROLE",) and not _is_master(job.replies[-1]):
            connection.abort()
            raise CutError("it is not the master any more")

    def _without_password(self, reply: ErrorReply) -> ErrorReply:
        """A server that does not know a command tells what came with it."""
        password = self._address.password
        return ErrorReply(reply.text.replace(password, "***")) if password else reply

    def _greeting(self, role: Role) -> list[Command]:
        address, commands = self._address, list[Command]()
        is_sentinel = role is Role.GUIDE and address.kind == SENTINEL
        if address.password and not is_sentinel:
            user = (address.username.encode(),) if address.username else ()
            commands.append((b"AUTH", *user, address.password.encode()))
        if address.database and not is_sentinel:
            commands.append((b"SELECT", address.database))
        if role is Role.REPLICA and address.kind == CLUSTER:
            commands.append((b"READONLY",))
        if role is Role.MASTER and address.kind == SENTINEL:
            commands.append((b"ROLE",))
        # Who should have a password and has none learns that only from an answer: a long command
        # would just be cut off.
        return commands or [(b"PING",)]

    def _pool(self, server: Server) -> _Pool:
        if server not in self._pools:
            self._pools[server] = _Pool()
        return self._pools[server]

    async def close(self) -> None:
        """Whoever still waits for an answer learns that there is none."""
        self._closed = True
        every = [connection for pool in self._pools.values() for connection in pool.open]
        for connection in every:
            connection.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(connection.closed.wait() for connection in every))


class _Pool:
    """To one server."""

    def __init__(self) -> None:
        self.open: set[RedisConnection] = set()
        self._free: list[RedisConnection] = []
        self._places = asyncio.Semaphore(CONNECTIONS)

    @asynccontextmanager
    async def leased(self, pools: Pools, server: Server) -> AsyncIterator[RedisConnection]:
        async with self._places:
            connection = self._free.pop() if self._free else await pools.connect(server, self)
            try:
                yield connection
            finally:
                if connection.is_idle:
                    self._free.append(connection)
                else:
                    connection.abort()

    def lost(self, connection: RedisConnection) -> None:
        self.open.discard(connection)
        with suppress(ValueError):
            self._free.remove(connection)


def _is_master(role: Reply) -> bool:
    return isinstance(role, list) and role[:1] == [b"master"]


def refusal(address: Address | RedisAddress, reply: ErrorReply) -> StoreError:
    """What a server's error means here, in its own words."""
    kind = NotAllowedError if reply.code in NOT_ALLOWED else StoreError
    return kind(f"{address}: {reply.text[:200]}")
