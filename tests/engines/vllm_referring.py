"""A server behind the middleware for prompts by reference, and names for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kdn.cache.keys import seal_key
from kdn.engines.prompts import CHAT, Prompts
from kdn.engines.vllm.middleware import KdnMiddleware, Message, Receive, Scope, Send
from kdn.engines.vllm.references import References
from kdn.engines.vllm.referring import Referring
from kdn.places.manifests import with_entry
from kdn.places.names import Named, Names
from tests.client.letters import Letters
from tests.node.harness import run

MODEL, KEY = b"m" * 16, seal_key(b"a secret")
PROMPTS = Prompts(Letters())
HEAD = PROMPTS.begin()


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def entry(text: str, head: int | None = len(HEAD), style: str = CHAT) -> dict[str, Any]:
    tokens = [*HEAD, *ids(text)]
    return {"tokens": tokens, "style": style} | ({} if head is None else {"head": head})


class Kept(Names):
    """Manifests in memory, each as it is; counts how often it is asked."""

    def __init__(self) -> None:
        self.manifests: dict[str, Any] = {}
        self.asked: list[str] = []
        self.fault: BaseException | None = None
        self.takes_s = 0.0

    def learn(
        self, name: str, what: dict[str, Any], model: bytes = MODEL, key: bytes = KEY
    ) -> None:
        self.manifests[name] = with_entry({}, name, model, what, key)

    async def get(self, name: str, *, latest: bool = False, stale_ok: bool = False) -> Named | None:
        self.asked.append(name)
        await asyncio.sleep(self.takes_s)
        if self.fault is not None:
            raise self.fault
        found = self.manifests.get(name)
        return None if found is None else Named(found, "etag", 1)

    async def put(self, *_: Any) -> bool:
        raise NotImplementedError

    async def delete(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def history(self, *_: Any) -> Any:
        raise NotImplementedError

    def list(self, prefix: str = "") -> Any:
        raise NotImplementedError


@dataclass
class Server:
    """What stands behind the middleware, as FastAPI does: it reads the body, checks a key first if
    it has one, and answers with what it saw."""

    names: Kept = field(default_factory=Kept)
    max_tokens: int = 1000
    takes_chats: bool = True
    joins: bool = True
    api_key: bytes | None = None
    seen: list[bytes] = field(default_factory=list)
    is_closed: bool = False
    clock_s: float = 0.0

    def __post_init__(self) -> None:
        self.names.learn("report", entry("The report.\n\n"))
        self.names.learn("faq", entry("Some answers.\n\n"))
        references = References(self.names, MODEL, KEY, 128, lambda: self.clock_s)
        self.referring = Referring(
            references, PROMPTS, self.max_tokens, 128, self.takes_chats, self.joins
        )
        self.middleware = KdnMiddleware(self, lambda _: self)  # type: ignore[arg-type,return-value]

    async def get(self) -> Referring:
        return self.referring

    async def close(self) -> None:
        self.is_closed = True
        self.referring.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"access-control-allow-origin", b"*")]

        async def answer(status: int, data: bytes) -> None:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            for part in (data[:5], data[5:]):  # a stream
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        if scope["type"] != "http":
            await send({"type": f"{scope['type']}.{(await receive())['type']}"})
            return
        if self.api_key is not None and (b"authorization", self.api_key) not in scope["headers"]:
            await answer(401, b"Unauthorized")
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                await answer(400, b"There was an error parsing the body")
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append(body)
        await answer(200, b"answer to " + body)

    def post(
        self,
        path: str,
        body: Any,
        *,
        parts: int = 1,
        headers: Any = (),
        kind: bytes = b"application/json",
        **scope: Any,
    ) -> tuple[int, bytes, dict[bytes, bytes]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(data) // parts) or 1
        whole = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
        messages: Iterator[Message] = iter(
            {"type": "http.request", "body": part, "more_body": number < len(whole) - 1}
            for number, part in enumerate(whole)
        )
        sent: list[Message] = []

        async def receive() -> Message:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Message) -> None:
            sent.append(message)

        about = {
            "type": "http", "method": "POST", "path": path, "app": SimpleNamespace(state=None),
            "headers": [(b"content-type", kind), *headers], **scope,
        }  # fmt: skip
        run(self.middleware(about, receive, send))  # type: ignore[arg-type]
        assert [one["type"] for one in sent[:1]] == ["http.response.start"]
        assert sum(one["type"] == "http.response.start" for one in sent) == 1
        assert not sent[-1]["more_body"]
        said = b"".join(one["body"] for one in sent[1:])
        return sent[0]["status"], said, dict(sent[0]["headers"])

    def rewritten(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, said, _ = self.post(path, body)
        assert status == 200, said
        told: dict[str, Any] = json.loads(self.seen[-1])
        return told

    def refused(self, path: str, body: Any, **more: Any) -> tuple[int, str]:
        """The status and the message of an error in OpenAI's form; nothing has come through."""
        before = len(self.seen)
        status, said, headers = self.post(path, body, **more)
        assert len(self.seen) == before
        error = json.loads(said)["error"]
        assert error["code"] == status >= 400
        assert set(error) == {"message", "type", "param", "code"}
        assert headers[b"content-type"] == b"application/json"
        assert headers[b"access-control-allow-origin"] == b"*"  # what vLLM adds stays
        assert int(headers[b"content-length"]) == len(said)
        assert "Traceback" not in error["message"]
        return status, error["message"]


def chat(*names: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Why?"}]
    return {"model": "m", "messages": messages, "kdn": {"with": list(names)}, **more}


def completion(*names: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Why?", "kdn": {"with": list(names)}, **more}
