"""The servers that `kdn bench node` compares, each a process of its own on a port of loopback.

All three serve from memory with one thread: the node from its RAM tier, Redis from its heap, nginx
from the page cache. nginx and Redis are Debian's packages; one that is not installed is left out.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kdn
from kdn.bench.node_wire import (
    BatchConnection,
    Dialect,
    KdnDialect,
    NginxDialect,
    Objects,
    RedisDialect,
    WireError,
    call,
    redis_command,
)
from kdn.bench.servers import ServerError, find_program, free_port
from kdn.cache.keys import PUBLIC_SEAL_KEY
from kdn.codec import format as container
from kdn.node.tenants import token_hash

START_S = 20.0
STOP_S = 10.0
KDN_NODE = ("kdn.cli.main", "node")
PACKAGES = {"nginx": ("nginx", "nginx-light"), "redis": ("redis-server", "redis-server")}
"""Server to (program, package)."""


@dataclass
class Server:
    """A process that answers at `address`."""

    dialect: Dialect
    address: tuple[str, int]
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        return self.dialect.name

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def cpu_s(self) -> float:
        """Processor time so far, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_rss_bytes(self) -> int:
        """The most that was resident at any time."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(peak) * 1024

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def connect(self, objects: Objects, **options: Any) -> BatchConnection:
        """A client's connection; options as those of Connection."""
        return BatchConnection(self.address, self.dialect, objects, **options)

    def put(self, objects: Objects) -> None:
        """Store objects (nginx has them as files already)."""
        if isinstance(self.dialect, KdnDialect):
            for key, data in objects.items():
                request = self.dialect.put(key, data, "Connection: close")
                _send_and_check(self.address, request, b"HTTP/1.1 201 ")
        elif isinstance(self.dialect, RedisDialect):
            for key, data in objects.items():
                _redis_set(self.address, key, data)


def make_objects(size_bytes: int, number: int, seed: int) -> dict[str, bytes]:
    """Valid chunks of exactly this size, of random bytes, by key."""
    rng = np.random.default_rng([seed, size_bytes])
    keys = [rng.bytes(16) for _ in range(number)]
    return {key.hex(): make_chunk(key, rng.bytes(size_bytes)) for key in keys}


def make_chunk(key: bytes, data: bytes) -> bytes:
    """A valid chunk as large as `data`, which it holds but for the end."""
    info = container.StreamInfo(
        codec=container.CodecId.EXACT, dtype=container.DType.FLOAT16, chunk_key=key,
        model=bytes(16), profile=container.NO_PROFILE, start=0, num_tokens=256, num_layers=1,
        num_kv_heads=1, head_dim=1, num_levels=1, valid_from=(0,),
    )  # fmt: skip
    section = container.Section(0, container.KIND_KEYS, 0, b"")
    empty = container.write(info, [section], PUBLIC_SEAL_KEY)
    section = container.Section(0, container.KIND_KEYS, 0, data[: len(data) - len(empty)])
    return container.write(info, [section], PUBLIC_SEAL_KEY)


def absent() -> dict[str, str]:
    """What is not installed, and what to do about it."""
    return {
        name: f"{name} is not installed and is left out; to compare: apt-get install {package}"
        for name, (program, package) in PACKAGES.items()
        if find_program(program) is None
    }


@contextmanager
def start_kdn(
    folder: Path,
    settings: Mapping[str, object] | None = None,
    tenants: Sequence[str] = (),
    program: Sequence[str] = KDN_NODE,
    port: int | None = None,
) -> Iterator[Server]:
    """A node with nothing but these settings. A tenant's token is its name. `program`: a module to
    run, and its arguments."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    tables = [f'[tenants.{name}]\ntokens = ["{token_hash(name)}"]\n' for name in tenants]
    (folder / "kdn.toml").write_text("".join(tables))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KDN_")}
    environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(kdn.__file__).parent.parent), *filter(None, [environ.get("PYTHONPATH")])]
    )
    environ |= {"KDN_NODE_PORT": str(port), "KDN_NODE_DATA": str(folder / "data")}
    environ |= {f"KDN_NODE_{name.upper()}": str(value) for name, value in (settings or {}).items()}
    command = [sys.executable, "-m", *program]
    health = b"GET /healthz HTTP/1.1\r\nHost: bench\r\n\r\n"
    with start_server(KdnDialect(), command, port, folder, health, environ) as server:
        yield server


@contextmanager
def start_redis(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [
        find_program("redis-server") or "redis-server", "--bind", "127.0.0.1", "--port", str(port),
        "--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder),
    ]  # fmt: skip
    with start_server(
        RedisDialect(), command, port, folder, redis_command(b"ECHO", b"x")
    ) as server:
        yield server


@contextmanager
def start_nginx(folder: Path, objects: Objects) -> Iterator[Server]:
    """Serves its files from the page cache: they have just been written."""
    port = free_port()
    files = folder / "files"
    files.mkdir(parents=True)
    for key, data in {"ready": b"x", **objects}.items():
        (files / key).write_bytes(data)
    settings = folder / "nginx.conf"
    settings.write_text(_nginx_settings(folder, files, port))
    command = [find_program("nginx") or "nginx", "-p", str(folder), "-c", str(settings)]
    command += ["-e", str(folder / "error.log")]
    ready, _ = NginxDialect().ask(["ready"], "")
    with start_server(NginxDialect(), command, port, folder, ready) as server:
        yield server


def _nginx_settings(folder: Path, files: Path, port: int) -> str:
    temporary = "".join(
        f"{kind}_temp_path {folder / kind}; "
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    return f"""
daemon off; master_process off; pid {folder / "nginx.pid"};
{f"user {user};" if os.getuid() == 0 else ""}
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000;
  open_file_cache max=10000; {temporary}
  server {{ listen 127.0.0.1:{port}; root {files}; }}
}}
"""


@contextmanager
def start_server(
    dialect: Dialect,
    command: Sequence[str],
    port: int,
    folder: Path,
    probe: bytes,
    environ: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> Iterator[Server]:
    """A process that is ready when it answers the probe."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{dialect.name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder, env=environ
        )
    server = Server(dialect, ("127.0.0.1", port), process, log)
    try:
        _wait_until_ready(server, probe, start_s)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: Server, probe: bytes, start_s: float) -> None:
    give_up_s = time.monotonic() + start_s
    while time.monotonic() < give_up_s:
        if server.process.poll() is not None:
            break
        with suppress(OSError, WireError):
            call(server.address, probe, server.dialect)
            return
        time.sleep(0.05)
    told = server.log.read_text(errors="replace")[-500:]
    raise ServerError(f"{server.name} did not start within {start_s} s: {told}")


def _redis_set(address: tuple[str, int], key: str, data: bytes) -> None:
    _send_and_check(address, redis_command(b"SET", key.encode(), data), b"+OK\r\n")


def _send_and_check(address: tuple[str, int], request: bytes, expected: bytes) -> None:
    with socket.create_connection(address, timeout=START_S) as connection:
        connection.sendall(request)
        found = b""
        while len(found) < len(expected) and (part := connection.recv(4096)):
            found += part
        if not found.startswith(expected):
            raise WireError(f"expected {expected!r}, found {found[:200]!r}")
