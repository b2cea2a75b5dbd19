"""Nodes as processes that are killed and started again, at the same address with the same data."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp

import kdn
from kdn.bench.servers import ServerError, free_port

START_S = 20.0
LOOK_S = 0.02
REGION = ("kdn.bench.cluster.region_process",)
"""A node like `kdn node`, quicker to start, and able to have a planted bug."""


class NodeProcess:
    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        program: tuple[str, ...] = REGION,
        *,
        host: str = "127.0.0.1",
        launcher: tuple[str, ...] = (),
    ) -> None:
        """`program`: a module, and its arguments. `launcher`: a command that starts it, as in a
        network of its own."""
        self.folder, self._command = folder, (*launcher, sys.executable, "-m", *program)
        self.host, self.port = host, free_port()
        own = {"host": host, "port": self.port, "data": str(folder / "data")}
        self._settings = {**settings, **own}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KDN_")}
        environ["PYTHONPATH"] = str(Path(kdn.__file__).parent.parent)
        for name, value in self._settings.items():
            environ[f"KDN_NODE_{name.upper()}"] = str(value)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environ, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        end_s = time.monotonic() + START_S
        async with aiohttp.ClientSession() as session:
            while not await _answers(session, self.url):
                if self._process.poll() is not None or time.monotonic() > end_s:
                    why = (self.folder / "log").read_text(errors="replace")[-2000:]
                    raise ServerError(f"the node in {self.folder} did not start: {why}")
                await asyncio.sleep(LOOK_S)

    def kill(self) -> None:
        """At once, with nothing finished."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(START_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=1.0)
        async with session.get(f"{url}/healthz", timeout=timeout) as answer:
            return answer.status == 200
    except (OSError, TimeoutError, aiohttp.ClientError):
        return False
