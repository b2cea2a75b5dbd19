"""The background thread of a process: places, codec and publisher, on an event loop of their own.

vLLM's scheduler and worker often share a process, and a folder can be opened only once: they share
one runtime, which ends with the last of them. Nothing here is awaited by vLLM's own thread, except
when it starts and ends. Whatever fails here is logged and counted, and costs vLLM a miss.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from kdn.background import fault, watched
from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut, seal_key
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import open_codec
from kdn.codec.base import Codec
from kdn.codec.expected import expected_kld
from kdn.codec.format import Bitstream
from kdn.delivery.estimate import Estimator
from kdn.delivery.publish import Counts, Publisher
from kdn.engines.host_tier import HostTier, default_place
from kdn.engines.vllm.settings import Settings
from kdn.errors import KdnError, StoreError
from kdn.places.places import Places, open_places
from kdn.shared_profiles import codec_for

logger = logging.getLogger(__name__)
T = TypeVar("T")

OPEN_S = 30.0
CLOSE_S = 10.0
LOOKUPS_AT_ONCE = 8
"""More would take each other's time."""
KEEPING_CHUNKS = 64
"""On their way to the host's shared memory; more are not kept there."""


class Runtime:
    """`acquire` one; `release` it as often."""

    _shared: dict[tuple[Settings, bytes, torch.dtype], Runtime] = {}  # noqa: RUF012 (shared on purpose)
    _lock = threading.Lock()  # guards _shared and _users

    def __init__(self, settings: Settings, codec: Codec, dtype: torch.dtype) -> None:
        self.settings, self.codec = settings, codec
        self.expected_kld = expected_kld(codec)
        self.estimator = Estimator()
        self.host = open_host_tier(settings, codec.spec, dtype)
        self.asking = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._keeper = ThreadPoolExecutor(1, "kdn-host")
        self._keeping = threading.Semaphore(KEEPING_CHUNKS)
        self.changed = threading.Event()
        """Set when a lookup or a load has ended."""
        self._users = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opened: Future[tuple[Places, Publisher]] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kdn", daemon=True)

    @classmethod
    def acquire(cls, settings: Settings, spec: ModelSpec, dtype: torch.dtype) -> Runtime:
        """The one of this process for these settings and this model, whose cache is of `dtype`."""
        key = (settings, spec.fingerprint, dtype)
        with cls._lock:
            runtime = cls._shared.get(key)
            if runtime is None:
                runtime = cls(settings, find_codec(settings, spec), dtype)
                warm_up(runtime.codec)
                runtime._start()
                cls._shared[key] = runtime
            runtime._users += 1
            return runtime

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, one in self._shared.items() if one is self]:
                del self._shared[key]
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S + 5.0)
        self._keeper.shutdown(cancel_futures=True)

    # for the threads of vLLM

    @property
    def places(self) -> Places:
        return self._opened.result(OPEN_S)[0]

    @property
    def counts(self) -> Counts:
        return self._opened.result(OPEN_S)[1].counts

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the event loop; `changed` is set when it is done."""
        tracked = self._tracked(work)
        try:
            future = asyncio.run_coroutine_threadsafe(tracked, self._loop)
        except RuntimeError:  # it is closed
            tracked.close()
            work.close()
            future = Future()
            future.set_exception(StoreError("kdn's background thread has ended"))
        future.add_done_callback(watched("a lookup or load", KdnError, OSError))
        future.add_done_callback(lambda _: self.changed.set())
        return future

    def has_room(self) -> bool:
        """Whether the publisher takes more. May be a little out of date."""
        publisher = self._opened.result(OPEN_S)[1]
        return not self._loop.is_closed() and publisher.queued_bytes < self.settings.queue_bytes

    def publish(self, chunk: Chunk, cache: KVCache, saved_s: float) -> None:
        """Later; `cache` must not change any more."""
        publisher = self._opened.result(OPEN_S)[1]

        def publish() -> None:
            try:
                publisher.publish(chunk, cache, prefix_exact=True, saved_s=saved_s)
            except Exception as error:
                fault("publishing", error)

        self._loop.call_soon_threadsafe(publish)

    def keep(self, chunk: Chunk, cache: KVCache, kld: float, *, exact: bool) -> None:
        """For other engines of this host, later; `cache` must not change any more."""
        host = self.host
        if host is None or not self._keeping.acquire(blocking=False):
            return
        kept = self._keeper.submit(host.put, chunk, cache, kld, exact=exact)
        kept.add_done_callback(lambda _: self._keeping.release())
        kept.add_done_callback(watched("keeping a decoded chunk"))

    # its own thread

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def _start(self) -> None:
        self._thread.start()
        try:
            self._opened.result(OPEN_S)
        except TimeoutError as error:
            raise StoreError(f"{self.settings.url} did not open in {OPEN_S} s") from error

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(self._serve())
        try:
            while self._is_interrupted(serving):
                pass
        finally:
            self._loop.close()

    def _is_interrupted(self, serving: asyncio.Task[None]) -> bool:
        """Run until the end; True if there is a rest: somebody's code wanted out, in one of many
        tasks, and the others go on."""
        try:
            self._loop.run_until_complete(serving)
        except BaseException as error:
            if isinstance(error, SystemExit | KeyboardInterrupt) and not serving.done():
                logger.warning("kdn's background thread was interrupted: %r", error)
                return True
            if not self._opened.done():
                self._opened.set_exception(error)
            elif self._stop.is_set():  # a process that just ends takes its threads away first
                logger.warning("kdn could not close in order: %r", error)
            else:
                logger.exception("kdn's background thread ended")
        return False

    async def _serve(self) -> None:
        settings = self.settings
        async with open_places(
            settings.url, token=settings.token, client=settings.client, tls_ca=settings.tls_ca
        ) as places:
            publisher = Publisher(
                places.publish_to, self.codec, max_queue_bytes=settings.queue_bytes
            )
            async with publisher:
                self._opened.set_result((places, publisher))
                await self._stop.wait()
                await self._cancel_others()
                await publisher.close(CLOSE_S)

    async def _cancel_others(self) -> None:
        """Lookups and loads nobody waits for any more; the publisher's tasks are its own."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def find_codec(settings: Settings, spec: ModelSpec) -> Codec:
    """With the profile that was named, that of this machine, or one that somebody shared."""
    if settings.profile:
        return open_codec(settings.codec, spec, Path(settings.profile))

    async def find() -> Codec:
        try:
            async with (
                asyncio.timeout(OPEN_S),
                open_places(
                    settings.url,
                    token=settings.token,
                    client=settings.client,
                    tls_ca=settings.tls_ca,
                ) as places,
            ):
                return await codec_for(settings.codec, spec, places, seal_key(settings.secret))
        except TimeoutError as error:
            raise StoreError(f"{settings.url} did not open in {OPEN_S} s") from error

    # In a thread of its own: this one may have an event loop that runs.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, find()).result()


def open_host_tier(settings: Settings, spec: ModelSpec, dtype: torch.dtype) -> HostTier | None:
    """A folder that was named must be good; without shared memory there is just no such tier."""
    folder = Path(settings.host_folder) if settings.host_folder else default_place()
    if settings.host_bytes == 0 or folder is None:
        return None
    try:
        return HostTier(folder, spec, dtype, settings.host_bytes)
    except (KdnError, OSError) as error:
        if settings.host_folder:
            raise
        logger.warning("decoded chunks are not shared on this host: %s", error)
        return None


def warm_up(codec: Codec) -> None:
    """Compile what is compiled on first use: a load has a deadline, the start of vLLM has none."""
    spec = codec.spec
    tokens = range(CHUNK_TOKENS)
    [chunk] = cut([token % spec.vocab_size for token in tokens], Namespace(b"", b""))
    shape = (spec.num_layers, CHUNK_TOKENS, spec.num_kv_heads, spec.head_dim)
    values = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)
    codec.decode(Bitstream.parse(codec.encode(chunk, KVCache(values, values))), chunk)
