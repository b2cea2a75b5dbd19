"""Seconds to the first token of an answer over many pieces, from a node in a process of its own.

kdn's ways are timed as a user has them: `client.ask([...], question)`. What else there is begins
with the same join, delivered by the same client. Links are shaped by the node. A client is opened
before anything is timed, and asks once untimed: then it knows its seams, and kernels are compiled.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kdn.bench.blend.items import Item
from kdn.bench.blend.methods import FULL, JOINED, NOTHING, REPAIRED, Method, read_question
from kdn.bench.blend.pieces import ids_of
from kdn.bench.node_servers import start_kdn
from kdn.blend.seams import Seams
from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.contexts import Options
from kdn.engines.generating import Sampling
from kdn.engines.reading import forward
from kdn.errors import UnsupportedError
from kdn.session.seams import share_seams

NUM_PIECES = 16
REPEATS = 3
QUESTION = "Which of these texts is about a person, and who is it?"
LOOPBACK = "loopback"
CODEC = "klt"
TAG = "bench-blend"
"""Of its seams: those of the user stay as they are."""
TIMED = (
    FULL,
    Method("join", JOINED),
    Method("cacheblend", JOINED, 0.15),
    Method("question", JOINED, 0.15),
    Method("seams", REPAIRED),
    *(Method("seams+question", REPAIRED, share) for share in (0.05, 0.15, 0.3)),
)


class Timed(NamedTuple):
    seconds: float
    size_bytes: int
    computed_tokens: float


def texts_of(items: Sequence[Item], tokenizer: Any, num_tokens: int, head: int) -> list[str]:
    """Passages of a set, one after another, cut into NUM_PIECES texts of equal length."""
    each = (num_tokens - head) // NUM_PIECES - len(ids_of("\n\n", tokenizer))
    whole = "\n\n".join(dict.fromkeys(text for item in items for text in item.pieces))
    ids = ids_of(whole, tokenizer)
    if each < 1 or len(ids) < each * NUM_PIECES:
        raise UnsupportedError(
            f"ttft-tokens: expected at least {each * NUM_PIECES:,} tokens in the set, found "
            f"{len(ids):,}"
        )
    parts = (ids[start : start + each].tolist() for start in range(0, each * NUM_PIECES, each))
    return [str(tokenizer.decode(part)).strip() for part in parts]


async def time_joins(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    seams: Seams | None,
    num_tokens: int,
    mbits: Sequence[float],
) -> AsyncIterator[dict[str, Any]]:
    """A row for each way and link."""
    methods = [one for one in TIMED if seams is not None or not one.needs_seams]
    with tempfile.TemporaryDirectory(prefix="kdn-blend-ttft-") as name:
        folder = Path(name)
        names = await _learn(folder, model, tokenizer, items, seams, num_tokens)
        for link, settings in _links(mbits):
            with start_kdn(folder, settings) as node:
                read_s = 0.0
                for method in methods:
                    async with _client(node.url, model, tokenizer, method) as client:
                        count, times = await _times(client, method, names)
                    read_s = read_s or median(one.seconds for one in times)
                    yield _row(method, link, count, times, read_s)


def _links(mbits: Sequence[float]) -> Iterator[tuple[str, dict[str, object]]]:
    yield LOOPBACK, {}
    for one in mbits:
        yield f"{one:g} Mbit/s", {"egress_bits_per_s": round(one * 1e6)}


def _client(url: str, model: Any, tokenizer: Any, method: Method) -> AsyncClient:
    tag = TAG if method.needs_seams else None
    return AsyncClient(url, model=(model, tokenizer), codec=CODEC, seams=tag, client="bench")


async def _learn(
    folder: Path,
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    seams: Seams | None,
    num_tokens: int,
) -> list[str]:
    with start_kdn(folder) as node:
        async with _client(node.url, model, tokenizer, FULL) as client:
            head = len(client.engine.prompts.begin())
            texts = texts_of(items, tokenizer, num_tokens, head)
            names = [f"piece-{number}" for number in range(len(texts))]
            for name, text in zip(names, texts, strict=True):
                await client.learn(name, text)
            if seams is not None:
                await share_seams(client.session, seams, TAG)
    return names


async def _times(client: AsyncClient, method: Method, names: list[str]) -> tuple[int, list[Timed]]:
    """How many tokens were joined, and what each try took."""
    ways = {"full": _read, "cacheblend": _rival}
    way = ways.get(method.name, _ask)
    join, _ = await client.joins.named(names, Options(), Stats())
    await way(client, method, names)
    return join.num_tokens, [await way(client, method, names) for _ in range(REPEATS)]


async def _ask(client: AsyncClient, method: Method, names: list[str]) -> Timed:
    answer = client.ask(names, QUESTION, max_new_tokens=1, recompute_share=method.share)
    await answer.read()
    stats = answer.stats
    return Timed(stats.ttft_s, stats.fetched_bytes, stats.computed_tokens)


async def _read(client: AsyncClient, method: Method, names: list[str]) -> Timed:
    """All of it in one pass, which is the fastest way."""
    engine = client.engine
    join, style = await client.joins.named(names, Options(), Stats())
    tokens = np.concatenate([join.tokens, engine.prompts.ask(QUESTION, style)])
    context = engine.new_context(engine.room_for(len(tokens)))
    began_s = time.perf_counter()
    int(forward(engine.model, tokens, context.past).argmax())
    took_s = time.perf_counter() - began_s
    engine.leave(context)
    return Timed(took_s, 0, len(tokens))


async def _rival(client: AsyncClient, method: Method, names: list[str]) -> Timed:
    """Its own choice of tokens, over what kdn delivers."""
    assert method.delivered not in (NOTHING, REPAIRED)
    stats, options = Stats(), Options(sampling=Sampling(1), recompute_share=0.0)
    began_s = time.perf_counter()
    join, style = await client.joins.named(names, options, stats)
    question = client.engine.prompts.ask(QUESTION, style)
    context = await client.joins.load(join, options, stats)
    logits, computed = read_question(method, client.engine.model, context.past, join, question)
    int(logits.argmax())
    took_s = time.perf_counter() - began_s
    client.engine.leave(context)
    return Timed(took_s, stats.fetched_bytes, stats.computed_tokens + computed)


def _row(
    method: Method, link: str, num_tokens: int, times: Sequence[Timed], read_s: float
) -> dict[str, Any]:
    seconds = [one.seconds for one in times]
    return {
        "method": method.name,
        "share": method.share,
        "codec": CODEC,
        "link": link,
        "tokens": num_tokens,
        "pieces": NUM_PIECES,
        "ttft_s": median(seconds),
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "times_faster": read_s / median(seconds),
        "computed_tokens": times[-1].computed_tokens,
        "bytes": times[-1].size_bytes,
    }
