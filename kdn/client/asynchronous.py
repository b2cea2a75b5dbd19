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
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from kdn import tracing
from kdn.blend.seams import Seams
from kdn.cache.keys import Tokens
from kdn.cache.tensors import KVCache
from kdn.checked import (
    MAX_WAIT_S,
    checked_choice,
    checked_client,
    checked_count,
    checked_deadline,
    checked_name,
    checked_number,
    checked_text,
    checked_texts,
    shown,
)
from kdn.client import by_hand
from kdn.client.answers import Answer, Joined, Learned, Loaded, Stats
from kdn.client.audit import Audit
from kdn.client.contexts import Contexts, Options
from kdn.client.conversation import Conversation
from kdn.client.engine import Context, Engine, ModelSource, check_source, load_pair
from kdn.client.fitting import Asked, fit_and_share
from kdn.client.joining import Joins, Names, checked_names, checked_pieces
from kdn.client.learning import FLUSH_S, Learning, OnRead
from kdn.client.metrics import Metrics
from kdn.client.naming import Named, find_name
from kdn.client.resuming import Resuming
from kdn.codec import CODECS
from kdn.config import client_of_environment, find_credentials
from kdn.defaults import (
    CODEC,
    DEVICE,
    MAX_NEW_TOKENS,
    MODEL,
    QUALITY,
    SPOOL_BYTES,
    STATE_SPACING,
    STORED_QUALITY,
)
from kdn.delivery.request import OnProgress
from kdn.engines.device import (
    Device,
    DType,
    check_device,
    check_dtype,
)
from kdn.engines.generating import Sampling, TextPieces
from kdn.engines.growing import Rooms
from kdn.engines.prompts import Knowledge, Prompts
from kdn.engines.reading import state_layout
from kdn.engines.seam_fitting import OnProgress as OnFitting
from kdn.engines.speeds import measured_speeds
from kdn.engines.transformers import spec_of
from kdn.engines.unchanged import Unchanged
from kdn.errors import UnsupportedError
from kdn.places.places import Where, checked_places
from kdn.session.opened import Opened
from kdn.session.quality import Quality, enough_join_kld, enough_kld
from kdn.session.seams import checked_tag
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from kdn.session.states import States

if TYPE_CHECKING:
    from transformers import Cache

MAX_BYTES = 1 << 50
MAX_SPACING = 1 << 20


