"""One session for a process of vLLM, on an event loop in a thread of its own.

vLLM's scheduler and worker often share a process, and a folder can be opened only once: they share
one session, which ends with the last of them. vLLM's own threads wait for it only when they start
and end. Whatever fails here is logged and counted, and costs vLLM a miss.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from kdn.background import fault, watched
from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.delivery.publish import Admission, Lent, Source, Values
from kdn.engines.vllm.early import EarlyLoads
from kdn.engines.vllm.seam_source import SeamSource
from kdn.engines.vllm.warming import sharing_interpreter, warm_up
from kdn.errors import KdnError, StoreError
from kdn.session.loop import LoopThread
from kdn.session.session import MAIN_MEMORY, Session
from kdn.session.settings import SessionSettings
from kdn.tracing import Request

logger = logging.getLogger(__name__)
T = TypeVar("T")
Key = tuple[SessionSettings, bytes, torch.dtype, str, str]

OPEN_S = 30.0
CLOSE_S = 10.0
"""For what is still to be published."""
GRACE_S = 5.0
"""For all else, at the end."""


class Offer(NamedTuple):
    """A chunk for the publisher."""

    chunk: Chunk
    source: Source
    exact_until: int | None
    saved_s: float
    origin: Request | None = None
    """Whose it is; None: whoever's this is done for."""


class SharedSession:
    """`acquire` one; `release` it as often."""

    _every: dict[Key, SharedSession] = {}  # noqa: RUF012 (shared on purpose)
    _lock = threading.Lock()  # guards _every and _users

    def __init__(
        self,
        settings: SessionSettings,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        seams_tag: str = "",
    ) -> None:
        self.session = Session(settings, spec, dtype, device=device)
        self.changed = threading.Event()
        """Set when a lookup or a load has ended."""
        self.seams = SeamSource(self.session, seams_tag)
        self.early = EarlyLoads(self.session)
        self._users = 0
        self._sharing = ExitStack()
        self._under_way: set[asyncio.Task[Any]] = set()  # the loop's own
        self._offering: set[asyncio.Task[Any]] = set()  # the loop's own
        self._loop = LoopThread()
        try:
            self._loop.run(self.session.__aenter__(), OPEN_S)
        except BaseException as error:
            with suppress(TimeoutError):
                self._loop.close(GRACE_S)
            if isinstance(error, TimeoutError):
                where = ", ".join(map(str, settings.where))
                raise StoreError(f"{where} did not open in {OPEN_S:g} s") from error
            raise
        self._sharing.enter_context(sharing_interpreter(device))

    @classmethod
    def acquire(
        cls,
        settings: SessionSettings,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device = MAIN_MEMORY,
        seams_tag: str = "",
    ) -> SharedSession:
        """The one of this process for these settings and this model, whose cache is of `dtype` and
        lies on `device`, and whose joins are repaired by the seams of that tag."""
        key = (settings, spec.fingerprint, dtype, str(device), seams_tag)
        with cls._lock:
            shared = cls._every.get(key)
            if shared is None:
                shared = cls(settings, spec, dtype, device, seams_tag)
                try:
                    warm_up(shared.session.codec)
                except BaseException:
                    shared._close()
                    raise
                cls._every[key] = shared
            shared._users += 1
            return shared

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, one in self._every.items() if one is self]:
                del self._every[key]
        self._close()

    def _close(self) -> None:
        """A process that just ends takes its threads away first: then what waits is lost."""
        self._sharing.close()
        try:
            self._loop.run(self._end(), CLOSE_S + GRACE_S)
            self._loop.close(GRACE_S)
        except Exception as error:
            logger.warning("kdn could not close in order: %r", error)

    async def _end(self) -> None:
        """Nobody waits for lookups and loads any more; what was computed is still published."""
        for task in (tasks := list(self._under_way)):
            task.cancel()
        closing = (self.seams.close(), self.early.close())
        await asyncio.gather(*tasks, *closing, return_exceptions=True)
        if self._offering:
            await asyncio.wait(self._offering, timeout=GRACE_S)
        await self.session.publisher.close(CLOSE_S)
        await self.session.close()

    # for the threads of vLLM

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run it on the event loop; `changed` is set when it is done."""
        future = self._loop.submit(self._tracked(work))
        future.add_done_callback(watched("a lookup or load", KdnError, OSError))
        future.add_done_callback(lambda _: self.changed.set())
        return future

    async def _tracked(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            return await work()
        finally:
            self._under_way.discard(task)

    def has_room(self) -> bool:
        """Whether the publisher takes more. May be a little out of date."""
        queued = self.session.publisher.queued_bytes
        return not self._loop.is_closed and queued < self.session.settings.queue_bytes

    def publish(
        self, chunk: Chunk, cache: KVCache, exact_until: int | None, saved_s: float
    ) -> None:
        """Later; `cache` must not change any more."""
        source = Values(cache, final=True)
        self._loop.call(self._publish, Offer(chunk, source, exact_until, saved_s))

    def publish_later(self, offers: Callable[[], Sequence[Offer]]) -> None:
        """What it gives, which may wait: it is called in a thread."""
        offering = self._loop.submit(self._offer(offers))
        offering.add_done_callback(watched("publishing", KdnError))

    async def _offer(self, offers: Callable[[], Sequence[Offer]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._offering.add(task)
        try:
            for offer in await asyncio.to_thread(offers):
                self._publish(offer)
        finally:
            self._offering.discard(task)

    def _publish(self, offer: Offer) -> None:
        chunk, source, exact_until, saved_s, origin = offer
        admission: Admission | None = None
        try:
            with nullcontext() if origin is None else origin.resumed():
                admission = self.session.publish(
                    chunk, source, exact_until=exact_until, saved_s=saved_s
                )
        except Exception as error:
            fault("publishing", error)
        if admission is not Admission.QUEUED and isinstance(source, Lent):
            source.give_back()
