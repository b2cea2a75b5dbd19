"""`kdn node --workers N`: a process that begins the others and does nothing else.

It binds the port, once for each worker (the system shares connections out among them), and begins
the owner and the workers. A worker that dies is begun again: its socket has stayed open here, so
nobody who was about to connect is turned away. If the owner dies all end, and whoever began this
process may begin it again. It holds one end of a pipe; when that is gone, so are all others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import uvloop

from kdn import tracing
from kdn.config import Config
from kdn.errors import KdnError, UnsupportedError
from kdn.node.ledger import Ledger
from kdn.node.listening import bind
from kdn.node.logs import log_to
from kdn.node.owner import Workers
from kdn.node.server import (
    SERVICE,
    TRACED_SHARE,
    Listening,
    check_exposure,
    listen,
    open_node,
    tls_context,
    wait_for_nothing_else,
)
from kdn.node.worker import HTTP, LINK, Place, make_ledger, open_worker, owner_memory_bytes

log = logging.getLogger(__name__)

MAX_WORKERS = 256
STOPS = {signal.SIGTERM, signal.SIGINT}
SIGNALS = {signal.SIGCHLD, *STOPS}
LOOK_S = 0.1
"""Between two looks at whether to stop, while the owner opens."""
PAUSE_S = 1.0
"""Before a worker is begun again that lived for less than this."""
GRACE_S = 10.0
"""For a process to end, beyond what its responses in flight may take."""


def check_workers(config: Config) -> None:
    node = config.node
    if not 1 <= node.workers <= MAX_WORKERS:
        raise UnsupportedError(f"workers: expected 1 to {MAX_WORKERS}, found {node.workers}")
    if node.workers > 1 and getattr(node, "store", None):
        raise UnsupportedError(
            "workers: a node of a shared store keeps nothing; begin several nodes instead"
        )
    if node.workers > 1 and node.upstream:
        raise UnsupportedError("workers: a region has one worker, found an upstream as well")


def run(config: Config) -> None:
    """Until SIGINT or SIGTERM; SystemExit if it ends otherwise."""
    check_workers(config)
    check_exposure(config)
    tls_context(config.node)  # errors that all workers would have are told once
    if config.node.tracing:
        tracing.check_installed()
    log_to(None, config.node.log_level)
    supervisor = _Supervisor(config)
    try:
        code = supervisor.run()
    finally:
        supervisor.close()
    if code:
        sys.exit(code)


@dataclass
class _Supervisor:
    config: Config
    folder: Path = field(init=False)
    ledger: Ledger = field(init=False)
    sockets: list[list[socket.socket]] = field(init=False)
    lifeline: tuple[int, int] = field(init=False)
    owner: int = 0
    workers: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Process ids, to the worker's number and when it was begun."""

    def __post_init__(self) -> None:
        node = self.config.node
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="kdn-node-"))  # for this user alone
        except OSError as error:
            raise UnsupportedError(
                f"workers need a folder to meet in, and none can be made ({error}): set TMPDIR"
            ) from error
        try:
            self.sockets = _bind(node.host, node.port, node.workers)
        except OSError as error:
            self.close()
            raise UnsupportedError(f"cannot listen on {node.host}:{node.port}: {error}") from error
        self.ledger = make_ledger(self.config)
        self.lifeline = os.pipe()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> int:
        """The exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        ready, tell_ready = os.pipe()
        self.owner = self._begin(lambda: _own(self.config, self.folder, tell_ready))
        os.close(tell_ready)
        while not select.select([ready], [], [], LOOK_S)[0]:
            if signal.sigtimedwait(STOPS, 0) is not None:
                return self._end(0)
        is_ready = os.read(ready, 1) == b"1"
        os.close(ready)
        if not is_ready:  # it has said why
            return self._end(1)
        for number in range(self.config.node.workers):
            self._begin_worker(number)
        host, port = self.sockets[0][0].getsockname()[:2]
        shown = Listening(None, None, host, port, bool(self.config.node.tls_cert))  # type: ignore[arg-type]
        log.info("listening", extra={"url": shown.url, "data": str(self.config.node.data)})
        return self._watch()

    def _watch(self) -> int:
        """Until told to stop (0), or the owner is gone (1)."""
        again: dict[int, float] = {}  # workers to begin, and when
        while True:
            wait_s = max(0.0, min(again.values(), default=1e6) - time.monotonic())
            told = signal.sigtimedwait(SIGNALS, wait_s)
            if told is not None and told.si_signo != signal.SIGCHLD:
                return self._end(0)
            for pid, status in _ended():
                if pid == self.owner:
                    log.error("the owner ended", extra={"status": status})
                    return self._end(1)
                number, begun_s = self.workers.pop(pid)
                log.error("a worker ended", extra={"worker": number, "status": status})
                now_s = time.monotonic()
                again[number] = now_s if now_s - begun_s > PAUSE_S else now_s + PAUSE_S
            for number in [one for one, at_s in again.items() if at_s <= time.monotonic()]:
                del again[number]
                self._begin_worker(number)

    def _begin_worker(self, number: int) -> None:
        place = Place(number, self.folder, self.ledger)
        own = self.sockets[number]
        pid = self._begin(lambda: _work(self.config, place, own), own)
        self.workers[pid] = (number, time.monotonic())

    def _begin(
        self, serve: Callable[[], Coroutine[Any, Any, None]], own: Sequence[socket.socket] = ()
    ) -> int:
        """The id of a new process, which serves and ends. `own`: the sockets it listens on."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all at once
            os.close(self.lifeline[1])
            self._close_sockets(but=own)
            if self.config.node.tracing:
                tracing.start(SERVICE, TRACED_SHARE)
            uvloop.run(_until_told(serve, self.lifeline[0]))
            code = 0
        except KdnError as error:
            log.error("cannot serve", extra={"error": str(error)})
        except BaseException:
            log.exception("fault")
        finally:
            tracing.stop()
            logging.shutdown()
            os._exit(code)

    def _close_sockets(self, but: Sequence[socket.socket] = ()) -> None:
        for one in chain.from_iterable(self.sockets):
            if one not in but:
                one.close()

    def _end(self, code: int) -> int:
        """Workers first: what they have in flight may need the owner."""
        log.info("stopping")
        self._close_sockets()
        patience_s = self.config.node.shutdown_timeout_s + GRACE_S
        _stop(list(self.workers), patience_s)
        _stop([self.owner], patience_s)
        log.info("stopped")
        return code