class AsyncClient(Opened):
    """`async with AsyncClient(where, model=...) as client`. The parameters are
    those of `connect`."""

    session: Session
    engine: Engine
    contexts: Contexts
    joins: Joins

    def __init__(
        self,
        where: Where,
        *,
        model: ModelSource = MODEL,
        device: Device = DEVICE,
        dtype: DType = None,
        codec: str = CODEC,
        quality: Quality = QUALITY,
        stored_quality: Quality = STORED_QUALITY,
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
        seams: str | None = "",
        state_spacing: int = STATE_SPACING,
        request_log_bytes: int | None = None,
        tracing: bool | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        places = checked_places(where)
        check_source(model)
        check_device(device)
        check_dtype(dtype)
        checked_choice("codec", codec, CODECS)
        enough_kld(quality)
        enough_kld(stored_quality)
        checked_deadline(deadline_s)
        checked_client(client)
        checked_number("audit_share", audit_share, 0, 1)
        checked_count("spool_bytes", spool_bytes, 0, MAX_BYTES)
        told = client_of_environment()
        if request_log_bytes is None:
            request_log_bytes = told.request_log_bytes
        checked_count("request_log_bytes", request_log_bytes, 0, MAX_BYTES)
        if tracing is not None and not isinstance(tracing, bool):
            raise UnsupportedError(f"tracing: expected true or false, found {shown(tracing)}")
        self._state_spacing = checked_count("state_spacing", state_spacing, 1, MAX_SPACING)
        self._seams_tag = None if seams is None else checked_tag(seams)
        self.metrics = Metrics()
        self.now_s = clock
        credentials = find_credentials(
            token=token, token_file=token_file, secret=secret, secret_file=secret_file,
            tls_ca=tls_ca,
        )  # fmt: skip
        # No shared memory of the host: it outlives its engines, and clients come and go.
        self._settings = SessionSettings(
            tuple(places), credentials, client, codec, stored_quality=stored_quality,
            spool_bytes=spool_bytes, host_bytes=0, request_log_bytes=request_log_bytes,
            tracing=told.tracing if tracing is None else tracing,
        )  # fmt: skip
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
        speeds, layout = None, await asyncio.to_thread(state_layout, model)
        # A state is not read along to. Nor where a pass of the model changes its frequencies by
        # the length of its text, under the hands of another one.
        if self._recompute and layout is None and spec.max_tokens is None:
            speeds = await asyncio.to_thread(measured_speeds, model, session.codec)
        self.contexts = Contexts(
            self.engine, session, self._quality, self._deadline_s, speeds, self.now_s
        )
        if layout is not None:
            states = States(session, layout, self._state_spacing)
            self.contexts.resuming = Resuming(self.contexts, states)
        self._learning = Learning(self.contexts)
        self.joins = Joins(self.contexts, self._seams_tag)
        self._parts.push_async_callback(self.joins.close)

    async def learn(
        self,
        name: str,
        what: Knowledge,
        head: str | None = None,
        *,
        stored_quality: Quality | None = None,
        on_read: OnRead | None = None,
    ) -> Learned:
        """Let the model read a text, token ids or messages, publish the chunks that are new, and
        give it a name. Returns when everything is stored. A text is read behind `head`, a system
        prompt, or else behind the beginning of the chat template. Only texts with the same head can
        be joined. `stored_quality` is as for `connect`, for this text alone. `on_read` is called
        with the tokens that the model has read so far, and all."""
        with tracing.request("kdn.learn") as request:
            learned = await self._learning.learn(name, what, head, on_read, stored_quality)
        return replace(learned, request_id=request.id)

    async def load(
        self,
        tokens: Tokens,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Loaded:
        """The cache of the longest known prefix of these tokens."""
        options = Options(quality, deadline_s, on_progress=on_progress)
        with tracing.request("kdn.load") as request:
            loaded = await by_hand.load(self.contexts, tokens, options)
        return replace(loaded, request_id=request.id)

    async def join(
        self,
        names: Sequence[str],
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        on_progress: OnProgress | None = None,
        force_latest: bool = False,
        stale_ok: bool = False,
    ) -> Joined:
        """The cache of several things that were learned apart, one after another: a
        `past_key_values` for a model to continue from. Without a question, nothing is recomputed.
        At the quality "exact" the model reads everything instead."""
        is_read = enough_join_kld(self._quality if quality is None else quality) == 0
        options = Options(
            quality, deadline_s, Sampling(), on_progress, force_latest, stale_ok, float(is_read)
        )
        pieces = checked_pieces(names)
        with tracing.request("kdn.join") as request:
            stats = Stats(request_id=request.id)
            context, join, _ = await self.joins.begin(pieces, options, stats)
        cache, count = self.engine.values_of(context), join.num_tokens
        tokens, got = join.tokens.tolist(), context.delivered
        return Joined(cache, count, got, self.engine.config, tokens, stats, request_id=request.id)

    def ask(
        self,
        name: Names,
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
        recompute_share: float | None = None,
    ) -> Answer:
        """Answer a question about something learned, or about several things joined in this order
        (`["rules", "report"]`). The text arrives while it is made. With `force_latest`, a region
        answers from the newest version that any region has acknowledged; if it cannot find that
        out, the call fails, unless `stale_ok`. `recompute_share` is the share of a join's tokens to
        compute again where the question looks; None: as much as the quality needs."""
        checked_names(name)
        checked_text("question", question)
        sampling = Sampling(max_new_tokens, temperature, seed)
        stats = Stats(request_id=tracing.new_id())
        options = Options(
            quality, deadline_s, sampling, on_progress, force_latest, stale_ok, recompute_share
        )
        return Answer(self._ask(name, question, options, stats), stats)

    async def _ask(
        self, name: Names, question: str, options: Options, stats: Stats
    ) -> AsyncGenerator[str, None]:
        began_s = self.now_s()
        with tracing.Request.begin("kdn.ask", stats.request_id) as request:
            with request.resumed():
                context, tokens, style = await self.begin(name, options, stats)
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
        name: Names,
        questions: Sequence[str],
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        force_latest: bool = False,
        stale_ok: bool = False,
        recompute_share: float | None = None,
    ) -> list[str]:
        """Answer several questions about one thing, or about several things joined, as a batch from
        one delivery."""
        stats = Stats(request_id=tracing.new_id())
        options = Options(
            quality, deadline_s, force_latest=force_latest, stale_ok=stale_ok,
            recompute_share=recompute_share,
        )  # fmt: skip
        sampling = Sampling(max_new_tokens)
        questions = checked_texts("questions", questions)
        checked_names(name)
        with tracing.request("kdn.ask_all", stats.request_id):
            context, tokens, style = await self.begin(name, options, stats)
        rest = tokens[context.num_tokens :]
        rows = [[*rest, *self.engine.prompts.ask(question, style)] for question in questions]
        self.engine.check_length(context.num_tokens + max(map(len, rows)))
        if context.joined is not None:
            self.joins.check_fits(context.num_tokens + max(map(len, rows)))
        await self.joins.looks.look(context, rows, stats)
        stats.computed_tokens += sum(map(len, rows))
        answers = await self.engine.answer_all(context, rows, sampling)
        self.engine.leave(context)
        self.metrics.count(stats)
        return [self.engine.text(answer) for answer in answers]

    def converse(
        self,
        name: Names | None = None,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        force_latest: bool = False,
        stale_ok: bool = False,
        recompute_share: float | None = None,
    ) -> Conversation:
        """Begin a conversation about something learned, about several things joined, or about
        nothing yet. Each question builds on those before it."""
        sampling = Sampling(max_new_tokens, temperature, seed)
        if name is not None:
            checked_names(name)
        options = Options(
            quality, deadline_s, sampling, None, force_latest, stale_ok, recompute_share
        )
        return Conversation(self, name, options)

    async def seams(
        self,
        names: Sequence[str] = (),
        *,
        texts: Sequence[str] = (),
        examples: Sequence[Asked] = (),
        tag: str = "",
        on_progress: OnFitting | None = None,
    ) -> Seams:
        """Fit seams for joins of pieces like these, names or texts, and store them under the tag:
        clients that are connected with it repair their joins with them. `expected` says what they
        are worth: measured on the `examples` (a question, and the texts it is about), each by what
        was fitted on others; or else by questions made up about parts of the pieces."""
        fitted = await fit_and_share(
            self.engine, self.session, names, texts, examples, tag, on_progress
        )
        self.joins.forget_seams()
        return fitted

    async def publish(
        self, tokens: Tokens, cache: Cache | KVCache, *, after: Loaded | None = None
    ) -> int:
        """Publish what a model of transformers has read: its `past_key_values`, or a `KVCache`.

        `after` is what it went on from, if that was loaded: what was computed on top of losses is
        not published. Returns how many chunks are on their way; `flush` waits for them.
        """
        own = after.request_id if isinstance(after, Loaded) else ""
        with tracing.request("kdn.publish_cache", own):
            return await by_hand.publish(self.contexts, tokens, cache, after)

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
    ) -> Named:
        """What a name points to."""
        how = options or Options()
        found = await find_name(self.session, name, latest=how.force_latest, stale_ok=how.stale_ok)
        if found.trouble and stats is not None:
            stats.troubles += (found.trouble,)
        return found

    async def begin(
        self, name: Names, options: Options, stats: Stats
    ) -> tuple[Context, list[int], str]:
        """The context that names stand for, loaded, all its token ids, and how to ask about it."""
        if isinstance(name, str):
            began_s = self.contexts.clock()
            found = await self.named(name, options, stats)
            chunks, left = found.cut(self.engine.namespace), self.contexts.left_of(options, began_s)
            context = await self.contexts.load(found.tokens, chunks, left, stats)
            return context, found.tokens, found.style
        context, join, style = await self.joins.begin(name, options, stats)
        return context, join.tokens.tolist(), style

    async def turn(
        self,
        context: Context,
        prompt: Sequence[int],
        options: Options,
        stats: Stats,
        began_s: float,
        publish_for: tracing.Request | None = None,
    ) -> AsyncGenerator[str, None]:
        """Read what is left of the prompt, and answer. `publish_for`: the request for which what is
        new is published; None: nothing is."""

        async def publish_end(tail: bool = False) -> None:
            if publish_for is not None:
                with publish_for.resumed():
                    await self.contexts.publish_end(context, tail=tail)

        if context.joined is not None:
            await self.joins.look(context, prompt, options, stats)
        self.engine.check_length(len(prompt))
        held = context.num_tokens
        stats.prompt_tokens = len(prompt)
        stats.computed_tokens += len(prompt) - held
        await publish_end()  # a turn before this one may have been stopped just there
        for start, end in self.contexts.turn_pieces(held, len(prompt)):
            await self.engine.read(context, prompt[start:end])
            await publish_end()
        text = TextPieces(self.engine.tokenizer)
        async with AsyncExitStack() as stack:
            better = self.contexts.refinement(context, options)
            async for token in self.engine.answer(context, options.sampling):
                if not stats.new_tokens:
                    stats.ttft_s = self.now_s() - began_s
                    if better is not None:
                        await stack.enter_async_context(better)
                stats.new_tokens += 1
                await publish_end()
                if piece := text.add(token):
                    yield piece
                if better is not None:
                    await self.contexts.refine(context, better, stats)
        if piece := text.rest():
            yield piece
        self.metrics.count(stats)
        await publish_end(tail=True)
