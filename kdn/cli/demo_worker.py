"""The processes of `kdn demo`: one learns a document, the other answers questions about it.

Run as `python -m kdn.cli.demo_worker`, with its task as JSON on standard input; what happens comes
out as JSON lines, each with the seconds since its question was asked.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop
from transformers.utils.logging import disable_progress_bar

from kdn.cache.keys import cut
from kdn.cli.progress import share
from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.audit import kld
from kdn.client.contexts import Options
from kdn.client.engine import Context, ContextSource
from kdn.codec.format import Bitstream
from kdn.delivery.request import Snapshot
from kdn.delivery.sink import Arrival
from kdn.engines.generating import Sampling, TextPieces
from kdn.engines.growing import MAX_SPARE
from kdn.engines.reading import forward, layer_by_layer, pieces

NAME = "document"
WARM_TOKENS = 512
NONE = {"fetched_bytes": 0}


@dataclass
class Teller:
    """Writes events of one question and one way to answer it."""

    number: int = 0
    way: str = ""
    began_s: float = field(default_factory=perf_counter)

    def tell(self, event: str, **fields: Any) -> None:
        line = {"event": event, "question": self.number, "way": self.way}
        line |= {"at_s": round(perf_counter() - self.began_s, 4), **fields}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def tell_read(self, num_read: int, num_tokens: int) -> None:
        self.tell("read", num_read=num_read, num_tokens=num_tokens)


async def learn(task: dict[str, Any]) -> None:
    teller = Teller()
    async with AsyncClient(task["url"], device=task["device"], recompute=False) as client:
        teller.tell("loaded")
        teller.began_s = perf_counter()
        learned = await client.learn(NAME, task["text"], on_read=teller.tell_read)
        stored = 0
        store = client.session.places.publish_to.store
        async for entry in store.list():
            stored += entry.size_bytes
        values = client.engine.spec.values_per_token * learned.num_tokens
        teller.tell("learned", **asdict(learned), stored_bytes=stored, fp16_bytes=2 * values)


async def answer(task: dict[str, Any]) -> None:
    """Every question with kdn first: by then this process has read nothing of the document."""
    teller = Teller()
    settings = {"device": task["device"], "quality": task["quality"]}
    async with AsyncClient(task["url"], client="demo", **settings) as client:
        document = len((await client.named(NAME)).tokens)
        await asyncio.to_thread(warm_up, client, document)
        teller.tell("loaded")
        sampling = Sampling(max_new_tokens=task["max_tokens"])
        questions = list(enumerate(task["questions"]))
        known = [await with_kdn(client, *one, sampling) for one in questions]
        for one, context in zip(questions, known, strict=True):
            own = await without_kdn(client, *one, sampling)
            klds = await asyncio.to_thread(compare, client, own, context, document)
            for ended in (own, context):
                client.engine.leave(ended)
            Teller(one[0], "both").tell("kld", mean=float(klds.mean()), tokens=len(klds))


def warm_up(client: AsyncClient, num_tokens: int) -> None:
    """Kernels are compiled and memory is first touched: a server does that once, when it starts.
    Both ways have the same of it."""
    engine, codec, contexts = client.engine, client.session.codec, client.contexts
    tokens = np.random.default_rng(0).integers(3, engine.spec.vocab_size, WARM_TOKENS)
    context, room = engine.new_context(), engine.room_for(WARM_TOKENS)
    engine.rooms.prepare(num_tokens, MAX_SPARE)
    for start, end in pieces(0, WARM_TOKENS):
        forward(engine.model, tokens[start:end], context.past)
        chunk = cut(tokens[:end], engine.namespace)[-1]
        stream = Bitstream.parse(codec.encode(chunk, ContextSource(context).read(chunk)))
        sink = contexts.landing_for([chunk], room).sink
        for levels in range(1, codec.num_levels + 1):
            sink.decode([Arrival(chunk, stream, levels, False)])


async def with_kdn(client: AsyncClient, number: int, question: str, sampling: Sampling) -> Context:
    teller, stats = Teller(number, "with"), Stats()

    def progress(snapshot: Snapshot) -> None:
        teller.tell("progress", share=share(snapshot), fetched_bytes=snapshot.fetched_bytes)

    options = Options(sampling=sampling, on_progress=progress)
    began_s = client.now_s()
    context, tokens, style = await client.begin(NAME, options, stats)
    teller.tell("delivered")
    prompt = [*tokens, *client.engine.prompts.ask(question, style)]
    async for piece in client.turn(context, prompt, options, stats, began_s):
        teller.tell("text", text=piece)
    teller.tell("done", **asdict(stats))
    return context


async def without_kdn(
    client: AsyncClient, number: int, question: str, sampling: Sampling
) -> Context:
    """The same prompt, read by the model from its first token on: all at once, which is the
    fastest way."""
    teller, engine = Teller(number, "without"), client.engine
    found = await client.named(NAME)
    teller.began_s = began_s = perf_counter()
    prompt = [*found.tokens, *engine.prompts.ask(question, found.style)]
    context = engine.new_context(engine.room_for(len(prompt) + sampling.max_new_tokens))
    with layer_by_layer(engine.model, lambda share: teller.tell("progress", share=share, **NONE)):
        await engine.read(context, prompt)
    text, ttft_s = TextPieces(engine.tokenizer), 0.0
    async for token in engine.answer(context, sampling):
        ttft_s = ttft_s or perf_counter() - began_s
        if piece := text.add(token):
            teller.tell("text", text=piece)
    teller.tell("text", text=text.rest())
    stats = Stats(len(prompt), 0, len(prompt), len(context.tokens) - len(prompt), ttft_s=ttft_s)
    teller.tell("done", **asdict(stats))
    return context


def compare(
    client: AsyncClient, own: Context, known: Context, document: int
) -> npt.NDArray[np.float64]:
    """KLD of what follows the document, the question and the model's own answer: predicted after
    the document as it was read, and as it was delivered."""
    for context in (own, known):
        context.past.crop(document - context.num_tokens)
    scored = own.tokens[document:-1]
    model = client.engine.model
    return kld(*(forward(model, scored, one.past, every=True) for one in (own, known)))


Work = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


def carry_out(**works: Work) -> None:
    """The task on standard input, by whoever does such."""
    task = json.load(sys.stdin)
    disable_progress_bar()  # those of others do not belong on the screen of the demo
    uvloop.run(works[task["do"]](task))


if __name__ == "__main__":
    carry_out(learn=learn, answer=answer)
