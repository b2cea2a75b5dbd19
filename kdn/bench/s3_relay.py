"""Answers of an S3 server, passed on with the status they should have.

`rclone serve s3` answers a range rightly, but with status 200 where S3 says 206 (seen in 1.75), and
clients who ask for ranges refuse that. So it is measured and tested behind this, which changes the
status of whatever has a Content-Range, and nothing else. Run it as `python -m kdn.bench.s3_relay
PORT TARGET_PORT`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from contextlib import suppress

HOST = "127.0.0.1"
STEP_BYTES = 256 << 10
BUFFER_BYTES = 1 << 20
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_RANGE = re.compile(rb"\r\ncontent-range:", re.IGNORECASE)
_NO_BODY = re.compile(rb"HTTP/1\.1 (1\d\d|204|304)")


async def serve(port: int, target_port: int) -> None:
    async def talk(client: StreamReader, answers: StreamWriter) -> None:
        with suppress(IncompleteReadError, OSError):
            server, requests = await asyncio.open_connection(HOST, target_port, limit=BUFFER_BYTES)
            try:
                while True:
                    await _exchange(client, requests, server, answers)
            finally:
                requests.close()
                answers.close()

    listening = await asyncio.start_server(talk, HOST, port, limit=BUFFER_BYTES)
    await listening.serve_forever()


async def _exchange(
    client: StreamReader, requests: StreamWriter, server: StreamReader, answers: StreamWriter
) -> None:
    """One request there, one answer back."""
    request = await client.readuntil(b"\r\n\r\n")
    requests.write(request)
    await _pass_body(request, client, requests)
    answer = await server.readuntil(b"\r\n\r\n")
    if answer.startswith(b"HTTP/1.1 200 ") and _RANGE.search(answer):
        answer = b"HTTP/1.1 206 Partial Content" + answer[answer.index(b"\r\n") :]
    answers.write(answer)
    if not request.startswith(b"HEAD ") and not _NO_BODY.match(answer):
        await _pass_body(answer, server, answers)
    await answers.drain()


async def _pass_body(head: bytes, source: StreamReader, target: StreamWriter) -> None:
    length = _LENGTH.search(head)
    if length is not None:
        await _pass(int(length.group(1)), source, target)
    elif _CHUNKED.search(head):
        size = -1
        while size:
            line = await source.readline()
            size = int(line, 16)
            target.write(line)
            await _pass(size + 2, source, target)


async def _pass(left_bytes: int, source: StreamReader, target: StreamWriter) -> None:
    while left_bytes:
        data = await source.read(min(left_bytes, STEP_BYTES))
        if not data:
            raise IncompleteReadError(b"", left_bytes)
        target.write(data)
        await target.drain()
        left_bytes -= len(data)


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
