"""The client for code without an event loop: the same one, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from kdn.cache.keys import Tokens
from kdn.client.answers import Answer as AsyncAnswer
from kdn.client.answers import Learned, Loaded, Metrics, Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.conversation import Conversation as AsyncConversation
from kdn.engines.prompts import Knowledge
from kdn.places.places import Where

T = TypeVar("T")
logger = logging.getLogger(__name__)


def connect(where: Where, **settings: Any) -> Client:
    """Open a client: `with kdn.connect("http://node:8470", model="smollm2") as client`.

    `where` is a folder, the URL of a node, or several of them: all are read, the first node (or
    else the first folder) is written to. Settings:

    - `model`: smollm2, a local folder, a name on the hub, or (model, tokenizer) of transformers;
    - `codec`: "klt", or "exact" without any loss;
    - `quality`: "draft", "default", "high", "exact", or the KL divergence that is good enough;
    - `deadline_s`: what has not arrived by then, the model reads itself;
    - `token` or `token_file`: of the tenant, for nodes that have tenants;
    - `secret` (bytes) or `secret_file`: only your engines know it; who lacks it cannot find your
      chunks. Where none of them is given, KDN_CLIENT_TOKEN, KDN_CLIENT_TOKEN_FILE,
      KDN_CLIENT_SECRET and KDN_CLIENT_SECRET_FILE are asked;
    - `tls_ca`: a PEM file, if a private authority signed the node's certificate;
    - `client`: a name for fair sharing;
    - `recompute`: whether the model may read along while chunks load (True);
    - `audit_share`: what part of all answers is held against the model's own, in `metrics`.
    """
    return Client(where, **settings)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kdn", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """An exit or interrupt that somebody's code raises in here reaches who waits for it; the
        loop must go on for that, and for all others."""
        while not self._closing and not self._loop.is_closed():
            try:
                self._loop.run_forever()
            except BaseException as error:
                logger.warning("the event loop was interrupted and goes on: %r", error)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for it. An interrupt (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._thread.is_alive():
            self.run(self._loop.shutdown_asyncgens())
            self.run(self._loop.shutdown_default_executor())
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Answer:
    """Text as it is made: `for piece in answer`, or all of it with `answer.read()`."""

    def __init__(self, loop: Loop, answer: AsyncAnswer) -> None:
        self._loop = loop
        self._answer = answer

    @property
    def stats(self) -> Stats:
        return self._answer.stats

    @property
    def text(self) -> str:
        """So far."""
        return self._answer.text

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._loop.run(_next(self._answer))
        if piece is None:
            raise StopIteration
        return piece

    def read(self) -> str:
        return self._loop.run(self._answer.read())

    def close(self) -> None:
        """Stop here."""
        self._loop.run(self._answer.close())


async def _next(answer: AsyncAnswer) -> str | None:
    return await anext(answer, None)


class Conversation:
    """See `kdn/client/conversation.py`."""

    def __init__(self, loop: Loop, conversation: AsyncConversation) -> None:
        self._loop = loop
        self._conversation = conversation

    @property
    def tokens(self) -> list[int]:
        return self._conversation.tokens

    def ask(self, question: str) -> Answer:
        return Answer(self._loop, self._conversation.ask(question))


class Client:
    """Made by `connect`. Methods and parameters are those of `AsyncClient`."""

    def __init__(self, where: Where, **settings: Any) -> None:
        self._client = AsyncClient(where, **settings)
        self._loop = Loop()
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    @property
    def metrics(self) -> Metrics:
        return self._client.metrics

    @property
    def model(self) -> Any:
        return self._client.engine.model

    @property
    def tokenizer(self) -> Any:
        return self._client.engine.tokenizer

    def learn(self, name: str, what: Knowledge) -> Learned:
        return self._loop.run(self._client.learn(name, what))

    def load(self, tokens: Tokens, **options: Any) -> Loaded:
        return self._loop.run(self._client.load(tokens, **options))

    def ask(self, name: str, question: str, **options: Any) -> Answer:
        return Answer(self._loop, self._client.ask(name, question, **options))

    def ask_all(self, name: str, questions: Sequence[str], **options: Any) -> list[str]:
        return self._loop.run(self._client.ask_all(name, questions, **options))

    def converse(self, name: str | None = None, **options: Any) -> Conversation:
        return Conversation(self._loop, self._client.converse(name, **options))

    def publish(self, tokens: Tokens, cache: Any, *, after: Loaded | None = None) -> int:
        return self._loop.run(self._client.publish(tokens, cache, after=after))

    def flush(self, deadline_s: float = 600.0) -> bool:
        return self._loop.run(self._client.flush(deadline_s))

    def forget(self, name: str) -> bool:
        return self._loop.run(self._client.forget(name))

    def close(self) -> None:
        try:
            self._loop.run(self._client.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
