"""Two hosts and the wire between them: network namespaces, joined by packets that this process
carries from one to the other, late, one after the other, and not always.

Linux can delay packets itself (netem), but not every kernel is built with it; TUN devices nearly
every one has. Needs root. Run as a program: `python wire.py A B DOWN_BITS_PER_S DELAY_S LOSS`, with
the names of two namespaces; says "ready", and works until its input ends. Only packets from A to B
are held to the rate; each way takes DELAY_S.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

MTU = 1500
QUEUE_S = 0.2
"""What the slow side of the wire holds before it drops."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001


def missing() -> str | None:
    """Why this machine cannot have two hosts, if it cannot."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        made = subprocess.run(["ip", "netns", "add", f"kdn-try-{os.getpid()}"], capture_output=True)
    except FileNotFoundError:
        return "there is no ip command (iproute2)"
    if made.returncode:
        return f"no network namespaces: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", f"kdn-try-{os.getpid()}"], check=True)
    return None


@contextmanager
def two_hosts(bits_per_s: float, round_trip_s: float, loss: float) -> Iterator[tuple[str, str]]:
    """The namespaces of a server (10.77.0.1) and of its client (10.77.0.2)."""
    names = f"kdn-a-{os.getpid()}", f"kdn-b-{os.getpid()}"
    program = [sys.executable, __file__, *names, str(bits_per_s), str(round_trip_s / 2), str(loss)]
    for name in names:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    try:
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as wire:
            assert wire.stdin
            assert wire.stdout
            assert wire.stdout.readline() == b"ready\n"
            for number, name in enumerate(names, 1):
                _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
                _ip("-n", name, "link", "set", "wire", "up", "mtu", str(MTU))
            yield names
            wire.stdin.close()
    finally:
        for name in names:
            _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


def _open_tun(namespace: str) -> int:
    """A TUN device in another namespace. Only this thread goes there, and it ends."""
    found: list[int] = []

    def enter() -> None:
        with open(f"/run/netns/{namespace}") as place:
            assert ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET) == 0
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"wire", _IFF_TUN_NO_PI))
        found.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


class Way:
    """Packets in one direction."""

    def __init__(self, source: int, target: int, rate: float, delay_s: float, loss: float) -> None:
        self.source = source
        self._target = target
        self._rate, self._delay_s, self._loss = rate, delay_s, loss
        self._rng = Random(1)
        self._free_s = 0.0  # when the last packet has gone out
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, now_s: float) -> None:
        """Everything that waits to be sent."""
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            waits_s = max(0.0, self._free_s - now_s)
            if waits_s > QUEUE_S or self._rng.random() < self._loss:
                continue
            self._free_s = now_s + waits_s + 8 * len(packet) / self._rate
            self._under_way.append((self._free_s + self._delay_s, packet))

    def hand_over(self, now_s: float) -> None:
        while self._under_way and self._under_way[0][0] <= now_s:
            _, packet = self._under_way.popleft()
            try:
                os.write(self._target, packet)
            except OSError:  # not up yet, or down already
                return

    def next_s(self) -> float:
        return self._under_way[0][0] if self._under_way else float("inf")


def main(first: str, second: str, bits_per_s: str, delay_s: str, loss: str) -> None:
    devices = _open_tun(first), _open_tun(second)
    down = Way(devices[0], devices[1], float(bits_per_s), float(delay_s), float(loss))
    up = Way(devices[1], devices[0], float("inf"), float(delay_s), float(loss))
    print("ready", flush=True)  # noqa: T201
    while True:
        now_s = time.monotonic()
        for way in (down, up):
            way.hand_over(now_s)
        wait_s = max(0.0, min(down.next_s(), up.next_s(), now_s + 0.5) - now_s)
        readable, _, _ = select.select([*devices, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            return
        now_s = time.monotonic()
        for way in (down, up):
            if way.source in readable:
                way.take(now_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
