"""A collector of traces that keeps nothing: it counts what comes.

Run as `python -m kdn.bench.observed.sink PORT`. A GET answers the number of bytes that were posted.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Sink(BaseHTTPRequestHandler):
    taken_bytes = 0

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(size)
        Sink.taken_bytes += size
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"%d" % Sink.taken_bytes)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Sink).serve_forever()
