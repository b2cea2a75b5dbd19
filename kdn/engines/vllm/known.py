"""The longest prefix of a prompt that somebody knows, tail included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from random import Random

import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut, tails
from kdn.codec.base import Codec
from kdn.delivery.assemble import Assembly
from kdn.delivery.endpoints import Endpoints
from kdn.delivery.lookup import Question, adopt, ask_again, look_up


@dataclass(frozen=True)
class Known:
    chunks: tuple[Chunk, ...] = ()
    """From the prompt's first token on."""
    late: bool = False
    """The places did not answer in time: more may be known."""

    @property
    def end(self) -> int:
        return self.chunks[-1].end if self.chunks else 0


async def longest_known(
    tokens: Sequence[int],
    namespace: Namespace,
    codec: Codec,
    endpoints: Endpoints,
    *,
    block_tokens: int,
    limit_s: float,
    dtype: torch.dtype = torch.float32,
    is_held: Callable[[Chunk], bool] = lambda chunk: False,
    clock: Callable[[], float] = time.monotonic,
    rng: Random | None = None,
) -> Known:
    """What `is_held` on this host, and what the places know behind it. With no time they are not
    asked. `block_tokens`: a tail that adds no whole block is not asked for. `dtype`: of the engine,
    which is the only one that exact streams decode to."""
    is_usable = partial(_is_usable, codec=codec, dtype=dtype)
    until_s = clock() + limit_s
    full = [chunk for chunk in cut(tokens, namespace) if chunk.num_tokens == CHUNK_TOKENS]
    chunks = list(takewhile(is_held, full))
    rest = full[len(chunks) :]
    question = Question(rest, codec, clock, rng or Random())
    if rest and limit_s > 0:
        for found in await look_up(question, endpoints, until_s):
            if not is_usable(found.assembly):
                break
            chunks.append(found.chunk)
        if len(chunks) + len(rest) == len(full) and clock() >= until_s:
            return Known(tuple(chunks), late=True)
    options = _tails(tokens, namespace, chunks[-1] if chunks else None, block_tokens)
    tail = [one for one in options if is_held(one)][:1]
    late = False
    if options and not tail and limit_s > 0:
        tail = await _known_tail(replace(question, chunks=options), endpoints, until_s, is_usable)
        late = not tail and clock() >= until_s
    return Known((*chunks, *tail), late)


def _tails(
    tokens: Sequence[int], namespace: Namespace, after: Chunk | None, block_tokens: int
) -> list[Chunk]:
    blocks = (after.end if after else 0) // block_tokens
    usable = len(tokens) - 1  # the last token is always computed
    return [
        tail
        for tail in tails(tokens, namespace, after)
        if min(tail.end, usable) // block_tokens > blocks
    ]


async def _known_tail(
    question: Question,
    endpoints: Endpoints,
    until_s: float,
    is_usable: Callable[[Assembly], bool],
) -> list[Chunk]:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, until_s - question.clock())):
            answers = await ask_again(question, endpoints, until_s)
            for number, tail in enumerate(question.chunks):
                found = adopt(endpoints, answers, number)
                if found is not None and is_usable(found[0]):
                    return [tail]
    return []


def _is_usable(assembly: Assembly, codec: Codec, dtype: torch.dtype) -> bool:
    """Whether every layer holds every token (vLLM's blocks have no way to say otherwise), as values
    that `dtype` can be made of."""
    info = assembly.header.info
    return not any(info.absences) and codec.decodes_to(info, dtype)
