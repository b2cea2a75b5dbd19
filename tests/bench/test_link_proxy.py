"""A link of a given rate, between real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread

import pytest

from kdn.bench.link_proxy import LinkPace, shaped
from tests.bench.clocks import Clock

MBIT = 1e6


def test_bytes_queue_for_their_time_on_the_link() -> None:
    clock = Clock()
    pace = LinkPace(8 * MBIT, clock)  # a megabyte a second
    assert pace.wait_s(500_000) == pytest.approx(0.5, abs=0.011)
    assert pace.wait_s(500_000) == pytest.approx(1.0, abs=0.011)
    clock.sleep(1.0)
    assert pace.wait_s(250_000) == pytest.approx(0.25, abs=0.011)


def test_an_idle_link_saves_nothing_up() -> None:
    clock = Clock()
    pace = LinkPace(8 * MBIT, clock)
    clock.sleep(60)
    assert pace.wait_s(1_000_000) == pytest.approx(1.0, abs=0.011)
    assert LinkPace(None, clock).wait_s(10**12) == 0.0


@contextmanager
def sender(num_bytes: int) -> Iterator[tuple[str, int]]:
    """A server that answers every line with so many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection:
                while connection.recv(64):
                    connection.sendall(bytes(num_bytes))

        def accept() -> None:
            for _ in range(2):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                Thread(target=serve, args=(connection,), daemon=True).start()

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def read(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        part = connection.recv(num_bytes)
        assert part
        num_bytes -= len(part)


def test_proxy_holds_its_rate_over_all_connections() -> None:
    size = 500_000
    with sender(size) as address, shaped(address, 40 * MBIT) as proxy:
        connections = [socket.create_connection(proxy.address, timeout=10) for _ in range(2)]
        started_s = time.monotonic()
        for connection in connections:
            connection.sendall(b"go\n")
        for connection in connections:
            read(connection, size)
        took_s = time.monotonic() - started_s
        for connection in connections:
            connection.close()
        assert proxy.up_bytes == 6
    assert proxy.down_bytes == 2 * size
    assert 0.18 < took_s < 10.0  # 8 Mbit at 40 Mbit/s, on a machine that may be busy


def test_proxy_without_limit_is_fast() -> None:
    size = 20_000_000
    with sender(size) as address, shaped(address, None) as proxy:
        started_s = time.monotonic()
        with closing(socket.create_connection(proxy.address, timeout=10)) as connection:
            connection.sendall(b"go\n")
            read(connection, size)
        assert time.monotonic() - started_s < 4.0  # the same would take that long at 40 Mbit/s


def test_proxy_before_a_dead_server_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with shaped(address, None) as proxy, closing(socket.create_connection(proxy.address)) as one:
        one.settimeout(5)
        assert one.recv(1) == b""
