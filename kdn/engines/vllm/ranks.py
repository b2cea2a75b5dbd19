"""What the ranks of an engine with tensor parallelism do together, seen by one of them.

They meet in a folder of the host's shared memory (`rank_folder.py`). One rank of a host fetches for
all (`one_fetch.py`); the first rank publishes for all (`gathering.py`). Where they cannot meet,
each fetches for itself and nothing is published.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.delivery.sink import Sink
from kdn.engines.vllm.gathering import Gathering, Giving, Publish
from kdn.engines.vllm.one_fetch import OneFetch
from kdn.engines.vllm.rank_copies import Copies
from kdn.engines.vllm.rank_folder import RankFolder
from kdn.engines.vllm.rank_parts import Share
from kdn.errors import KdnError
from kdn.session.delivered import Delivered
from kdn.session.host_memory import SHARED_MEMORY
from kdn.session.session import Session

logger = logging.getLogger("vllm.kdn")


class Ranks:
    def __init__(self, session: Session, folder: RankFolder | None, rank: int, count: int) -> None:
        """`folder` None: this rank does not meet the others."""
        self._session, self._folder = session, folder
        self.share = Share(session.spec, rank, count)
        self._fetch = OneFetch(session, folder) if folder else None
        self._copies = Copies(session.device)
        self._giving: Giving | None = None
        self._gathering: Gathering | None = None
        self._may_publish: bool | None = None  # not known before the first chunk

    async def deliver(
        self, number: int, chunks: Sequence[Chunk], sink: Sink, **asked: Any
    ) -> Delivered:
        """`Session.deliver` for the load of this number."""
        if self._fetch is None:
            return await self._session.deliver(chunks, sink, **asked)
        return await self._fetch.deliver(number, chunks, sink, **asked)

    @property
    def has_part(self) -> bool:
        """Not so where another rank has the same heads and gives them."""
        return self.share.rank in self.share.writers

    def publish_with(self, publish: Publish, counts: Counter[str], device_bytes: int = 0) -> None:
        """From now on the first rank publishes so what all of them `offer`; with a GPU, so much of
        it at a time is there."""
        if self._folder is None:
            return
        most = self._session.settings.queue_bytes

        def takes(size: int) -> bool:
            queued = self._session.publisher.queued_bytes
            return not self._copies.are_needed or not queued or queued + size <= device_bytes

        if self.share.rank:
            self._giving = Giving(self._folder, self.share, most)
        else:
            self._gathering = Gathering(
                self._folder, self.share, publish, counts, most, self._copies, takes
            )

    def offer(self, chunk: Chunk, cache: KVCache, exact_until: int | None, saved_s: float) -> bool:
        """This rank's heads of a chunk; False if it is not going to be published. From a GPU they
        are copied before this returns; else `cache` must not change any more. From any thread."""
        if not self._meet():
            return False
        cache = self._copies.to_host(cache)
        if self._gathering is not None:
            return self._gathering.offer(chunk, cache, exact_until, saved_s)
        return self._giving is not None and self._giving.offer(chunk, cache)

    def _meet(self) -> bool:
        """When there is something to publish, all ranks have long begun."""
        if self._may_publish is None:
            here = self._folder.alive() if self._folder else [self.share.rank]
            self._may_publish = len(here) == self.share.ranks
            if not self._may_publish:
                logger.warning(
                    "kdn: nothing is published: of %d ranks, rank %d sees %s in the shared memory "
                    "of its host. Ranks on several hosts load, but do not publish",
                    self.share.ranks, self.share.rank, here,
                )  # fmt: skip
        return self._may_publish

    def close(self) -> None:
        for part in (self._giving, self._gathering, self._fetch, self._folder):
            if part is not None:
                part.close()


def open_ranks(session: Session, engine: str, rank: int, count: int) -> Ranks | None:
    """None for an engine of one rank."""
    if count == 1:
        return None
    place = session.settings.host_folder or SHARED_MEMORY
    return Ranks(session, _open_folder(place, engine, rank, count), rank, count)


def _open_folder(place: Path, engine: str, rank: int, count: int) -> RankFolder | None:
    try:
        return RankFolder(place, engine, rank, count)
    except (KdnError, OSError) as error:
        logger.warning("kdn: rank %d fetches for itself, and nothing is published: %s", rank, error)
        return None
