"""A collector of traces that keeps nothing: it counts what comes, for each sender.

Run as `python -m kdn.bench.observed.sink PORT`. The first part of a path names the sender: a POST
to `/node/v1/traces` is the node's, and a GET of `/node` answers how many bytes it has posted.
"""

from __future__ import annotations

import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

MOST_BYTES = 64 << 20


class Sink(BaseHTTPRequestHandler):
    taken_bytes: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        size = min(int(self.headers.get("Content-Length") or 0), MOST_BYTES)
        self.rfile.read(size)
        self.taken_bytes[self._sender()] += size
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"%d" % self.taken_bytes[self._sender()])

    def _sender(self) -> str:
        return self.path.split("/")[1]

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Sink).serve_forever()
