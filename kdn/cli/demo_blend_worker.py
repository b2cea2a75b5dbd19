"""The processes of `kdn demo --blend`: one learns documents, the other answers over all of them.

Run as `python -m kdn.cli.demo_blend_worker`, as `demo_worker.py` is.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.blend.pieces import Join
from kdn.cli.demo_worker import NONE, Teller, carry_out, warm_up
from kdn.cli.progress import share
from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.audit import kld
from kdn.client.contexts import Options
from kdn.client.engine import Context, load_pair
from kdn.delivery.request import Snapshot
from kdn.engines.generating import Sampling, TextPieces
from kdn.engines.ranking import crop
from kdn.engines.reading import forward, layer_by_layer

SHARE = 0.15


async def learn(task: dict[str, Any]) -> None:
    teller = Teller()
    async with AsyncClient(task["url"], device=task["device"], recompute=False) as client:
        teller.tell("loaded")
        for name, text in task["texts"].items():
            teller.tell("learned", **asdict(await client.learn(name, text)))


async def answer(task: dict[str, Any]) -> None:
    """Reading comes last: until then this process has read nothing of the documents."""
    pair = await asyncio.to_thread(load_pair, "smollm2", task["device"])
    settings = {"model": pair, "quality": task["quality"], "client": "demo"}
    async with (
        AsyncClient(task["url"], seams=None, **settings) as plain,
        AsyncClient(task["url"], **settings) as repairing,
    ):
        join, style = await plain.joins.named(task["names"], Options(), Stats())
        question = plain.engine.prompts.ask(task["question"], style)
        for client in (plain, repairing):
            await asyncio.to_thread(warm_up, client, join.num_tokens)
        has_seams = await _finds_seams(repairing, task["names"])
        Teller().tell("loaded")
        work = _Asking(plain, task, join, question)
        ways = {"joined": (plain, 0.0)}
        ways |= (
            {"repaired": (repairing, 0.0), "both": (repairing, SHARE)}
            if has_seams
            else {"looked": (plain, SHARE)}
        )
        known = {way: await work.with_kdn(way, *how) for way, how in ways.items()}
        own = await work.without_kdn()
        for way, context in known.items():
            klds = await asyncio.to_thread(work.compare, own, context)
            Teller(0, way).tell("kld", first=float(klds[0]), mean=float(klds.mean()))


async def _finds_seams(client: AsyncClient, names: list[str]) -> bool:
    """Whether there are seams for this model; what was found is kept for the next join."""
    return (await client.join(names)).stats.repaired_tokens > 0


class _Asking:
    def __init__(
        self, plain: AsyncClient, task: dict[str, Any], join: Join, question: list[int]
    ) -> None:
        self._engine, self._names = plain.engine, list(task["names"])
        self._prompt = [*join.tokens.tolist(), *question]
        self._sampling = Sampling(max_new_tokens=task["max_tokens"])

    async def with_kdn(self, way: str, client: AsyncClient, recompute_share: float) -> Context:
        teller, stats = Teller(0, way), Stats()

        def progress(snapshot: Snapshot) -> None:
            teller.tell("progress", share=share(snapshot), fetched_bytes=snapshot.fetched_bytes)

        options = Options(
            sampling=self._sampling, on_progress=progress, recompute_share=recompute_share
        )
        began_s = client.now_s()
        context, _, _ = await client.begin(self._names, options, stats)
        teller.tell("delivered")
        async for piece in client.turn(context, self._prompt, options, stats, began_s):
            teller.tell("text", text=piece)
        teller.tell("done", **asdict(stats))
        return context

    async def without_kdn(self) -> Context:
        """The same prompt, read by the model from its first token on."""
        teller, engine, prompt = Teller(0, "read"), self._engine, self._prompt
        began_s = perf_counter()
        context = engine.new_context(engine.room_for(len(prompt) + self._sampling.max_new_tokens))
        with layer_by_layer(
            engine.model, lambda share: teller.tell("progress", share=share, **NONE)
        ):
            await engine.read(context, prompt)
        text, ttft_s = TextPieces(engine.tokenizer), 0.0
        async for token in engine.answer(context, self._sampling):
            ttft_s = ttft_s or perf_counter() - began_s
            if piece := text.add(token):
                teller.tell("text", text=piece)
        teller.tell("text", text=text.rest())
        stats = Stats(len(prompt), 0, len(prompt), len(context.tokens) - len(prompt), ttft_s=ttft_s)
        teller.tell("done", **asdict(stats))
        return context

    def compare(self, own: Context, known: Context) -> npt.NDArray[np.float64]:
        """KLD at each token of the answer that follows a full reading."""
        count = len(self._prompt)
        scored = own.tokens[count - 1 : -1]
        found = []
        for context in (own, known):
            crop(context.past, count - 1)  # the question's last token predicts the first
            found.append(forward(self._engine.model, scored, context.past, every=True))
        return kld(*found)


if __name__ == "__main__":
    carry_out(learn=learn, answer=answer)
