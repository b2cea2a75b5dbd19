"""A bucket, or what stands for one: bytes under paths.

How a request is made is `object_requests.py`. What differs between servers ends here:

- Conditional puts are how the first writer wins. A server is asked once, before the first put,
  whether it keeps to them (`Abilities`); some accept the condition and ignore it.
- The version of an object (its ETag) pins it: ranges of one object never come from two. Servers
  that ignore `If-Match` are found out by the ETag of their answer.
- A server that answers a range with status 200 is read without ranges: in full, from the beginning.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from kdn.errors import KdnError, StoreError, TruncatedError, UnsupportedError
from kdn.store.object_requests import ANSWERS, DEADLINE_S, FAILURES, ChangedError, Requests, reason

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore as Client

PIECE_BYTES = 1 << 20
"""Of a range that is handed on as it arrives. Over slow links readers ask for less at a time."""
LARGE_BYTES = 64 << 20
"""What is longer is put in parts."""
UPLOAD_PART_BYTES = 16 << 20
UPLOADS_AT_ONCE = 4
UPLOADS = "uploads"
"""Where an upload in parts is until all of it is there. A process that dies leaves it behind."""
LIST_PAGE = 1000
PROBE = "kdn-probe"
"""A small object that tells what the server can do; it stays."""
_BEYOND = re.compile(r"416 |[Ii]nvalid range|range was invalid|range starting")
_NOT_PARTIAL = "non-partial"


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


class Bucket(Requests):
    def __init__(
        self,
        client: Client,
        name: str,
        *,
        abilities: Abilities | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`abilities` as far as they are known; None: the server is asked before the first put."""
        super().__init__(client, name, deadline_s)
        self._abilities = abilities
        self._asking = asyncio.Lock()  # guards _abilities while they are found out
        self.has_ranges = True
        """The server knows them; until it shows that it does not."""
        self._copies: bool | None = None  # copies keep to conditions; None: not asked yet

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

        return await self.request("get", end - start if self.has_ranges else end, ask)

    async def head(self, path: str) -> Version | None:
        """Which object is there, if any."""
        try:
            meta = await self.request("head", 0, lambda: self.client.head_async(path))
        except FileNotFoundError:
            return None
        return Version(meta["e_tag"], meta["version"])

    async def stream(
        self, path: str, start: int, end: int, *, pin: Version | None = None
    ) -> AsyncGenerator[memoryview]:
        """The same as it arrives; ChangedError if nothing is there. Never tried again once
        something came: whoever reads so asks for the rest."""

        async def ask() -> tuple[GetResult, int, int]:
            opened = await self._open(path, start, end, pin)
            if opened is None:
                raise ChangedError(path)
            return opened

        result, position, last = await self.request("get", 0, ask)
        pieces = result.stream(min_chunk_size=PIECE_BYTES).__aiter__()
        while position < last:
            piece = await self._next(pieces)
            if piece is None:
                raise StoreError(f"{self.name}: an answer ended {last - position} bytes early")
            view = piece[: last - position]
            skipped = max(0, start - position)
            position += len(view)
            if len(view) > skipped:
                yield view[skipped:]
        if position == result.range[1]:
            await self._next(pieces)  # its end, so that the connection can be used again

    async def _next(self, pieces: Any) -> memoryview | None:
        try:
            async with asyncio.timeout(self.deadline_s):
                piece = await _following(pieces)
        except TimeoutError:
            raise StoreError(f"{self.name}: nothing for {self.deadline_s:g} s") from None
        except FAILURES as error:
            raise StoreError(f"{self.name}: {reason(error)}") from None
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
            result: GetResult = await self.client.get_async(path, options=options)
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
        pieces = result.stream(min_chunk_size=size + 1).__aiter__()  # to its end
        data = memoryview(await _following(pieces) or b"")
        self.costs.received_bytes += len(data)
        if len(data) < size or (len(data) > size and last == result.range[1]):
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
        if len(data) > LARGE_BYTES and over is None:
            return await self._put_large(path, data, can)
        if over is not None and can.update:
            named = {"e_tag": over.e_tag, "version": over.number}
            return await self._put(path, data, {key: v for key, v in named.items() if v})
        if over is not None:
            await self.delete(path)
        return await self._put(path, data, "create" if can.create else "overwrite")

    async def _put(self, path: str, data: bytes, mode: Any) -> Version | None:
        async def ask() -> Version:
            self.costs.sent_bytes += len(data)
            put = await self.client.put_async(path, data, mode=mode, use_multipart=False)
            return Version(put["e_tag"], put["version"])

        try:
            return await self.request("put", len(data), ask)
        except FileNotFoundError as error:
            if isinstance(mode, dict):  # what it was to replace is gone
                return None
            raise StoreError(f"{self.name}: {reason(error)}") from None
        except ANSWERS:
            return None

    async def overwrite(self, path: str, data: bytes) -> None:
        """Put in place of whatever is there, or of nothing."""
        await self._put(path, data, "overwrite")

    async def _put_large(self, path: str, data: bytes, can: Abilities) -> Version | None:
        """In parts, side by side. An upload in parts takes no conditions, a copy does: so it goes
        to a place of its own first, if the server copies where nothing is and only there."""
        if not can.create:
            return await self._upload(path, data)
        if self._copies is None:
            self._copies = await self._is_copy_refused()
        if not self._copies:
            return await self._put(path, data, "create")
        aside = f"{UPLOADS}/{secrets.token_hex(16)}"
        try:
            await self._upload(aside, data)
            await self._copy(aside, path)
        except AlreadyExistsError:
            return None
        finally:
            with suppress(KdnError):
                await self.delete(aside)
        return Version()  # whoever put it looks again

    async def _upload(self, path: str, data: bytes) -> Version:
        async def ask() -> Version:
            self.costs.sent_bytes += len(data)
            self.costs.requests["put"] += 1 + -(-len(data) // UPLOAD_PART_BYTES)
            put = await self.client.put_async(
                path, data, use_multipart=True, chunk_size=UPLOAD_PART_BYTES,
                max_concurrency=UPLOADS_AT_ONCE,
            )  # fmt: skip
            return Version(put["e_tag"], put["version"])

        return await self.request("put", len(data), ask)

    async def _copy(self, path: str, to: str) -> None:
        await self.request("copy", 0, lambda: self.client.copy_async(path, to, overwrite=False))

    async def _is_copy_refused(self) -> bool:
        """Whether the probe is not copied over itself, as it should not be."""
        await self._is_refused("create")  # so it is there
        try:
            await self._copy(PROBE, PROBE)
        except AlreadyExistsError:
            return True
        except (UnsupportedError, StoreError):
            pass
        return False

    async def delete(self, path: str) -> None:
        """Also where there is nothing."""
        with suppress(FileNotFoundError):
            await self.request("delete", 0, lambda: self.client.delete_async(path))

    async def list(self, folder: str, after: str | None = None) -> AsyncGenerator[Sequence[str]]:
        """Paths in a folder and below, page by page, in the server's order; from `after` on."""
        pages = self.client.list(folder, offset=after, chunk_size=LIST_PAGE).__aiter__()

        async def ask() -> list[str]:
            return [meta["path"] for meta in await _following(pages) or ()]

        # Only once: after a failure the pages end, and that would look like the end of all.
        while page := await self.request("list", 0, ask, waits_s=()):
            yield page


async def _following(stream: Any) -> Any:
    """What comes next; None at the end. (`anext` with a default does not know obstore's.)"""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


def _version(result: GetResult) -> Version:
    return Version(result.meta["e_tag"], result.meta["version"])
