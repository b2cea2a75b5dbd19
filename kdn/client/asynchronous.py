"""The client, for asyncio. `synchronous.py` wraps it for everybody else.

A context is learned once: the model reads it, its cache is cut into chunks, encoded and published,
and a name points to its token ids. Whoever asks about that name later loads the chunks, as good as
the request wants them by its deadline, and the model reads only what is missing and the question.
What the deadline left coarser than asked for becomes finer while the answer goes on. Values
computed on top of lossy ones are never published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from kdn.cache.keys import Chunk, Tokens, cut
from kdn.cache.tensors import KVCache
from kdn.checked import (
    MAX_WAIT_S,
    checked_choice,
    checked_client,
    checked_count,
    checked_deadline,
    checked_function,
    checked_name,
    checked_number,
    checked_text,
    checked_texts,
    checked_tokens,
    shown,
)
from kdn.client.answers import Answer, Learned, Loaded, Metrics, Stats
from kdn.client.audit import Audit
from kdn.client.contexts import Contexts, Options
from kdn.client.conversation import Conversation
from kdn.client.engine import Context, Engine, ModelSource, check_source, load_pair, values_of_cache
from kdn.client.naming import find_name, give_name
from kdn.codec import CODECS
from kdn.config import find_credentials
from kdn.defaults import CODEC, DEVICE, MAX_NEW_TOKENS, MODEL, QUALITY, SPOOL_BYTES
from kdn.delivery.request import OnProgress
from kdn.engines.device import (
    Device,
    DType,
    check_device,
    check_dtype,
    follow_caller,
    model_stream,
    wait_for_model,
)
from kdn.engines.generating import Sampling, TextPieces
from kdn.engines.growing import Rooms
from kdn.engines.prompts import Knowledge, Prompts
from kdn.engines.reading import pieces
from kdn.engines.speeds import measured_speeds
from kdn.engines.transformers import spec_of
from kdn.engines.unchanged import Unchanged
from kdn.errors import KdnError, ReadOnlyError, StoreError, UnsupportedError
from kdn.places.places import Where, checked_places
from kdn.session.opened import Opened
from kdn.session.quality import Quality, enough_kld
from kdn.session.session import Session
from kdn.session.settings import SessionSettings

if TYPE_CHECKING:
    from transformers import Cache

FLUSH_S = 600.0
MAX_BYTES = 1 << 50

OnRead = Callable[[int, int], None]
"""How many tokens the model has read, and how many there are."""


class AsyncClient(Opened):
    """`async with AsyncClient(where, model=...) as client`. `connect` tells the parameters."""

    session: Session
    engine: Engine
    contexts: Contexts

    def __init__(
        self,
        where: Where,
        *,
        model: ModelSource = MODEL,
        device: Device = DEVICE,
        dtype: DType = None,
        codec: str = CODEC,
        quality: Quality = QUALITY,
        deadline_s: float | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        secret: bytes | None = None,
        secret_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        client: str | None = None,
        recompute: bool = True,
        audit_share: float = 0.0,
        spool_bytes: int = SPOOL_BYTES,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        places = checked_places(where)
        check_source(model)
        check_device(device)
        check_dtype(dtype)
        checked_choice("codec", codec, CODECS)
        enough_kld(quality)
        checked_deadline(deadline_s)
        checked_client(client)
        checked_number("audit_share", audit_share, 0, 1)
        checked_count("spool_bytes", spool_bytes, 0, MAX_BYTES)
        self.metrics = Metrics()
        self.now_s = clock
        credentials = find_credentials(
            token=token, token_file=token_file, secret=secret, secret_file=secret_file,
            tls_ca=tls_ca,
        )  # fmt: skip
        # No shared memory of the host: it outlives its engines, and clients come and go.
        self._settings = SessionSettings(
            tuple(places), credentials, client, codec, spool_bytes=spool_bytes, host_bytes=0
        )
        self._source, self._device, self._dtype = model, device, dtype
        self._quality, self._deadline_s = quality, deadline_s
        self._recompute = recompute
        self._audit = Audit(audit_share, rng or Random(), self.metrics)
        super().__init__()

    async def _open(self) -> None:
        model, tokenizer = await asyncio.to_thread(
            load_pair, self._source, self._device, self._dtype
        )
        unchanged = Unchanged(model)  # first: what changes while it is being named counts, too
        spec = await asyncio.to_thread(spec_of, model)
        session = Session(self._settings, spec, model.dtype, device=model.device)
        self.session = await self._parts.enter_async_context(session)
        self._parts.push_async_callback(self._audit.close)
        rooms = Rooms(spec, model.dtype, device=model.device)
        self.engine = Engine(
            model, tokenizer, spec, session.namespace, Prompts(tokenizer), rooms, unchanged
        )
        speeds = None
        if self._recompute:
            speeds = await asyncio.to_thread(measured_speeds, model, session.codec)
        self.contexts = Contexts(
            self.engine, session, self._quality, self._deadline_s, speeds, self.now_s
        )

    async def learn(self, name: str, what: Knowledge, *, on_read: OnRead | None = None) -> Learned:
        """Let the model read a text, token ids or messages, publish what nobody has yet, and give
        it a name. Returns when it is stored. `on_read` is told how many of how many tokens the
        model has read."""
        began_s = self.now_s()
        checked_name(name)
        checked_function("on_read", on_read)
        if isinstance(what, str):
            checked_text("what", what)
        tokens, style = self.engine.prompts.learn(what)
        checked_tokens("what", tokens, self.engine.spec.vocab_size)
        session, chunks = self.session, cut(tokens, await self.engine.names())
        if session.is_read_only:  # before the model reads
            place = session.places.publish_to.name
            raise ReadOnlyError(f"nothing can be learned into {place}: an export is read-only")
        known = await session.know_home(chunks)
        computed = 0
        if len(known.chunks) < len(chunks):
            context = await self.contexts.exact(known, tokens)
            computed = chunks[-1].end - context.num_tokens
            await self._read_all(context, tokens, chunks, on_read)
        await session.share_profile()
        await give_name(session, name, tokens, style, chunks)
        new = len(chunks) - len(known.chunks)
        seconds = self.now_s() - began_s
        return Learned(name, len(tokens), len(known.chunks), new, computed, seconds)

    async def _read_all(
        self,
        context: Context,
        tokens: Sequence[int],
        chunks: Sequence[Chunk],
        on_read: OnRead | None,
    ) -> None:
        """Let the model read all chunks, and wait until they are stored. StoreError if that takes
        too long, or as soon as one is refused."""
        publisher, place = self.session.publisher, self.session.places.publish_to.name
        new = [chunk for chunk in chunks if chunk.end > context.num_tokens]

        def check(num_read: int) -> None:
            refused = publisher.refused(chunk.key for chunk in new if chunk.end <= num_read)
            if refused:
                why = next(iter(refused.values()))
                raise StoreError(f"{len(refused)} chunks for {place} were refused: {why}")

        def told(num_read: int) -> None:
            check(num_read)
            if on_read is not None:
                on_read(num_read, len(tokens))

        published = await self.contexts.read(context, tokens, chunks, FLUSH_S, told)
        keys = [chunk.key for chunk in new]
        stored = published and await publisher.store_all(keys, FLUSH_S)
        check(len(tokens))
        if not stored:
            raise StoreError(f"{place} takes too long to store what is new")

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
        checked_tokens("tokens", tokens, self.engine.spec.vocab_size)
        await self.engine.names()
        known, options = await self.contexts.know(tokens, options)
        if not known.chunks:
            return Loaded(None, 0, None, self.engine.config)
        got, cache = await self.contexts.deliver(known.chunks, options, known)
        if not got.num_ready or (got.num_ready < len(got.chunks) and not cache.is_complete):
            return Loaded(None, 0, got, self.engine.config)
        end = got.ready_until
        return Loaded(cache.slice(0, end), end, got, self.engine.config)

    def ask(
        self,
        name: str,
        question: str,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        on_progress: OnProgress | None = None,
        force_latest: bool = False,
        stale_ok: bool = False,
    ) -> Answer:
        """The answer to a question about something learned, as it is made. Where a region answers,
        `force_latest` asks for the newest version that any region has acknowledged; if that cannot
        be known it fails, unless `stale_ok`."""
        checked_name(name)
        checked_text("question", question)
        sampling = Sampling(max_new_tokens, temperature, seed)
        stats = Stats()
        options = Options(quality, deadline_s, sampling, on_progress, force_latest, stale_ok)
        return Answer(self._ask(name, question, options, stats), stats)

    async def _ask(
        self, name: str, question: str, options: Options, stats: Stats
    ) -> AsyncGenerator[str, None]:
        began_s = self.now_s()
        tokens, style = await self.named(name, options, stats)
        context = await self.contexts.load(tokens, options, stats)
        prompt = [*tokens, *self.engine.prompts.ask(question, style)]
        is_audited = False
        try:
            async with aclosing(self.turn(context, prompt, options, stats, began_s)) as said:
                async for piece in said:
                    yield piece
            is_audited = self._audit.maybe(self.engine, context, stats.new_tokens)
        finally:
            if not is_audited:
                self.engine.leave(context)

    async def ask_all(
        self,
        name: str,
        questions: Sequence[str],
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        force_latest: bool = False,
        stale_ok: bool = False,
    ) -> list[str]:
        """Answers to several questions about one thing: delivered once, answered as a batch."""
        stats = Stats()
        options = Options(quality, deadline_s, force_latest=force_latest, stale_ok=stale_ok)
        sampling = Sampling(max_new_tokens)
        questions = checked_texts("questions", questions)
        tokens, style = await self.named(name, options, stats)
        context = await self.contexts.load(tokens, options, stats)
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
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        force_latest: bool = False,
        stale_ok: bool = False,
    ) -> Conversation:
        """Questions that build on each other, about something learned or about nothing yet."""
        sampling = Sampling(max_new_tokens, temperature, seed)
        if name is not None:
            checked_name(name)
        options = Options(quality, deadline_s, sampling, None, force_latest, stale_ok)
        return Conversation(self, name, options)

    async def publish(
        self, tokens: Tokens, cache: Cache | KVCache, *, after: Loaded | None = None
    ) -> int:
        """Publish what a model of transformers has read: its `past_key_values`, or a `KVCache`.

        `after` is what it went on from, if that was loaded: what was computed on top of losses is
        not published. Returns how many chunks are on their way; `flush` waits for them.
        """
        checked_tokens("tokens", tokens, self.engine.spec.vocab_size)
        if after is not None and not isinstance(after, Loaded):
            raise UnsupportedError(f"after: expected what was loaded, found {shown(after)}")
        follow_caller(self.engine.device)
        with model_stream(self.engine.device):
            values = values_of_cache(cache, self.engine.spec)
        known, exact_until = 0, None
        if after is not None and after.delivered is not None:
            known, exact_until = after.num_tokens, after.delivered.exact_until
        chunks = [c for c in cut(tokens, await self.engine.names()) if c.end > known]
        with suppress(KdnError, OSError):  # a place that is away is published to all the same
            chunks = chunks[len((await self.session.know_home(chunks)).chunks) :]
        queued = self.contexts.publish_given(chunks, values, exact_until)
        await asyncio.to_thread(wait_for_model, self.engine.device)  # the caller's cache is copied
        return queued

    async def flush(self, deadline_s: float = FLUSH_S) -> bool:
        """Wait until every published chunk is at its place, or safe in the spool on disk, from
        which it is sent when the place is back. False if that took too long."""
        return await self.session.publisher.flush(
            checked_number("deadline_s", deadline_s, 0, MAX_WAIT_S)
        )

    async def forget(self, name: str) -> bool:
        """Forget a name, and the chunks that only it used. False if there is none."""
        return await self.session.places.names.delete(checked_name(name)) is not None

    # for conversations, too

    async def named(
        self, name: str, options: Options | None = None, stats: Stats | None = None
    ) -> tuple[list[int], str]:
        """Token ids that a name points to, and how to ask about them."""
        how = options or Options()
        tokens, style, stale_s = await find_name(
            self.session, name, latest=how.force_latest, stale_ok=how.stale_ok
        )
        if stale_s is not None and stats is not None:
            stats.troubles += (f"{name!r} may be {stale_s:.0f} s out of date",)
        return tokens, style

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
        stats.prompt_tokens = len(prompt)
        stats.computed_tokens += len(prompt) - held
        if publish:  # a turn before this one may have been stopped just there
            await self.contexts.publish_end(context)
        for start, end in pieces(held, len(prompt)):
            await self.engine.read(context, prompt[start:end])
            if publish:
                await self.contexts.publish_end(context)
        text = TextPieces(self.engine.tokenizer)
        async with AsyncExitStack() as stack:
            better = self.contexts.refinement(context, options)
            async for token in self.engine.answer(context, options.sampling):
                if not stats.new_tokens:
                    stats.ttft_s = self.now_s() - began_s
                    if better is not None:
                        await stack.enter_async_context(better)
                stats.new_tokens += 1
                if publish:
                    await self.contexts.publish_end(context)
                if piece := text.add(token):
                    yield piece
                if better is not None:
                    await self.contexts.refine(context, better, stats)
        if piece := text.rest():
            yield piece
        self.metrics.count(stats)
        if publish:
            await self.contexts.publish_end(context, tail=True)
