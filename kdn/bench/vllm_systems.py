"""What `kdn bench vllm` compares: where an engine's caches go, and over which link they come back.

A system opens a store for the length of a run. The writer's engine fills it over an unlimited link;
then a fresh engine reads over each link in turn. Bytes are counted where they pass: by the node,
by the proxy in front of Redis; for files and shared memory they are what the hit tokens take.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kdn.bench.link_proxy import shaped
from kdn.bench.node_servers import (
    Server,
    absent,
    start_kdn,
    start_redis,
    start_server,
)
from kdn.bench.node_wire import NginxDialect, RedisDialect, call, redis_command
from kdn.bench.servers import free_port
from kdn.session.host_memory import SHARED_MEMORY

LOOPBACK = "loopback"
LINKS: dict[str, float | None] = {LOOPBACK: None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Name to bits per second."""

ASK_S = 10.0
LMCACHE_START_S = 120.0

TransferConfig = dict[str, Any]
"""vLLM's kv_transfer_config."""


@dataclass(frozen=True)
class Route:
    """How a reader's engine reaches the store over one link."""

    transfer: TransferConfig | None
    stored_bytes: Callable[[], int]
    moved_bytes: Callable[[], int] | None = None
    """What has come over the link so far; None: it cannot be counted."""


class OpenSystem(Protocol):
    """What one system keeps, while it is open."""

    def route(self, link: str) -> AbstractContextManager[Route]: ...


