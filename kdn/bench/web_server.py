"""A plain nginx that serves an export, as `docs/cluster.md` tells an operator to, on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kdn.errors import KdnError

SERVER = """
server {
    listen 80;
    location /kdn/ {
        alias /srv/kdn/;
        default_type application/octet-stream;
        add_header Cache-Control "public, max-age=5";
        location /kdn/chunks/ {
            alias /srv/kdn/chunks/;
            add_header Cache-Control "public, max-age=31536000, immutable";
        }
    }
    keepalive_requests 100000;
    sendfile on;
    tcp_nopush on;
}
"""
START_S = 10.0
STOP_S = 5.0


class WebServerError(KdnError):
    """nginx is not installed, or did not start."""


@dataclass(frozen=True)
class WebServer:
    address: tuple[str, int]
    access_log: Path
    """A line a request: method, path, status, range."""

    @property
    def url(self) -> str:
        """Of the export."""
        return f"http://{self.address[0]}:{self.address[1]}/kdn"

    def requests(self) -> list[str]:
        """So far."""
        return self.access_log.read_text().splitlines()


def nginx_program() -> str | None:
    """Debian keeps servers where not every PATH looks."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def start_web(export: Path, work: Path, server: str = SERVER) -> Iterator[WebServer]:
    """Serves the folder `export` under /kdn; `work` is for files of its own. `server` is its block
    of nginx's settings for a folder /srv/kdn and port 80."""
    program = nginx_program()
    if program is None:
        raise WebServerError("nginx is not installed: apt-get install nginx-light")
    work.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    (work / "nginx.conf").write_text(_settings(export, work, port, server))
    log = work / "error.log"
    command = [program, "-p", str(work), "-c", str(work / "nginx.conf"), "-e", str(log)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(process, port, log)
        yield WebServer(("127.0.0.1", port), work / "access.log")
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _settings(export: Path, work: Path, port: int, server: str) -> str:
    temporary = "".join(
        f"{kind}_temp_path {work / kind}; "
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    own = server.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("/srv/kdn", str(export))
    return f"""
daemon off; master_process off; pid {work / "nginx.pid"};
{f"user {user};" if os.getuid() == 0 else ""}
events {{ worker_connections 1024; }}
http {{
  log_format lines "$request_method $uri $status $http_range";
  access_log {work / "access.log"} lines; {temporary}
  {own}
}}
"""


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    told = log.read_text(errors="replace")[-500:] if log.exists() else ""
    raise WebServerError(f"nginx did not start within {START_S} s: {told}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
