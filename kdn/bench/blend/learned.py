"""Pieces learned into a folder, and joins delivered from there: kdn's own way, one codec each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kdn.bench.blend.desk import num_delivered
from kdn.bench.blend.measure import Delivery
from kdn.bench.blend.methods import FIRST, HEADLESS, REPAIRED
from kdn.bench.blend.pieces import Prompt, read_pieces
from kdn.blend.pieces import Join
from kdn.blend.seams import Seams
from kdn.cache.keys import Namespace
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.delivery.join_sink import JoinSink
from kdn.delivery.publish import Admission, Values
from kdn.engines.growing import Room
from kdn.errors import StoreError
from kdn.session.delivered import Delivered
from kdn.session.quality import codec_kld_in_join
from kdn.session.session import Session
from kdn.session.settings import SessionSettings

STORE_S = 300.0


class Reader:
    """Reads the pieces of a prompt once, though several joiners learn them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prompt: Prompt | None = None
        self._caches: list[list[KVCache]] = []

    def read(self, prompt: Prompt, joins: Sequence[Join]) -> list[list[KVCache]]:
        """Of each join the caches of its pieces."""
        if self._prompt is not prompt:
            self._caches = [
                [
                    KVCache(one.keys.cpu(), one.values.cpu())
                    for one in read_pieces(self._model, join.pieces)
                ]
                for join in joins
            ]
            self._prompt = prompt
        return self._caches


def session_of(folder: Path, codec: str, spec: ModelSpec, dtype: torch.dtype) -> Session:
    """Of this benchmark alone: nothing of the host, no spool. Values are decoded in main memory,
    wherever the model is."""
    settings = SessionSettings((str(folder),), codec=codec, host_bytes=0, spool_bytes=0)
    return Session(settings, spec, dtype)


class FolderJoiner:
    """`async with session_of(...) as session: FolderJoiner(session, ...)`."""

    def __init__(self, session: Session, reader: Reader, quality: str, seams: Seams | None) -> None:
        self.codec = session.settings.codec
        self._session, self._reader, self._seams = session, reader, seams
        self._enough = max(codec_kld_in_join(quality), session.codec.expected_kld[-1])
        self._repaired = session.codec.repaired(seams) if seams is not None else None

    @property
    def namespace(self) -> Namespace:
        return self._session.namespace

    def join(self, prompt: Prompt) -> Join:
        return prompt.join(self.namespace)

    async def learn(self, prompt: Prompt, headless: bool) -> None:
        joins = self._joins(prompt, headless)
        session, keys = self._session, []
        for join, caches in zip(joins, self._reader.read(prompt, joins), strict=True):
            for piece, cache in zip(join.pieces, caches, strict=True):
                for chunk in piece.chunks:
                    said = session.publish(chunk, Values(cache, final=True), exact_until=None)
                    if said not in (Admission.QUEUED, Admission.ALREADY):
                        raise StoreError(f"a piece cannot be learned: {said.value}")
                    keys.append(chunk.key)
        if not await session.publisher.store_all(keys, STORE_S):
            raise StoreError(f"{len(keys)} chunks were not stored within {STORE_S:.0f} s")

    async def forget(self, prompt: Prompt, headless: bool) -> None:
        """Its chunks: those of the next one are others."""
        store = self._session.places.publish_to.store
        for join in self._joins(prompt, headless):
            for chunk in join.chunks:
                await store.delete(chunk.key)

    def _joins(self, prompt: Prompt, headless: bool) -> list[Join]:
        own = [self.join(prompt)]
        return [*own, prompt.headless(self.namespace)] if headless else own

    async def deliver(self, prompt: Prompt, what: str, room: Room) -> Delivery:
        join = prompt.headless(self.namespace) if what == HEADLESS else self.join(prompt)
        place = room.canonical(num_delivered(what, join))
        cache = place if place.keys.device.type == "cpu" else _like(place)
        if what == FIRST:
            join = Join(join.pieces[:1])
        repaired = self._repaired if what == REPAIRED else None
        sink = JoinSink(self._session.codec, repaired, join, cache, seams=self._seams)
        began_s = time.perf_counter()
        known = await self._session.know_each(join.chunks)
        got = await self._session.deliver(
            known.chunks, sink, known=known, end=join.num_tokens, enough_kld=self._enough
        )
        if got.num_ready < len(join.chunks):
            raise StoreError(f"{len(join.chunks) - got.num_ready} chunks were not delivered")
        if cache is not place:
            place.keys.copy_(cache.keys)
            place.values.copy_(cache.values)
        return Delivery(_size_bytes(got), time.perf_counter() - began_s)


def _size_bytes(got: Delivered) -> int:
    """Of streams as far as they came, also with the lookup."""
    return sum(len(one.data) for one in got.result.arrived) if got.result else 0


def _like(place: KVCache) -> KVCache:
    """As much of main memory."""
    keys, values = (torch.empty_like(side, device="cpu") for side in (place.keys, place.values))
    return KVCache(keys, values)
