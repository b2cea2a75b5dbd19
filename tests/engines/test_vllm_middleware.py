"""Around vLLM's server: what names nothing passes as it is, and nobody finds out what vLLM keeps
from them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kdn.engines.vllm import middleware as middleware_file
from kdn.engines.vllm.middleware import Message
from kdn.engines.vllm.referring import CHATS, COMPLETIONS
from tests.engines.vllm_referring import Server, chat, completion
from tests.node.harness import run


def test_bodies_come_in_any_number_of_parts() -> None:
    server = Server()
    expected = server.rewritten(CHATS, chat("report"))
    for parts in (2, 7, 1000):
        server.post(CHATS, chat("report"), parts=parts)
        assert json.loads(server.seen[-1]) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": [{"role": "user", "content": 'say "kdn"'}]},
        {"kdn": None, "prompt": "x"}, {"kv_transfer_params": {"kdn": {"quality": 0.1}}},
        ["kdn"], "kdn", 3, b"", b"not JSON", b"\xff\xfe", {"prompt": "x" * 100_000},
    ],
)  # fmt: skip
def test_requests_without_names_are_untouched(body: Any) -> None:
    server = Server()
    for path in (CHATS, COMPLETIONS, "/v1/embeddings"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, said, headers = server.post(path, body, parts=3)
        assert (status, said) == (200, b"answer to " + data)
        assert server.seen[-1] == data
        assert headers[b"content-type"] == b"text/plain"
    assert not server.names.asked


def test_what_is_no_json_is_not_read() -> None:
    server = Server()
    data = json.dumps(chat("report")).encode()
    for more in ({"method": "GET"}, {"kind": b"multipart/form-data"}):
        assert server.post(CHATS, data, **more)[1] == b"answer to " + data


def test_websockets_and_lifespans_pass_and_the_last_closes() -> None:
    server = Server()

    async def speak(kind: str) -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "hello"}

        async def send(message: Message) -> None:
            sent.append(message)

        await server.middleware({"type": kind}, receive, send)
        return sent

    assert run(speak("websocket")) == [{"type": "websocket.hello"}]
    server.rewritten(CHATS, chat("report"))
    assert not server.is_closed
    assert run(speak("lifespan")) == [{"type": "lifespan.hello"}]
    assert server.is_closed


def test_a_long_body_without_names_passes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware_file, "MAX_BODY_BYTES", 1000)
    server = Server()
    data = json.dumps({"prompt": "x" * 5000}).encode()
    assert server.post(COMPLETIONS, data, parts=20)[1] == b"answer to " + data


def test_a_long_body_with_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are in it."""
    monkeypatch.setattr(middleware_file, "MAX_BODY_BYTES", 1000)
    server = Server()
    for body in (
        completion("report", prompt="x" * 5000),
        {"prompt": "x" * 5000, "kdn": {"with": ["report"]}},
    ):
        for parts in (1, 20, 700):
            assert server.refused(COMPLETIONS, body, parts=parts)[0] == 413


def test_who_may_not_ask_finds_out_nothing() -> None:
    server = Server(api_key=b"Bearer key")
    for name in ("report", "unknown"):
        status, said, _ = server.post(CHATS, chat(name))
        assert (status, said) == (401, b"Unauthorized")
    assert not server.names.asked
    status, _, _ = server.post(CHATS, chat("report"), headers=[(b"authorization", b"Bearer key")])
    assert status == 200


def test_json_that_is_none() -> None:
    server = Server()
    for body in (
        b'{"kdn": {"with": ["report"]}', b'{"kdn"', b'["kdn"' * 100_000,
        b'{"kdn": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"kdn": ' + b"9" * 10_000 + b"}", b'{"kdn": {"with": ["\xff"]}}',
    ):  # fmt: skip
        status, _ = server.refused(CHATS, body)
        assert status == 400


def test_a_body_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware_file, "BODY_S", 0.05)
    server, sent = Server(), []

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHATS,
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    run(server.middleware(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_client_that_goes_away_is_no_error() -> None:
    server, sent = Server(), []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHATS,
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    run(server.middleware(scope, receive, send))
    assert sent[0]["status"] == 400  # vLLM's own
