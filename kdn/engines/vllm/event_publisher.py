"""Events over a ZeroMQ socket of kdn's own, as vLLM's publisher sends its: topic, number, batch.

The engine only puts batches into a queue. A thread encodes and sends them. When the queue is full
the oldest batch is dropped, and its number is left out, so that subscribers see that they missed
something. A subscriber that does not keep up loses events in the same way, and nobody waits.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kdn.checked import checked_text
from kdn.errors import UnsupportedError

logger = logging.getLogger(__name__)

MAX_BATCHES = 4096
"""That wait to be sent."""
HIGH_WATER = 100_000
"""Messages that wait for a slow subscriber, as with vLLM."""
CLOSE_S = 1.0
_ENDPOINT = re.compile(r"tcp://[^\s/]+:\d{1,5}|(?:ipc|inproc)://\S+")
_EVERYWHERE = ("*", "0.0.0.0", "[::]")

Encode = Callable[[Any], bytes]


def checked_endpoint(name: str, value: Any) -> str:
    text = checked_text(name, value)
    if not _ENDPOINT.fullmatch(text):
        raise UnsupportedError(f"{name}: expected tcp://HOST:PORT or ipc://PATH, found {text!r}")
    return text


def endpoint_of(endpoint: str, rank: int) -> str:
    """Of a rank of data parallelism: each has a port of its own, as with vLLM."""
    if not rank or endpoint.endswith(":0"):
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


class EventPublisher:
    """It binds addresses of all interfaces (`tcp://*:5557`) and of this machine (`ipc://...`), and
    connects to others, where a router listens."""

    def __init__(
        self, endpoint: str, topic: str, encode: Encode, max_batches: int = MAX_BATCHES
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise UnsupportedError(
                "events_endpoint needs the package pyzmq: pip install pyzmq"
            ) from error
        self._encode, self._topic = encode, topic.encode()
        socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket = socket
        socket.set_hwm(HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            if is_bound(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise UnsupportedError(f"events_endpoint: {endpoint}: {error}") from error
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._batches: deque[tuple[int, Any]] = deque(maxlen=max_batches)
        self._number = 0
        self._moved = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._send_all, name="kdn-events", daemon=True)
        self._thread.start()

    def publish(self, batch: Any) -> None:
        """Later. From one thread."""
        self._batches.append((self._number, batch))
        self._number += 1
        self._moved.set()

    def close(self) -> None:
        """What waits is sent, if that is done soon."""
        self._closed = True
        self._moved.set()
        self._thread.join(CLOSE_S)

    def _send_all(self) -> None:
        try:
            while not (self._closed and not self._batches):
                self._moved.wait()
                self._moved.clear()
                while self._batches:
                    self._send(*self._batches.popleft())
        finally:
            self._socket.close()

    def _send(self, number: int, batch: Any) -> None:
        try:
            parts = (self._topic, number.to_bytes(8, "big"), self._encode(batch))
            self._socket.send_multipart(parts)  # a PUB socket drops what it cannot send
        except Exception as error:
            logger.warning("events %d were not sent: %r", number, error)


def is_bound(endpoint: str) -> bool:
    host = endpoint.partition("://")[2].rpartition(":")[0]
    return not endpoint.startswith("tcp://") or host in _EVERYWHERE
