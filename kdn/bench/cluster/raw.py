"""Reading the same bytes without kdn, as fast as the servers' own protocols let one thread: the
ranges of 32 objects asked for at once, from each shard of Redis or from S3."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from io import BufferedReader
from typing import Any, cast

from kdn.bench.cluster.items import Item
from kdn.bench.cluster.shards import Shards
from kdn.bench.node_wire import WireError, redis_command
from kdn.store.object_layout import path_of

DEADLINE_S = 20.0
BUFFER_BYTES = 256 << 10
LEAST_LINE_BYTES = 4


class RawRedis:
    """`GETRANGE` of many keys, pipelined, one connection a shard; plain sockets."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._sockets: dict[int, socket.socket] = {}
        self._files: dict[int, BufferedReader] = {}
        for server in shards.servers:
            one = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[server.port] = one
            self._files[server.port] = cast(BufferedReader, one.makefile("rb", BUFFER_BYTES))

    def put(self, items: Sequence[Item]) -> None:
        for item in items:
            port = self._shards.server_of(_name(item)).port
            self._sockets[port].sendall(redis_command(b"SET", _name(item), item.data))
            if (told := self._files[port].readline()) != b"+OK\r\n":
                raise WireError(f"redis: expected OK, found {told[:80]!r}")

    def read(self, prompt: Sequence[Item], buffers: Sequence[memoryview]) -> int:
        """Into these; the bytes that came."""
        by_port: dict[int, list[int]] = {}
        for number, item in enumerate(prompt):
            by_port.setdefault(self._shards.server_of(_name(item)).port, []).append(number)
        for port, numbers in by_port.items():
            asked = [_range_of(prompt[number]) for number in numbers]
            self._sockets[port].sendall(b"".join(asked))
        num_bytes = 0
        for port, numbers in by_port.items():
            for number in numbers:
                num_bytes += _take(self._files[port], buffers[number])
        return num_bytes

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for one in self._sockets.values():
            one.close()


def _name(item: Item) -> bytes:
    return b"raw:" + item.key.hex().encode()


def _range_of(item: Item) -> bytes:
    return redis_command(b"GETRANGE", _name(item), b"0", b"%d" % (item.size_bytes - 1))


def _take(file: BufferedReader, buffer: memoryview) -> int:
    line = file.readline()
    if len(line) < LEAST_LINE_BYTES or line[:1] != b"$":
        raise WireError(f"redis: expected a value, found {line[:80]!r}")
    size = int(line[1:-2])
    room = buffer[:size]
    done = 0
    while done < size:
        got = file.readinto(room[done:])
        if not got:
            raise WireError("redis: the connection ended")
        done += got
    if file.read(2) != b"\r\n":
        raise WireError("redis: expected the end of a value")
    return size


class RawS3:
    """Ranged gets of many objects at once, through the client library that kdn uses."""

    def __init__(self, client: Any, folder: str = "raw/") -> None:
        """`client`: an object store of obstore."""
        self._client, self._folder = client, folder

    async def put(self, items: Sequence[Item]) -> None:
        import obstore

        for item in items:
            await obstore.put_async(self._client, self._path(item), item.data)

    async def read(self, prompt: Sequence[Item], buffers: Sequence[memoryview]) -> int:
        import obstore

        async def get(number: int) -> int:
            item = prompt[number]
            data = await obstore.get_range_async(
                self._client, self._path(item), start=0, end=item.size_bytes
            )
            view = memoryview(data)
            buffers[number][: len(view)] = view
            return len(view)

        return sum(await asyncio.gather(*map(get, range(len(prompt)))))

    def _path(self, item: Item) -> str:
        """In folders as kdn's own: for some servers a path's length is what it costs."""
        return f"{self._folder}{path_of(item.key)}"