class System(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def python(self) -> str: ...

    @property
    def links(self) -> tuple[str, ...]:
        """Those that are measured."""

    @property
    def lasts(self) -> bool:
        """Whether what is stored outlives the run, in its folder."""

    def open(self, folder: Path) -> AbstractContextManager[OpenSystem]: ...


@dataclass(frozen=True)
class NoCache:
    """Every engine reads every document itself."""

    python: str
    name: str = "no cache"
    lasts: bool = False
    links: tuple[str, ...] = (LOOPBACK,)

    @contextmanager
    def open(self, folder: Path) -> Iterator[OpenSystem]:
        yield self

    @contextmanager
    def route(self, link: str) -> Iterator[Route]:
        yield Route(None, lambda: 0)


@dataclass(frozen=True)
class Example:
    """vLLM's ExampleConnector: one file per layer in a folder that both engines see. It knows a
    prompt only as a whole, so its writer has to be asked the same questions."""

    python: str
    name: str = "ExampleConnector"
    lasts: bool = True
    links: tuple[str, ...] = (LOOPBACK,)

    @contextmanager
    def open(self, folder: Path) -> Iterator[OpenSystem]:
        yield _Files(folder / "files")


@dataclass(frozen=True)
class _Files:
    folder: Path

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @contextmanager
    def route(self, link: str) -> Iterator[Route]:
        self.folder.mkdir(parents=True, exist_ok=True)
        extra = {"shared_storage_path": str(self.folder)}
        yield Route(_transfer("ExampleConnector", extra), self.stored_bytes)


@dataclass(frozen=True)
class LMCache:
    """LMCache's server beside the engine. Loopback: from its RAM, through shared memory, the server
    that the writer filled. Other links: a fresh server that reads from Redis behind the link."""

    python: str
    name: str = "LMCache"
    lasts: bool = False
    links: tuple[str, ...] = field(
        default_factory=lambda: (LOOPBACK,) if "redis" in absent() else tuple(LINKS)
    )
    ram_gb: int = 3

    @contextmanager
    def open(self, folder: Path) -> Iterator[OpenSystem]:
        with ExitStack() as stack:
            redis = None
            if len(self.links) > 1:
                redis = stack.enter_context(start_redis(folder / "redis"))
            address = redis.address if redis else None
            port = stack.enter_context(self.serve(folder / "first", address))
            yield _Servers(self, folder, redis, port)

    @contextmanager
    def serve(self, folder: Path, redis: tuple[str, int] | None) -> Iterator[int]:
        """A server and the port where it answers engines."""
        port, http_port = free_port(), free_port()
        command = [self.python, "-m", "lmcache.cli.main", "server"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
        command += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
        command += ["--shm-name", f"kdn-bench-{os.getpid()}-{port}", "--no-l1-use-lazy"]
        command += ["--l1-size-gb", str(self.ram_gb), "--eviction-policy", "LRU"]
        if redis is not None:
            adapter = {"type": "resp", "host": redis[0], "port": redis[1]}
            command += ["--l2-adapter", json.dumps(adapter)]
        probe = b"GET /healthcheck HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"
        environ = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
        with start_server(
            _LMCacheStatus(), command, http_port, folder, probe, environ, LMCACHE_START_S
        ):
            yield port


class _LMCacheStatus(NginxDialect):
    name = "lmcache"


@dataclass
class _Servers:
    system: LMCache
    folder: Path
    redis: Server | None
    port: int

    def stored_bytes(self) -> int:
        return redis_bytes(self.redis.address) if self.redis else 0

    @contextmanager
    def route(self, link: str) -> Iterator[Route]:
        if LINKS[link] is None or self.redis is None:
            yield Route(_lmcache_transfer(self.port), self.stored_bytes)
            return
        with (
            shaped(self.redis.address, LINKS[link]) as proxy,
            self.system.serve(self.folder / _file_name(link), proxy.address) as port,
        ):
            yield Route(_lmcache_transfer(port), self.stored_bytes, lambda: proxy.down_bytes)


def _lmcache_transfer(port: int) -> TransferConfig:
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return _transfer("LMCacheMPConnector", extra)


@dataclass(frozen=True)
class KdnSystem:
    """A node over HTTP, held to the link's rate by its own egress limit. Loopback: the engines are
    on one host and share what is decoded, in its memory. Other links: another host, which has
    decoded nothing yet."""

    python: str
    name: str = "kdn"
    lasts: bool = False
    links: tuple[str, ...] = tuple(LINKS)
    shares_memory: bool = True
    extra: tuple[tuple[str, Any], ...] = ()
    """More of the connector's settings."""

    @contextmanager
    def open(self, folder: Path) -> Iterator[OpenSystem]:
        with _host(self.shares_memory) as host:
            yield _Node(self, folder, host)


@contextmanager
def _host(shares_memory: bool) -> Iterator[TransferConfig]:
    """The memory of one host, as the connector's settings."""
    if not shares_memory:
        yield {"host_bytes": 0}
        return
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="kdn-bench-") as folder:
        yield {"host_folder": folder}


@dataclass(frozen=True)
class _Node:
    """Started anew for each link, on the same folder."""

    system: KdnSystem
    folder: Path
    host: TransferConfig

    @contextmanager
    def route(self, link: str) -> Iterator[Route]:
        limit = LINKS[link]
        settings = {} if limit is None else {"egress_bits_per_s": int(limit)}
        own = nullcontext(self.host) if limit is None else _host(self.system.shares_memory)
        with start_kdn(self.folder, settings) as node, own as host:
            url = f"http://{node.address[0]}:{node.address[1]}"
            extra = {"url": url, **host, **dict(self.system.extra)}
            transfer = _transfer("KdnConnector", extra)
            transfer["kv_connector_module_path"] = "kdn.engines.vllm"
            yield Route(
                transfer,
                lambda: node_count(url, "kdn_store_size_bytes"),
                lambda: node_count(url, "kdn_sent_bytes_total"),
            )


def _transfer(connector: str, extra: dict[str, Any]) -> TransferConfig:
    return {
        "kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip


def node_count(url: str, name: str) -> int:
    """One of the node's counts, over all tenants."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=ASK_S) as told:
        return metric(told.read().decode(), name)


def metric(told: str, name: str) -> int:
    """The sum of a metric's values in what Prometheus reads."""
    lines = [line.rpartition(" ") for line in told.splitlines() if not line.startswith("#")]
    return int(sum(float(value) for key, _, value in lines if key.partition("{")[0] == name))


def redis_bytes(address: tuple[str, int]) -> int:
    """Bytes of all values that Redis holds."""
    script = b"""local sum = 0
for _, key in ipairs(redis.call('KEYS', '*')) do sum = sum + redis.call('STRLEN', key) end
return tostring(sum)"""
    return int(call(address, redis_command(b"EVAL", script, b"0"), RedisDialect()))


def _file_name(link: str) -> str:
    return "".join(letter for letter in link if letter.isalnum())
