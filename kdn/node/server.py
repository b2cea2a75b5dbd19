"""A node's life: open the parts, listen, serve, finish what is in flight, close the parts."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiohttp import web

from kdn import tracing
from kdn.background import supervise
from kdn.config import Config, NodeSettings
from kdn.depot.depot import Depot, open_depot
from kdn.errors import UnsupportedError
from kdn.node.app import make_app
from kdn.node.bodies import BodyReader
from kdn.node.budget import Budget
from kdn.node.connection import Connections
from kdn.node.egress import Egress
from kdn.node.listening import Acceptor, bind
from kdn.node.logs import log_to
from kdn.node.scheduler import FairQueue, Queue
from kdn.node.shares import Shares
from kdn.node.state import Node
from kdn.node.status.live import telling_status
from kdn.node.tenants import Tenants
from kdn.node.traces import TraceRate
from kdn.region.depot import open_region

log = logging.getLogger(__name__)

SERVICE = "kdn-node"
"""In traces, unless OTEL_SERVICE_NAME says otherwise."""
TRACED_SHARE = 0.01
"""Of requests that come without a trace. Those of clients that trace are all recorded."""
REAP_S = 2.0
FRAME_BYTES = 2**20
LIMITED_FRAME_BYTES = 2**16
LEAST_FRAME_BYTES = 2**13
COLLECT_AFTER = (50_000, 10, 20)
"""Objects made until the collector looks at the youngest, and how often until at all."""
SWITCH_S = 0.0005
FRAME_S = 0.01
"""Small under an egress limit, where everybody waits for a frame of everybody else."""


def check_exposure(config: Config) -> None:
    """Without tokens, only this machine may ask, unless told otherwise in so many words."""
    node = config.node
    if config.tenants or node.insecure or _is_loopback(node.host):
        return
    raise UnsupportedError(
        f"refusing to listen on {node.host} without tokens: everybody who reaches it could "
        "read and delete everything. Configure tenants (`kdn config --new-token`), "
        "or say --insecure"
    )


def _is_loopback(host: str) -> bool:
    """By address; the only name that is taken for granted is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(settings: NodeSettings) -> ssl.SSLContext | None:
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise UnsupportedError("tls_cert and tls_key: expected both or none")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UnsupportedError(f"TLS certificate {settings.tls_cert}: {error}") from error
    return context


def make_egress(config: Config, queue: Queue | None = None) -> Egress:
    settings = config.node
    rate: TraceRate | float | None = None
    if settings.egress_trace:
        rate = TraceRate.read(Path(settings.egress_trace))
    elif settings.egress_bits_per_s:
        rate = float(settings.egress_bits_per_s)
    weights = {tenant.name: tenant.weight for tenant in config.tenants}
    queue = FairQueue(weights) if queue is None else queue  # an empty one is false
    return Egress(queue, rate, slots=settings.max_sends)


def make_node(config: Config, depot: Depot, queue: Queue | None = None) -> Node:
    """`queue`: whose frame goes out next, if not what is fair by the tenants' weights."""
    settings, tenants = config.node, Tenants(depot.tenants, time.monotonic)
    uncapped = {tenant.name: 0 for tenant in tenants}
    request_caps = {tenant.name: tenant.settings.max_requests for tenant in tenants}
    return Node(
        settings,
        depot,
        tenants,
        make_egress(config, queue),
        requests=Shares(settings.max_requests, request_caps),
        bodies=BodyReader(settings, uncapped),
        answers=Budget(Shares(settings.max_answers_bytes, uncapped), settings.body_window_s),
        frame_bytes=frame_bytes_of(settings),
    )


def frame_bytes_of(settings: NodeSettings) -> int:
    """Under a limit a frame is what goes out in FRAME_S, so that bytes flow as over a real link."""
    if settings.frame_bytes:
        return settings.frame_bytes
    if settings.egress_trace:
        return LEAST_FRAME_BYTES
    if not settings.egress_bits_per_s:
        return FRAME_BYTES
    size = int(settings.egress_bits_per_s / 8 * FRAME_S)
    return min(max(size, LEAST_FRAME_BYTES), LIMITED_FRAME_BYTES)


@dataclass
class Listening:
    """A node that answers at `url` while the context that made it lasts."""

    node: Node
    connections: Connections
    host: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


@asynccontextmanager
async def listen(
    config: Config,
    node: Node,
    sockets: Sequence[socket.socket] | None = None,
    *,
    private: bool = False,
) -> AsyncIterator[Listening]:
    """Answer requests; on leaving, finish those in flight, for a bounded time. `sockets`: to listen
    on, instead of new ones; `private`: only this node's own processes reach them."""
    check_exposure(config)
    context = None if private else tls_context(config.node)
    runner = web.AppRunner(make_app(node), shutdown_timeout=config.node.shutdown_timeout_s)
    await runner.setup()
    assert runner.server is not None
    connections = Connections(node, runner.server)
    try:
        sockets = bind(config.node.host, config.node.port) if sockets is None else sockets
    except OSError as error:
        await runner.cleanup()
        address = f"{config.node.host}:{config.node.port}"
        raise UnsupportedError(f"cannot listen on {address}: {error}") from error
    host, port = ("", 0) if private else sockets[0].getsockname()[:2]
    acceptor = Acceptor(sockets, connections, context)
    reaper = asyncio.create_task(supervise("reaping connections", lambda: _reap(connections)))
    try:
        async with telling_status(node):
            yield Listening(node, connections, host, port, context is not None)
    finally:
        node.stopping = True
        acceptor.close()
        await runner.cleanup()
        with suppress(TimeoutError):
            async with asyncio.timeout(config.node.shutdown_timeout_s):
                await connections.all_closed.wait()
        connections.abort_all()
        reaper.cancel()


async def _reap(connections: Connections) -> None:
    while True:
        await asyncio.sleep(REAP_S)
        connections.reap(asyncio.get_running_loop().time())


@asynccontextmanager
async def open_node(config: Config, queue: Queue | None = None) -> AsyncIterator[Node]:
    """A node with its depot, which is closed (and flushed) on leaving."""
    opening = open_region if config.node.upstream else open_depot
    async with opening(config.node, config.tenants) as depot:
        yield make_node(config, depot, queue)


def wait_for_nothing_else() -> None:
    """Make what stops the event loop short and rare, in a process that is all this node's."""
    # What is here now stays: a full collection that walks it all would take 25 ms each time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    # The threads of stores give the interpreter back sooner than after Python's 5 ms.
    sys.setswitchinterval(SWITCH_S)


async def serve(config: Config, queue: Queue | None = None) -> None:
    """Run a node until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with open_node(config, queue) as node, listen(config, node) as listening:
        wait_for_nothing_else()
        log.info("listening", extra={"url": listening.url, "data": str(config.node.data)})
        await stop.wait()
        log.info("stopping", extra={"requests": node.num_requests})
    log.info("stopped")


def run(config: Config, queue: Queue | None = None) -> None:
    """`serve`, in a process that is all this node's."""
    if config.node.workers != 1:
        from kdn.node import workers

        workers.run(config)
        return
    check_exposure(config)  # before anything is opened
    log_to(None, config.node.log_level)
    if config.node.tracing:
        tracing.start(SERVICE, TRACED_SHARE)
    uvloop.run(serve(config, queue))
