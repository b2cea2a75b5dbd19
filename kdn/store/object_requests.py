"""Requests to a bucket: tried again when they fail in a way that may pass, each with a deadline
(more for more bytes), counted, and their errors named."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from kdn.errors import KdnError, NotAllowedError, StoreError, TruncatedError, UnsupportedError
from kdn.protocol.limits import SLOWEST_BYTES_S
from kdn.store.costs import Costs

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

DEADLINE_S = 20.0
WAITS_S = (0.1, 0.4, 1.6)
"""Before a request is tried again."""
MAX_REQUESTS = 64
"""At the same time."""
LEAVE_S = 0.05

T = TypeVar("T")
ANSWERS = (FileNotFoundError, AlreadyExistsError, PreconditionError)
"""No failures: what a server says of an object."""
FAILURES = (BaseError, OSError, ValueError)
_REFUSALS = (PermissionDeniedError, UnauthenticatedError, PermissionError)
_UNABLE = (NotSupportedError, NotImplementedError)
_QUERY = re.compile(r"\?\S*")


class ChangedError(KdnError):
    """Under this path is another object than the one that was begun with."""


class Requests:
    def __init__(self, client: Client, name: str, deadline_s: float = DEADLINE_S) -> None:
        """`name` is for messages."""
        self.name = name
        self.client: Any = client
        self.costs = Costs()
        self.deadline_s = deadline_s
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._used = False

    async def request(
        self,
        kind: str,
        num_bytes: int,
        ask: Callable[[], Awaitable[T]],
        waits_s: Sequence[float] = WAITS_S,
    ) -> T:
        """A request, with as many tries as it takes. An answer that is no failure is passed on as
        it is (`ANSWERS`)."""
        limit_s = self.deadline_s + num_bytes / SLOWEST_BYTES_S
        self._used = True
        async with self._slots:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._try(kind, ask, waits_s)
            except TimeoutError:
                raise StoreError(f"{self.name}: no answer within {limit_s:.0f} s") from None
            except _REFUSALS as error:
                raise NotAllowedError(f"{self.name}: {reason(error)}") from None
            except _UNABLE as error:
                raise UnsupportedError(f"{self.name}: {reason(error)}") from None
            except ANSWERS:
                raise
            except FAILURES as error:
                raise StoreError(f"{self.name}: {reason(error)}") from None

    async def _try(self, kind: str, ask: Callable[[], Awaitable[T]], waits_s: Sequence[float]) -> T:
        for wait_s in waits_s:
            self.costs.requests[kind] += 1
            try:
                return await ask()
            except (*ANSWERS, *_REFUSALS, *_UNABLE, ChangedError, TruncatedError):
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


def reason(error: BaseException) -> str:
    """In one line, without what may be secret in a URL."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = _QUERY.sub("", lines[0])[:300]
    # What obstore says of an http:// endpoint of the environment, and no more than that.
    is_plain = told.endswith("builder error") and "http://" in told
    return f"{told} (an endpoint without TLS needs ?allow_http=true)" if is_plain else told
