"""The client, for asyncio. `synchronous.py` wraps it for everybody else.

A context is learned once: the model reads it, its cache is cut into chunks, encoded and published,
and a name points to its token ids. Whoever asks about that name later loads the chunks, as good as
the request wants them by its deadline, and the model reads only what is missing and the question.
Values computed on top of lossy ones are never published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from kdn.cache.keys import CHUNK_TOKENS, PUBLIC_SECRET, Chunk, Namespace, Tokens, cut, seal_key
from kdn.checked import (
    MAX_WAIT_S,
    checked_choice,
    checked_client,
    checked_deadline,
    checked_number,
    checked_text,
    checked_texts,
    checked_tokens,
    shown,
)
from kdn.client.answers import Answer, Learned, Loaded, Metrics, Stats
from kdn.client.audit import Audit
from kdn.client.conversation import Conversation
from kdn.client.engine import Context, Engine, ModelSource, check_source, load_pair, values_of_cache
from kdn.client.learning import FLUSH_S, Learner
from kdn.client.loading import Loader, usable_chunks
from kdn.client.options import Options
from kdn.client.quality import Quality, enough_kld
from kdn.codec import CODECS
from kdn.config import find_credentials
from kdn.delivery.publish import Publisher
from kdn.delivery.request import OnProgress, Result
from kdn.depot.manifests import checked_name
from kdn.engines.generating import Sampling, TextPieces
from kdn.engines.growing import Room, Rooms
from kdn.engines.prompts import PLAIN, Knowledge, Prompts
from kdn.engines.reading import pieces
from kdn.engines.speeds import measured_speeds
from kdn.engines.transformers import spec_of
from kdn.engines.unchanged import Unchanged
from kdn.errors import FormatError, MismatchError, StoreError, UnsupportedError
from kdn.places.manifests import entry_of
from kdn.places.places import Places, Where, checked_places, open_places
from kdn.shared_profiles import codec_for, share_profile


class AsyncClient:
    """`async with AsyncClient(where, model=...) as client`. `connect` tells the parameters."""

    def __init__(
        self,
        where: Where,
        *,
        model: ModelSource = "smollm2",
        codec: str = "klt",
        quality: Quality = "default",
        deadline_s: float | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        secret: bytes | None = None,
        secret_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        client: str | None = None,
        recompute: bool = True,
        audit_share: float = 0.0,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checked_places(where)
        check_source(model)
        checked_choice("codec", codec, CODECS)
        enough_kld(quality)
        checked_deadline(deadline_s)
        checked_client(client)
        checked_number("audit_share", audit_share, 0, 1)
        self.metrics = Metrics()
        self.now_s = clock
        self._where, self._client = where, client
        self._credentials = find_credentials(
            token=token, token_file=token_file, secret=secret, secret_file=secret_file,
            tls_ca=tls_ca,
        )  # fmt: skip
        self._source, self._codec_name = model, codec
        self._quality, self._deadline_s = quality, deadline_s
        self._recompute = recompute
        self._audit = Audit(audit_share, rng or Random(), self.metrics)
        self._stack = AsyncExitStack()
        self.places: Places
        self.engine: Engine
        self.loader: Loader
        self.learner: Learner

    async def __aenter__(self) -> AsyncClient:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _open(self) -> None:
        own = self._credentials
        places = open_places(self._where, token=own.token, client=self._client, tls_ca=own.tls_ca)
        self.places = await self._stack.enter_async_context(places)
        model, tokenizer = await asyncio.to_thread(load_pair, self._source)
        unchanged = Unchanged(model)  # first: what changes while it is being named counts, too
        spec = await asyncio.to_thread(spec_of, model)
        secret = own.secret or PUBLIC_SECRET
        codec = await codec_for(self._codec_name, spec, self.places, seal_key(secret))
        namespace = Namespace(spec.fingerprint, codec.profile_id, secret=secret)
        rooms = Rooms(spec, model.dtype)
        self.engine = Engine(
            model, tokenizer, codec, namespace, Prompts(tokenizer), rooms, unchanged
        )
        speeds = None
        if self._recompute:
            speeds = await asyncio.to_thread(measured_speeds, model, codec)
        publisher = Publisher(self.places.publish_to, codec)
        await self._stack.enter_async_context(publisher)
        self._stack.push_async_callback(self._audit.close)
        self.loader = Loader(self.engine, self.places, self._quality, self._deadline_s, speeds)
        self.learner = Learner(self.engine, self.places, self.loader, publisher, self.now_s)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish publishing, as far as that takes no longer than a few seconds."""
        await self._stack.aclose()

    async def learn(self, name: str, what: Knowledge) -> Learned:
        """Let the model read a text, token ids or messages, publish what nobody has yet, and give
        it a name. Returns when it is stored."""
        began_s = self.now_s()
        checked_name(name)
        if isinstance(what, str):
            checked_text("what", what)
        tokens, style = self.engine.prompts.learn(what)
        checked_tokens("what", tokens, self.engine.codec.spec.vocab_size)
        chunks = cut(tokens, await self.engine.names())
        known = await self.learner.num_known(chunks)
        computed = 0
        if known < len(chunks):
            computed = await self.learner.learn(tokens, chunks, known)
        if self.engine.codec.name == "klt":
            await share_profile(self.engine.codec, self.places, self.engine.namespace.seal_key)
        await self.places.names.change(
            name, lambda old: self.learner.manifest(name, old, tokens, style, chunks)
        )
        new = len(chunks) - known
        return Learned(name, len(tokens), known, new, computed, self.now_s() - began_s)

    async def load(
        self,
        tokens: Tokens,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Loaded:
        """The cache of the longest beginning of these tokens that is known."""
        options = Options(quality, deadline_s, on_progress=on_progress)
        checked_tokens("tokens", tokens, self.engine.codec.spec.vocab_size)
        chunks = await self.loader.known_chunks(tokens)
        if not chunks:
            return Loaded(None, 0, None, self.engine.config)
        result = await self.loader.deliver(chunks, options)
        usable = usable_chunks(result)
        if not usable or (usable < len(chunks) and not result.cache.is_complete):
            return Loaded(None, 0, result, self.engine.config)
        end = chunks[usable - 1].end
        return Loaded(result.cache.slice(0, end), end, result, self.engine.config)

    def ask(
        self,
        name: str,
        question: str,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> Answer:
        """The answer to a question about something learned, as it is made."""
        checked_name(name)
        checked_text("question", question)
        sampling = Sampling(max_new_tokens, temperature, seed)
        stats = Stats()
        options = Options(quality, deadline_s, sampling, on_progress)
        return Answer(self._ask(name, question, options, stats), stats)

    async def _ask(
        self, name: str, question: str, options: Options, stats: Stats
    ) -> AsyncGenerator[str, None]:
        began_s = self.now_s()
        tokens, style = await self.named(name)
        context = await self.context_of(tokens, options, stats)
        prompt = [*tokens, *self.engine.prompts.ask(question, style)]
        async for piece in self.turn(context, prompt, options, stats, began_s):
            yield piece
        if not self._audit.maybe(self.engine, context, stats.new_tokens):
            self.engine.leave(context)

    async def ask_all(
        self,
        name: str,
        questions: Sequence[str],
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = 256,
    ) -> list[str]:
        """Answers to several questions about one thing: delivered once, answered as a batch."""
        stats, options = Stats(), Options(quality, deadline_s)
        sampling = Sampling(max_new_tokens)
        questions = checked_texts("questions", questions)
        tokens, style = await self.named(name)
        context = await self.context_of(tokens, options, stats)
        rest = tokens[context.num_tokens :]
        rows = [[*rest, *self.engine.prompts.ask(question, style)] for question in questions]
        stats.computed_tokens += sum(map(len, rows))
        answers = await self.engine.answer_all(context, rows, sampling)
        self.engine.leave(context)
        self.metrics.count(stats)
        return [self.engine.text(answer) for answer in answers]

    def converse(
        self,
        name: str | None = None,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Conversation:
        """Questions that build on each other, about something learned or about nothing yet."""
        sampling = Sampling(max_new_tokens, temperature, seed)
        if name is not None:
            checked_name(name)
        return Conversation(self, name, Options(quality, deadline_s, sampling))

    async def publish(self, tokens: Tokens, cache: Any, *, after: Loaded | None = None) -> int:
        """Publish what a model of transformers has read: its `past_key_values`, or a `KVCache`.

        `after` is what it went on from, if that was loaded: what was computed on top of losses is
        not published. Returns how many chunks are on their way; `flush` waits for them.
        """
        spec = self.engine.codec.spec
        checked_tokens("tokens", tokens, spec.vocab_size)
        if after is not None and not isinstance(after, Loaded):
            raise UnsupportedError(f"after: expected what was loaded, found {shown(after)}")
        values = values_of_cache(cache, spec)
        known, exact = 0, True
        if after is not None and after.result is not None:
            known = after.num_tokens
            exact = after.result.exact_chunks >= usable_chunks(after.result)
        chunks = [c for c in cut(tokens, await self.engine.names()) if c.end > known]
        return self.learner.publish_given(chunks, values, exact)

    async def flush(self, deadline_s: float = FLUSH_S) -> bool:
        """Wait until all that was published is stored; False if that took too long."""
        return await self.learner.publisher.flush(
            checked_number("deadline_s", deadline_s, 0, MAX_WAIT_S)
        )

    async def forget(self, name: str) -> bool:
        """Forget a name, and the chunks that only it used. False if there is none."""
        return await self.places.names.delete(checked_name(name)) is not None

    # for conversations, too

    async def named(self, name: str) -> tuple[list[int], str]:
        """Token ids that a name points to, and how to ask about them."""
        found = await self.places.names.get(name)
        if found is None:
            raise StoreError(f"there is no name {name!r} at {self.places.publish_to.name}")
        model, seal_key = self.engine.codec.spec.fingerprint, self.engine.namespace.seal_key
        entry = entry_of(found.manifest, name, model, seal_key)
        if entry is None:
            raise MismatchError(f"{name!r} was learned with another model: learn it with this one")
        try:
            return [int(token) for token in entry["tokens"]], str(entry.get("style", PLAIN))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the manifest of {name!r} has no token ids") from error

    async def context_of(self, tokens: Sequence[int], options: Options, stats: Stats) -> Context:
        """All whole chunks of `tokens`: delivered, or read where nothing was to be had."""
        chunks = cut(tokens, await self.engine.names())
        if not chunks:
            return self.engine.new_context()
        room = self.engine.room_for(chunks[-1].end)
        result = await self.loader.deliver(chunks, options, room)
        stats.fetched_bytes, stats.delivery_s = result.fetched_bytes, result.done_s
        stats.levels, stats.troubles = result.levels, result.troubles
        context = await self._joined(result, tokens, chunks, room)
        if context.delivered:
            both = zip(chunks, result.levels, strict=True)
            stats.known_tokens = sum(chunk.num_tokens for chunk, levels in both if levels)
        stats.computed_tokens = context.num_tokens - stats.known_tokens
        return context

    async def _joined(
        self, result: Result, tokens: Sequence[int], chunks: Sequence[Chunk], room: Room | None
    ) -> Context:
        """Of what was delivered and what the model must read, in order."""
        engine, usable = self.engine, usable_chunks(result)
        context = engine.new_context(room)
        if usable < len(chunks) and not result.cache.is_complete:
            # Layers with windows: only of the whole is it known what they hold.
            await self.learner.read(context, tokens, chunks)
            return context
        if usable:
            part = result.cache.slice(0, chunks[usable - 1].end)
            context = engine.context_of(part, tokens, result.exact_chunks >= usable, room)
        context.delivered = True
        for chunk, levels in list(zip(chunks, result.levels, strict=True))[usable:]:
            if levels:
                part = result.cache.slice(chunk.start, chunk.end)
                engine.append(context, part, tokens[chunk.start : chunk.end])
                context.exact = context.exact and levels == result.num_levels
            else:
                await self.learner.read(context, tokens, [chunk])
        return context

    async def turn(
        self,
        context: Context,
        prompt: Sequence[int],
        options: Options,
        stats: Stats,
        began_s: float,
        publish: bool = False,
    ) -> AsyncGenerator[str, None]:
        """Read what is left of the prompt, and answer."""
        held = context.num_tokens
        del context.tokens[held:]
        stats.prompt_tokens = len(prompt)
        stats.computed_tokens += len(prompt) - held
        for start, end in pieces(held, len(prompt)):
            await self.engine.read(context, prompt[start:end])
            await self._publish_end(context, publish)
        text = TextPieces(self.engine.tokenizer)
        async for token in self.engine.answer(context, options.sampling):
            if not stats.new_tokens:
                stats.ttft_s = self.now_s() - began_s
            stats.new_tokens += 1
            await self._publish_end(context, publish)
            if piece := text.add(token):
                yield piece
        if piece := text.rest():
            yield piece
        self.metrics.count(stats)
        if publish:
            await self._publish_tail(context)

    async def _publish_end(self, context: Context, publish: bool) -> None:
        """The chunk that has just become whole, before any layer drops a part of it."""
        count = context.num_tokens
        if publish and context.exact and count and count % CHUNK_TOKENS == 0:
            chunks = cut(context.tokens[:count], await self.engine.names())
            await self.learner.publish(context, chunks[-1])

    async def _publish_tail(self, context: Context) -> None:
        chunks = cut(context.tokens[: context.num_tokens], await self.engine.names())
        if chunks and context.exact and chunks[-1].num_tokens < CHUNK_TOKENS:
            values = self.engine.values_of(context, chunks[-1])
            self.learner.publish_given(chunks[-1:], values, True)
