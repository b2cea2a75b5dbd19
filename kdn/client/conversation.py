"""Questions that build on each other.

The context stays in memory between turns, and each turn's chunks are published as they come: the
conversation can go on elsewhere, on another machine, from where it was. (Not on top of a cache that
was loaded with losses, nor of several that were joined: see `kdn/delivery/publish.py`.)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from kdn import tracing
from kdn.cache.keys import cut
from kdn.checked import checked_text
from kdn.client.answers import Answer, Stats
from kdn.client.engine import Context
from kdn.engines.prompts import CHAT, PLAIN

if TYPE_CHECKING:
    from kdn.client.asynchronous import AsyncClient
    from kdn.client.contexts import Options
    from kdn.client.joining import Names


class Conversation:
    """Made by `AsyncClient.converse`. One turn at a time."""

    def __init__(self, client: AsyncClient, name: Names | None, options: Options) -> None:
        self._client = client
        self._name = name
        self._options = options
        self._style = CHAT if client.engine.prompts.has_template else PLAIN
        self._context: Context | None = None
        self._begun: list[int] = []
        """What stands before the first question."""

    @property
    def tokens(self) -> list[int]:
        """Everything so far: prompts and answers."""
        return [] if self._context is None else list(self._context.tokens)

    def ask(self, question: str) -> Answer:
        checked_text("question", question)
        stats = Stats(request_id=tracing.new_id())
        return Answer(self._ask(question, stats), stats)

    async def _ask(self, question: str, stats: Stats) -> AsyncGenerator[str, None]:
        client, began_s = self._client, self._client.now_s()
        with tracing.Request.begin("kdn.ask", stats.request_id) as request:
            prompt = await self._prompt(question, stats, request)
            assert self._context is not None
            async for piece in client.turn(
                self._context, prompt, self._options, stats, began_s, request
            ):
                yield piece

    async def _prompt(self, question: str, stats: Stats, request: tracing.Request) -> list[int]:
        """All tokens up to the end of this question."""
        prompts = self._client.engine.prompts
        if self._context is None:
            with request.resumed():
                self._context, self._begun = await self._beginning(stats)
        else:
            stats.known_tokens = self._context.num_tokens
        if self._context.num_tokens <= len(self._begun):  # also if one was refused before
            tokens = self._begun
            asked = prompts.ask(question, self._style)
        else:
            tokens = list(self._context.tokens)
            asked = prompts.follow_up(question, self._style)
        return [*tokens, *asked]

    async def _beginning(self, stats: Stats) -> tuple[Context, list[int]]:
        client = self._client
        if self._name is not None:
            context, tokens, self._style = await client.begin(self._name, self._options, stats)
            return context, tokens
        tokens = client.engine.prompts.begin()
        chunks = cut(tokens, client.engine.namespace)
        return await client.contexts.load(tokens, chunks, self._options, stats), tokens