def _bind(host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """For each worker, a socket of every address of the host."""
    for one in bind(host, port):  # fails if another has the port, even if that would share it
        port = port or one.getsockname()[1]
        one.close()
    return [bind(host, port, shared=True) for _ in range(workers)]


def _ended() -> list[tuple[int, int]]:
    """(process id, exit code) of all that ended since the last time."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def _stop(pids: list[int], patience_s: float) -> None:
    """SIGTERM, and for those that stay SIGKILL."""
    left = set(pids)
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, GRACE_S)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + wait_s
        while left and time.monotonic() < deadline_s:
            for pid in list(left):
                try:
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        left.discard(pid)
                except ChildProcessError:
                    left.discard(pid)
            time.sleep(0.01)


async def _until_told(serve: Callable[[], Coroutine[Any, Any, None]], lifeline: int) -> None:
    """Serve until SIGTERM, or until the process that began this one is gone."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(serve())
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_reader(lifeline, task.cancel)  # nothing ever comes but its end
    try:
        with suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_reader(lifeline)


async def _own(config: Config, folder: Path, tell_ready: int) -> None:
    """The owner's life."""
    own = replace(config, node=replace(config.node, memory_bytes=owner_memory_bytes(config)))
    async with open_node(own) as node:
        node.behind_workers = True
        workers = Workers(node)
        link_server = await asyncio.get_running_loop().create_unix_server(
            workers.new_link, str(folder / LINK)
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as http:
            http.bind(str(folder / HTTP))
            http.listen(1024)
            http.setblocking(False)
            async with listen(own, node, [http], private=True):
                wait_for_nothing_else()
                os.write(tell_ready, b"1")
                os.close(tell_ready)
                try:
                    await asyncio.Event().wait()
                finally:
                    link_server.close()
                    # The process that made it may be gone. Whoever is connected stays so.
                    shutil.rmtree(folder, ignore_errors=True)


async def _work(config: Config, place: Place, sockets: list[socket.socket]) -> None:
    """A worker's life."""
    owner_gone = asyncio.Event()
    async with (
        open_worker(config, place, owner_gone) as node,
        listen(config, node, sockets),
    ):
        wait_for_nothing_else()
        await owner_gone.wait()
        log.error("the owner has gone")
        os._exit(1)  # without it nothing that this one knows can be trusted
