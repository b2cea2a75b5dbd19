"""A tenant that does all it can to hurt the others: the attack of `kdn bench node`.

It runs in a process of its own, and behind the others where processors are few: in life it has its
own machine, and what counts is what it does to the node.
All at once, each on connections of its own: bodies that are announced and never sent; lookups as
large as the node allows; puts without end, each said to save 1e9 seconds, under names that hold
them. What is refused is tried again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from threading import Event, Lock, Thread
from typing import Any

from kdn.bench.node_servers import make_chunk
from kdn.bench.node_wire import DEADLINE_S, KdnDialect, WireError, ask

SILENT_BYTES = (2 << 30, 16 << 20, 1 << 20)
"""Announced by the first silent connection, by others, and by those that announce a lookup: the
flood needs some of the memory, too."""
SILENT_S = 1.0
"""How often it looks whether it was cut."""
MAX_KEYS = 4096
MAX_HEAD_BYTES = 65536
NAMED = 256
"""Chunks under each name of the flood."""
START_S = 20.0
PAUSE_S = 0.05
"""After a refusal."""
NICE = 10


@dataclass(frozen=True)
class Attack:
    """How many connections do what."""

    silent: int = 32
    lookups: int = 4
    floods: int = 4
    flood_bytes: int = 256 << 10
    """Of each object."""


@contextmanager
def attacking(address: tuple[str, int], token: str, attack: Attack) -> Iterator[Counter[str]]:
    """While it lasts; what came of it is counted in the end."""
    spawn = get_context("spawn")
    begun, stop, told = spawn.Event(), spawn.Event(), spawn.Queue()
    process = spawn.Process(target=_run, args=(address, token, attack, begun, stop, told))
    process.start()
    counts: Counter[str] = Counter()
    try:
        if not begun.wait(START_S):
            raise WireError(f"the attack did not begin within {START_S:g} s")
        yield counts
        stop.set()
        counts.update(told.get(timeout=DEADLINE_S))
        process.join(DEADLINE_S)
    finally:
        process.kill()
        process.join()


def _run(
    address: tuple[str, int], token: str, attack: Attack, begun: Any, stop: Any, told: Any
) -> None:
    os.nice(NICE)
    attacker = Attacker(address, token, attack)
    attacker.start()
    begun.set()
    stop.wait()
    told.put(attacker.end())


class Attacker:
    """Threads that each do one thing until told to stop."""

    def __init__(self, address: tuple[str, int], token: str, attack: Attack) -> None:
        self._address, self._attack = address, attack
        self._dialect = KdnDialect(token)
        self._stop = Event()
        self._lock = Lock()  # guards the two below
        self._counts: Counter[str] = Counter()
        self._stored: list[str] = []  # keys of what it put lately
        self._head_bytes = MAX_HEAD_BYTES

    def start(self) -> None:
        works: list[Callable[[int], None]] = [self._be_silent] * self._attack.silent
        works += [self._look_up] * self._attack.lookups + [self._flood] * self._attack.floods
        for number, work in enumerate(works):
            Thread(target=self._repeat, args=(work, number), daemon=True).start()

    def end(self) -> Counter[str]:
        self._stop.set()
        with self._lock:
            return Counter(self._counts)

    def _repeat(self, work: Callable[[int], None], number: int) -> None:
        while not self._stop.is_set():
            with suppress(OSError, WireError):
                work(number)
            self._stop.wait(PAUSE_S)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=DEADLINE_S)

    def _be_silent(self, number: int) -> None:
        """Announce a body, send nothing of it, and wait to be cut."""
        key = Random(number).randbytes(16).hex()
        first, others, questions = SILENT_BYTES
        target = ("PUT", f"/v1/profiles/{key}", "Kdn-Checksum: 0123456789abcdef")
        announced = others if number else first
        if number % 2:
            target, announced = ("POST", "/v1/lookup", "Kdn-Client: silent"), questions
        with self._connect() as connection:
            connection.sendall(self._dialect.request(*target, length=announced))
            self._count("silent bodies")
            connection.settimeout(SILENT_S)
            while not self._stop.is_set():
                with suppress(TimeoutError):
                    connection.recv(65536)  # cut, or refused
                    return

    def _look_up(self, number: int) -> None:
        """Of what it stored, as many keys and bytes as the node takes."""
        with self._connect() as connection:
            while not self._stop.is_set():
                with self._lock:
                    keys = self._stored[-MAX_KEYS:]
                    head_bytes = self._head_bytes
                keys = (keys or [bytes(16).hex()]) * MAX_KEYS
                body = json.dumps({"keys": keys[:MAX_KEYS], "head_bytes": head_bytes}).encode()
                request = self._dialect.request("POST", "/v1/lookup", length=len(body))
                status, _ = ask(connection, request + body)
                self._count("lookups" if status == 200 else "lookups refused")
                if status in (400, 413):
                    self._head_bytes = max(head_bytes // 2, 1)
                elif status != 200:
                    self._stop.wait(PAUSE_S)

    def _flood(self, number: int) -> None:
        """Put without end, and name all of it before it comes."""
        rng = Random(time.time_ns() + number)
        data = rng.randbytes(self._attack.flood_bytes)
        with self._connect() as connection:
            while not self._stop.is_set():
                keys = [rng.randbytes(16) for _ in range(NAMED)]
                self._name(connection, f"flood-{rng.getrandbits(64):x}", keys)
                for key in keys:
                    if self._stop.is_set():
                        return
                    self._put(connection, key, data)

    def _name(self, connection: socket.socket, name: str, keys: list[bytes]) -> None:
        chunks = [key.hex() for key in keys]
        body = json.dumps({"models": {"aa": {"chunks": chunks}}}).encode()
        request = self._dialect.request("PUT", f"/v1/names/{name}", length=len(body))
        status, _ = ask(connection, request + body)
        self._count("names" if status == 201 else "names refused")

    def _put(self, connection: socket.socket, key: bytes, data: bytes) -> None:
        stream = make_chunk(key, data)
        status, _ = ask(connection, self._dialect.put(key.hex(), stream, "Kdn-Saved-Seconds: 1e9"))
        self._count("puts" if status == 201 else "puts refused")
        if status == 201:
            with self._lock:
                self._stored.append(key.hex())
                del self._stored[:-MAX_KEYS]
