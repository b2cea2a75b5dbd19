"""A listener may be closed at any moment, also while it accepts a connection."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from kdn.bench.listener import Listener


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(100))
    await writer.drain()
    writer.transport.abort()


@pytest.mark.parametrize("turns", range(5))
def test_closed_while_connections_come(turns: int) -> None:
    """Every accepted connection is served, and no socket is left open."""

    async def work() -> None:
        listener = Listener(echo, "127.0.0.1")
        with socket.create_connection(("127.0.0.1", listener.port), 5.0) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            listener.close()
            answer = await asyncio.to_thread(said_back, client)
            assert answer in (b"hello", b""), answer
            if turns > 1:  # the loop has seen the connection by then
                assert answer == b"hello"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)

    asyncio.run(work())
    gc.collect()  # a socket that was left open would warn now


def said_back(client: socket.socket) -> bytes:
    try:
        client.sendall(b"hello")
        return client.recv(100)
    except ConnectionResetError:  # the listener's queue is gone, and the connection with it
        return b""


def test_closed_twice_and_before_anybody_came() -> None:
    async def work() -> None:
        listener = Listener(echo, "127.0.0.1")
        listener.close()
        listener.close()

    asyncio.run(work())
