"""A node of several processes, as `kdn node --workers` begins it, for tests that talk to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.node.harness import checksum, read_answer, request

ROOT = Path(__file__).parents[2]
START_S = 30.0


@dataclass
class Client:
    """One connection, and so always the same worker."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, bytes]:
        """Status and body; `Kdn_Etag="..."` is the header Kdn-Etag."""
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if method in ("PUT", "POST"):
            lines.append(f"Content-Length: {len(body)}")
        self.writer.write(request(path, *lines, method=method) + body)
        answer = await read_answer(self.reader, method == "HEAD")
        return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]

    async def put(self, key: str, data: bytes, etag: str, **headers: str) -> int:
        sent = {"Kdn_Checksum": checksum(data), "Kdn_Etag": etag, **headers}
        return (await self.ask("PUT", f"/v1/objects/{key}", data, **sent))[0]


@dataclass
class Processes:
    process: subprocess.Popen[str]
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self, number: int = 1) -> list[Client]:
        made = []
        for _ in range(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
            made.append(Client(reader, writer))
        self.clients += made
        return made

    def children(self) -> list[int]:
        """Process ids of the owner and of the workers, in the order they were begun."""
        pid = self.process.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sorted(map(int, found))

    async def ended(self, within_s: float) -> int:
        """The exit code."""
        async with asyncio.timeout(within_s):
            while (code := self.process.poll()) is None:
                await asyncio.sleep(0.02)
        return code


@asynccontextmanager
async def processes(
    folder: Path,
    settings: Mapping[str, object],
    tenants: str = "",
    workers: int = 2,
    port: int = 0,
) -> AsyncIterator[Processes]:
    """A node with its data in `folder`. `tenants`: their part of the configuration file."""
    folder.mkdir(exist_ok=True)
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (folder / "kdn.toml").write_text("\n".join(["[node]", *lines, tenants]))
    command = [sys.executable, "-m", "kdn.cli.main", "node", "--config", str(folder / "kdn.toml")]
    command += ["--port", str(port), "--data", str(folder / "data"), "--workers", str(workers)]
    log = (folder / "log").open("a+")
    begin = log.tell()
    process = subprocess.Popen(
        command, stderr=log, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    node = None
    try:
        node = Processes(process, await _port(process, folder / "log", begin))
        yield node
    finally:
        for client in node.clients if node else ():
            client.writer.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)
        log.close()


async def _port(process: subprocess.Popen[str], log: Path, begin: int) -> int:
    async with asyncio.timeout(START_S):
        while True:
            for line in log.read_text()[begin:].splitlines():
                if '"listening"' in line and line.endswith("}"):
                    return int(json.loads(line)["url"].rpartition(":")[2])
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
