"""Learning: the model reads a context once, its chunks are published, and it gets a name.

The last chunk of a context is stored twice where that makes a difference: whole, for those who know
where the context ends, who ask about it or join it with others; and cut to a multiple of some
tokens, for engines that find it by reading along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdn.blend.pieces import Piece
from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, Tokens, cut, token_ids
from kdn.checked import checked_function, checked_name, checked_text, checked_tokens
from kdn.client.answers import Learned
from kdn.client.contexts import Contexts
from kdn.client.engine import Context
from kdn.client.naming import give_name
from kdn.delivery.known import Known
from kdn.engines.prompts import Knowledge
from kdn.errors import ReadOnlyError, StoreError
from kdn.session.anchors import share_anchors
from kdn.session.quality import Quality

FLUSH_S = 600.0

OnRead = Callable[[int, int], None]
"""How many tokens the model has read, and how many there are."""


def chunks_to_learn(tokens: Tokens, namespace: Namespace) -> list[Chunk]:
    """Those that others find by prefix, and the whole tail."""
    found, whole = (cut(tokens, namespace, whole=whole) for whole in (False, True))
    same = [one.key for one in found] == [one.key for one in whole]
    return found if same else [*found, whole[-1]]


@dataclass(frozen=True)
class Learning:
    contexts: Contexts

    async def learn(
        self,
        name: str,
        what: Knowledge,
        head: str | None,
        on_read: OnRead | None,
        stored_quality: Quality | None = None,
    ) -> Learned:
        contexts, session, engine = self.contexts, self.contexts.session, self.contexts.engine
        began_s = contexts.clock()
        checked_name(name)
        checked_function("on_read", on_read)
        session.stored_levels(stored_quality)
        if isinstance(what, str):
            checked_text("what", what)
        if head is not None:
            checked_text("head", head)
        tokens, style = engine.prompts.learn(what, head)
        checked_tokens("what", tokens, engine.spec.vocab_size)
        engine.check_length(len(tokens))
        num_head = len(engine.prompts.begin(head)) if isinstance(what, str) else None
        chunks = chunks_to_learn(tokens, await engine.names())
        if session.is_read_only:  # before the model reads
            place = session.places.publish_to.name
            raise ReadOnlyError(f"nothing can be learned into {place}: an export is read-only")
        known = await session.know_home(chunks, stored_quality)
        computed = 0
        if len(known.chunks) < len(chunks) or not await self._has_states(chunks):
            context = await contexts.exact(_full(known), tokens)
            computed = chunks[-1].end - context.num_tokens
            await self._read_all(context, tokens, chunks, on_read, stored_quality)
        await session.share_profile()
        states = () if contexts.resuming is None else contexts.resuming.keys_of(chunks)
        await give_name(session, name, tokens, style, chunks, num_head, states)
        new = len(chunks) - len(known.chunks)
        seconds = contexts.clock() - began_s
        if num_head is not None:
            whole = cut(tokens, session.namespace, whole=True)
            piece = Piece(token_ids(tokens), num_head, tuple(whole), name)
            await share_anchors(session, piece, saved_s=seconds)
        return Learned(name, len(tokens), len(known.chunks), new, computed, seconds)

    async def _has_states(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a reader of all these chunks would find the states of their ends."""
        resuming = self.contexts.resuming
        return resuming is None or await resuming.states.are_home(resuming.states.ends(chunks))

    async def _read_all(
        self,
        context: Context,
        tokens: Sequence[int],
        chunks: Sequence[Chunk],
        on_read: OnRead | None,
        stored_quality: Quality | None,
    ) -> None:
        """Let the model read all chunks, and wait until they are stored. StoreError if that takes
        too long, or as soon as one is refused."""
        session = self.contexts.session
        publisher, place = session.publisher, session.places.publish_to.name
        new = [chunk for chunk in chunks if chunk.end > context.num_tokens]
        resuming = self.contexts.resuming

        def keys_of(own: Sequence[Chunk]) -> list[bytes]:
            states = [] if resuming is None else resuming.keys_of(own)
            return [chunk.key for chunk in own] + states

        def check(num_read: int) -> None:
            read = [chunk for chunk in new if chunk.end <= num_read]
            refused = publisher.refused(keys_of(read))
            if refused:
                why = next(iter(refused.values()))
                raise StoreError(f"{len(refused)} chunks for {place} were refused: {why}")

        def told(num_read: int) -> None:
            check(num_read)
            if on_read is not None:
                on_read(num_read, len(tokens))

        published = await self.contexts.read(context, tokens, chunks, FLUSH_S, told, stored_quality)
        stored = published and await publisher.store_all(keys_of(new), FLUSH_S)
        check(len(tokens))
        if not stored:
            raise StoreError(f"{place} takes too long to store what is new")


def _full(known: Known) -> Known:
    """Without a tail: another end of it is not made of what was decoded."""
    chunks = tuple(one for one in known.chunks if one.num_tokens == CHUNK_TOKENS)
    return Known(chunks, {one.key: known.streams[one.key] for one in chunks})
