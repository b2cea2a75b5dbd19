"""The client for code without an event loop: the same one, on a loop in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdn.blend.seams import Seams
from kdn.cache.keys import Tokens
from kdn.cache.tensors import KVCache
from kdn.client.answers import Answer as AsyncAnswer
from kdn.client.answers import Joined, Learned, Loaded, Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.conversation import Conversation as AsyncConversation
from kdn.client.engine import ModelSource
from kdn.client.fitting import Asked
from kdn.client.joining import Names
from kdn.client.learning import FLUSH_S, OnRead
from kdn.client.metrics import Metrics
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
from kdn.engines.device import Device, DType, follow_caller
from kdn.engines.prompts import Knowledge
from kdn.engines.seam_fitting import OnProgress as OnFitting
from kdn.places.places import Where
from kdn.session.loop import LoopThread
from kdn.session.quality import Quality

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class Answer:
    """Text as it is made: `for piece in answer`, or all of it with `answer.read()`."""

    def __init__(self, loop: LoopThread, answer: AsyncAnswer) -> None:
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
    """Questions that build on each other, one turn at a time."""

    def __init__(self, loop: LoopThread, conversation: AsyncConversation) -> None:
        self._loop = loop
        self._conversation = conversation

    @property
    def tokens(self) -> list[int]:
        return self._conversation.tokens

    def ask(self, question: str) -> Answer:
        return Answer(self._loop, self._conversation.ask(question))


class Client:
    """Made by `connect`. Methods and parameters are those of `AsyncClient`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = LoopThread()
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    @property
    def metrics(self) -> Metrics:
        return self._client.metrics

    @property
    def model(self) -> PreTrainedModel:
        return self._client.engine.model

    @property
    def tokenizer(self) -> Any:
        return self._client.engine.tokenizer

    def learn(
        self,
        name: str,
        what: Knowledge,
        head: str | None = None,
        *,
        stored_quality: Quality | None = None,
        on_read: OnRead | None = None,
    ) -> Learned:
        learning = self._client.learn(
            name, what, head, stored_quality=stored_quality, on_read=on_read
        )
        return self._loop.run(learning)

    def load(
        self,
        tokens: Tokens,
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Loaded:
        loading = self._client.load(
            tokens, quality=quality, deadline_s=deadline_s, on_progress=on_progress
        )
        return self._loop.run(loading)

    def join(
        self,
        names: Sequence[str],
        *,
        quality: Quality | None = None,
        deadline_s: float | None = None,
        on_progress: OnProgress | None = None,
        force_latest: bool = False,
        stale_ok: bool = False,
    ) -> Joined:
        joining = self._client.join(
            names, quality=quality, deadline_s=deadline_s, on_progress=on_progress,
            force_latest=force_latest, stale_ok=stale_ok,
        )  # fmt: skip
        return self._loop.run(joining)

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
        answer = self._client.ask(
            name, question, quality=quality, deadline_s=deadline_s, max_new_tokens=max_new_tokens,
            temperature=temperature, seed=seed, on_progress=on_progress, force_latest=force_latest,
            stale_ok=stale_ok, recompute_share=recompute_share,
        )  # fmt: skip
        return Answer(self._loop, answer)

    def ask_all(
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
        answering = self._client.ask_all(
            name, questions, quality=quality, deadline_s=deadline_s, max_new_tokens=max_new_tokens,
            force_latest=force_latest, stale_ok=stale_ok, recompute_share=recompute_share,
        )  # fmt: skip
        return self._loop.run(answering)

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
        conversation = self._client.converse(
            name, quality=quality, deadline_s=deadline_s, max_new_tokens=max_new_tokens,
            temperature=temperature, seed=seed, force_latest=force_latest, stale_ok=stale_ok,
            recompute_share=recompute_share,
        )  # fmt: skip
        return Conversation(self._loop, conversation)

    def seams(
        self,
        names: Sequence[str] = (),
        *,
        texts: Sequence[str] = (),
        examples: Sequence[Asked] = (),
        tag: str = "",
        on_progress: OnFitting | None = None,
    ) -> Seams:
        fitting = self._client.seams(
            names, texts=texts, examples=examples, tag=tag, on_progress=on_progress
        )
        return self._loop.run(fitting)

    def publish(
        self, tokens: Tokens, cache: Cache | KVCache, *, after: Loaded | None = None
    ) -> int:
        follow_caller(self.model.device)  # in this thread: the client's own has launched nothing
        return self._loop.run(self._client.publish(tokens, cache, after=after))

    def flush(self, deadline_s: float = FLUSH_S) -> bool:
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

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
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
) -> Client:
    """Open a client: `with kdn.connect("http://node:8470", model="smollm2") as client`.

    - `where`: a folder, the URL of a node, or several of them. All are read; the first node (or
      else the first folder) is written to;
    - `model`: smollm2, a local folder, a name on the hub, or (model, tokenizer) of transformers;
    - `device`: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1"; `dtype`: "float32",
      "bfloat16" or "float16", by default float32 on a CPU and bfloat16 on a GPU. A (model,
      tokenizer) stays where and as it is;
    - `codec`: "klt", or "exact" without any loss;
    - `quality`: "draft", "default", "high", "exact", or the KL divergence that is good enough;
    - `stored_quality`: publish no more levels than this quality needs; "exact": all of them. A
      reader who asks for more finds nothing;
    - `deadline_s`: the model reads what has not arrived by then. Chunks that arrived coarser than
      `quality` become finer while the answer goes on;
    - `token` or `token_file`: of the tenant, for nodes that have tenants;
    - `secret` (bytes) or `secret_file`: only your engines know it; nobody can find your chunks
      without it. If token or secret is not given, KDN_CLIENT_TOKEN, KDN_CLIENT_TOKEN_FILE,
      KDN_CLIENT_SECRET and KDN_CLIENT_SECRET_FILE are used;
    - `tls_ca`: a PEM file, if a private authority signed the node's certificate;
    - `client`: a name for fair sharing;
    - `recompute`: whether the model may read along while chunks load;
    - `audit_share`: the share of answers that are compared with the model's own, in `metrics`;
    - `spool_bytes`: how much may wait on disk for a node that is away; 0: nothing;
    - `seams`: the tag of the seams that repair what is joined; None: nothing is repaired;
    - `state_spacing`: for a model with recurrent layers, a state is stored after every
      `state_spacing` chunks, and where a context ends;
    - `request_log_bytes`: how much `kdn explain --request` may have on disk; 0: nothing. None:
      as KDN_CLIENT_REQUEST_LOG_BYTES says, or 16 MiB;
    - `tracing`: send traces to OpenTelemetry's collector. None: as KDN_CLIENT_TRACING says. Where
      your program has configured OpenTelemetry, its traces have kdn's spans anyway.
    """
    return Client(
        AsyncClient(
            where, model=model, device=device, dtype=dtype, codec=codec, quality=quality,
            stored_quality=stored_quality, deadline_s=deadline_s, token=token,
            token_file=token_file, secret=secret, secret_file=secret_file, tls_ca=tls_ca,
            client=client, recompute=recompute, audit_share=audit_share, spool_bytes=spool_bytes,
            seams=seams, state_spacing=state_spacing, request_log_bytes=request_log_bytes,
            tracing=tracing,
        )
    )  # fmt: skip


for _name in (
    "learn", "load", "join", "ask", "ask_all", "converse", "seams", "publish", "flush", "forget",
    "close",
):  # fmt: skip
    getattr(Client, _name).__doc__ = getattr(AsyncClient, _name).__doc__
