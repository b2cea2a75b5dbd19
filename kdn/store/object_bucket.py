"""A bucket, or what stands for one: bytes under paths, with deadlines, named errors and costs.

All requests go through here. Each is tried again when it fails in a way that may pass, has a
deadline (more for more bytes), and is counted. What differs between servers ends here, too:

- Conditional puts are how the first writer wins. A server is asked once, before the first put,
  whether it keeps to them (`Abilities`); some accept the condition and ignore it.
- The version of an object (its ETag) pins it: ranges of one object never come from two. Servers
  that ignore `If-Match` are found out by the ETag of their answer.
- A server that answers a range with status 200 is read without ranges: in full, from the beginning.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from kdn.errors import KdnError, NotAllowedError, StoreError, TruncatedError, UnsupportedError
from kdn.store.costs import Costs

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore as Client

DEADLINE_S = 20.0
SLOWEST_BYTES_S = 1 << 20
"""A request of many bytes has as much longer as they take at this rate."""
WAITS_S = (0.1, 0.4, 1.6)
"""Before a request is tried again."""
MAX_REQUESTS = 64
"""At the same time."""
PIECE_BYTES = 256 << 10
"""Of a range that is handed on as it arrives."""
LIST_PAGE = 1000
PROBE = "kdn-probe"
"""A small object that tells what the server can do; it stays."""
LEAVE_S = 0.05

T = TypeVar("T")
_ANSWERS = (FileNotFoundError, AlreadyExistsError, PreconditionError)
_REFUSALS = (PermissionDeniedError, UnauthenticatedError, PermissionError)
_UNABLE = (NotSupportedError, NotImplementedError)
_QUERY = re.compile(r"\?\S*")
_BEYOND = re.compile(r"416 |[Ii]nvalid range|range was invalid|range starting")
_NOT_PARTIAL = "non-partial"


class ChangedError(KdnError):
    """Under this path is another object than the one that was begun with."""


class Version(NamedTuple):
    """Which of all objects that were ever under a path."""

    e_tag: str | None = None
    number: str | None = None

    @property
    def is_known(self) -> bool:
        return self.e_tag is not None or self.number is not None

    def may_be(self, other: Version) -> bool:
        """Whether both are one, as far as a server told: not all tell both of it each time."""
        if self.e_tag is not None and other.e_tag is not None:
            return self.e_tag == other.e_tag
        return None in (self.number, other.number) or self.number == other.number


class Found(NamedTuple):
    """Bytes of an object from where they were asked for on, and how long the whole is."""

    data: memoryview
    size_bytes: int
    version: Version


class Abilities(NamedTuple):
    """What a server keeps to, not what it accepts."""

    create: bool
    """A put only where nothing is (`If-None-Match: *`)."""
    update: bool
    """A put only over what is named (`If-Match`)."""


class Bucket:
    def __init__(
        self,
        client: Client,
        name: str,
        *,
        abilities: Abilities | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`abilities` as far as they are known; None: the server is asked before the first put."""
        self.name = name
        self.costs = Costs()
        self._client: Any = client
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._abilities = abilities
        self._asking = asyncio.Lock()  # guards _abilities while they are found out
        self.has_ranges = True
        """The server knows them; until it shows that it does not."""
        self._used = False

    # reading

    async def get(
        self, path: str, start: int, end: int, *, pin: Version | None = None
    ) -> Found | None:
        """Bytes [start, end), clipped to the object's end. None: nothing is there. ChangedError:
        not what `pin` names. TruncatedError: it ends before `start`."""

        async def ask() -> Found | None:
            opened = await self._open(path, start, end, pin)
            if opened is None:
                return None
            result, first, last = opened
            body = await self._body(result, first, start, last)
            return Found(body, result.meta["size"], _version(result))

        return await self._do("get", end - start if self.has_ranges else end, ask)

    async def head(self, path: str) -> Version | None:
        """Which object is there, if any."""
        try:
            meta = await self._do("head", 0, lambda: self._client.head_async(path))
        except FileNotFoundError:
            return None
        return Version(meta["e_tag"], meta["version"])

    async def stream(
        self, path: str, start: int, end: int, *, pin: Version | None = None
    ) -> AsyncGenerator[memoryview]:
        """The same as it arrives; FileNotFoundError if nothing is there. Never tried again once
        something came: whoever reads so asks for the rest."""

        async def ask() -> tuple[GetResult, int, int]:
            opened = await self._open(path, start, end, pin)
            if opened is None:
                raise FileNotFoundError(path)
            return opened

        result, position, last = await self._do("get", 0, ask)
        pieces = result.stream(min_chunk_size=PIECE_BYTES).__aiter__()
        while position < last:
            piece = await self._next(pieces)
            if piece is None:
                raise StoreError(f"{self.name}: an answer ended {last - position} bytes early")
            view = memoryview(piece)[: last - position]
            skipped = max(0, start - position)
            position += len(view)
            if len(view) > skipped:
                yield view[skipped:]
        if position == result.range[1]:  # to its end, so that the connection can be used again
            await self._next(pieces)

    async def _next(self, pieces: Any) -> memoryview | None:
        try:
            async with asyncio.timeout(self._deadline_s):
                piece = await _following(pieces)
        except TimeoutError:
            raise StoreError(f"{self.name}: nothing for {self._deadline_s:g} s") from None
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(f"{self.name}: {_reason(error)}") from None
        if piece is None:
            return None
        self.costs.received_bytes += len(piece)
        return memoryview(piece)

    async def _open(
        self, path: str, start: int, end: int, pin: Version | None
    ) -> tuple[GetResult, int, int] | None:
        """An answer whose body begins at the second and is of use up to the third."""
        options: dict[str, Any] = {}
        if self.has_ranges:
            options["range"] = (start, end)
        if pin is not None and pin.e_tag is not None:
            options["if_match"] = pin.e_tag
        try:
            result: GetResult = await self._client.get_async(path, options=options)
        except FileNotFoundError:
            return None
        except PreconditionError:
            raise ChangedError(path) from None
        except BaseError as error:
            if self.has_ranges and _NOT_PARTIAL in str(error):
                self.has_ranges = False
                self.costs.requests["get"] += 1
                return await self._open(path, start, end, pin)
            if _BEYOND.search(str(error)):
                raise TruncatedError(f"{path} ends before byte {start}") from None
            raise
        if pin is not None and not _version(result).may_be(pin):
            raise ChangedError(path)
        first, last = result.range
        size_bytes = result.meta["size"]
        if self.has_ranges and (first, last) != (start, min(end, size_bytes)):
            raise StoreError(f"{self.name}: asked for {start} to {end}, was told {first} to {last}")
        if not self.has_ranges and start >= size_bytes:
            raise TruncatedError(f"{path} ends before byte {start}")
        return result, first, min(end, last)

    async def _body(self, result: GetResult, first: int, start: int, last: int) -> memoryview:
        """Bytes [start, last) of an answer that begins with `first`: never more than that in
        memory, whatever a server sends."""
        size = last - first
        pieces = result.stream(min_chunk_size=max(1, size)).__aiter__()
        data = memoryview(await _following(pieces) or b"")
        if len(data) >= size and last == result.range[1]:
            await _following(pieces)  # its end, so that the connection can be used again
        self.costs.received_bytes += len(data)
        if len(data) < size:
            raise StoreError(f"{self.name}: expected {size} bytes, found {len(data)}")
        return data[start - first : size]

    # writing

    async def abilities(self) -> Abilities:
        """What this server keeps to; found out once."""
        async with self._asking:
            if self._abilities is None:
                self._abilities = await self._find_abilities()
            return self._abilities

    async def _find_abilities(self) -> Abilities:
        create = await self._is_refused("create") or await self._is_refused("create")
        update = await self._is_refused({"e_tag": '"no-such-etag"', "version": "1"})
        return Abilities(create, update)

    async def _is_refused(self, mode: Any) -> bool:
        """Whether a put of the probe is refused, as it should be once the probe is there."""
        try:
            return await self._put(PROBE, b"kdn asks what this server can do\n", mode) is None
        except UnsupportedError:
            return False

    async def put(self, path: str, data: bytes, *, over: Version | None = None) -> Version | None:
        """Put where nothing is, or in place of `over`. None if it is otherwise there.

        Where the server cannot do so on condition, whoever puts has looked before and looks again
        afterwards; in place of something then means: after it was deleted.
        """
        can = await self.abilities()
        if over is not None and can.update:
            named = {"e_tag": over.e_tag, "version": over.number}
            return await self._put(path, data, {key: v for key, v in named.items() if v})
        if over is not None:
            await self.delete(path)
        return await self._put(path, data, "create" if can.create else "overwrite")

    async def _put(self, path: str, data: bytes, mode: Any) -> Version | None:
        async def ask() -> Version:
            self.costs.sent_bytes += len(data)
            put = await self._client.put_async(path, data, mode=mode, use_multipart=False)
            return Version(put["e_tag"], put["version"])

        try:
            return await self._do("put", len(data), ask)
        except _ANSWERS:
            return None

    async def overwrite(self, path: str, data: bytes) -> None:
        """Put in place of whatever is there, or of nothing."""
        await self._put(path, data, "overwrite")

    async def delete(self, path: str) -> None:
        """Also where there is nothing."""
        with suppress(FileNotFoundError):
            await self._do("delete", 0, lambda: self._client.delete_async(path))

    async def list(self, folder: str, after: str | None = None) -> AsyncGenerator[Sequence[str]]:
        """Paths in a folder and below, page by page, in the server's order; from `after` on."""
        pages = self._client.list(folder, offset=after, chunk_size=LIST_PAGE).__aiter__()

        async def ask() -> list[str]:
            return [meta["path"] for meta in await _following(pages) or ()]

        # Only once: after a failure the pages end, and that would look like the end of all.
        while page := await self._do("list", 0, ask, waits_s=()):
            yield page

    # requests

    async def _do(
        self,
        kind: str,
        num_bytes: int,
        ask: Callable[[], Awaitable[T]],
        waits_s: Sequence[float] = WAITS_S,
    ) -> T:
        """A request, with as many tries as it takes. An answer that is no failure is passed on as
        it is (`_ANSWERS`)."""
        limit_s = self._deadline_s + num_bytes / SLOWEST_BYTES_S
        self._used = True
        async with self._slots:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._try(kind, ask, waits_s)
            except TimeoutError:
                raise StoreError(f"{self.name}: no answer within {limit_s:.0f} s") from None
            except _REFUSALS as error:
                raise NotAllowedError(f"{self.name}: {_reason(error)}") from None
            except _UNABLE as error:
                raise UnsupportedError(f"{self.name}: {_reason(error)}") from None
            except _ANSWERS:
                raise
            except (BaseError, OSError, ValueError) as error:
                raise StoreError(f"{self.name}: {_reason(error)}") from None

    async def _try(self, kind: str, ask: Callable[[], Awaitable[T]], waits_s: Sequence[float]) -> T:
        for wait_s in waits_s:
            self.costs.requests[kind] += 1
            try:
                return await ask()
            except (*_ANSWERS, *_REFUSALS, *_UNABLE, ChangedError, TruncatedError):
                raise
            except (BaseError, OSError, StoreError):
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        self.costs.requests[kind] += 1
        return await ask()

    async def close(self) -> None:
        """obstore has threads. One that still ends a request when the interpreter does takes the
        process down with it: a moment is enough."""
        if self._used:
            self._used = False
            await asyncio.sleep(LEAVE_S)


async def _following(stream: Any) -> Any:
    """What comes next; None at the end. (`anext` with a default does not know obstore's.)"""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


def _version(result: GetResult) -> Version:
    return Version(result.meta["e_tag"], result.meta["version"])


def _reason(error: BaseException) -> str:
    """In one line, without what may be secret in a URL."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _QUERY.sub("", lines[0])[:300]
