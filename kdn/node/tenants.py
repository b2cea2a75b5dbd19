"""Who is asking, what they may, and how often: tokens, rights, rates.

A token is known by its SHA-256 only (tokens are random, so no slow hash is needed), and compared
with every known one in constant time.
"""

from __future__ import annotations

import hmac
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from hashlib import sha256

from kdn.config import TOKEN_LISTS
from kdn.depot.tenants import PUBLIC, Tenant
from kdn.node.answers import Refusal

Clock = Callable[[], float]


class Right(IntEnum):
    """What a token may do; each right includes those before it."""

    READ = 0
    PUBLISH = 1
    OPERATE = 2


RIGHTS = dict(zip(TOKEN_LISTS, Right, strict=True))
"""Of the tokens in each list of a tenant's settings."""


def new_token() -> tuple[str, str]:
    """A fresh token, and the hash of it that a configuration file holds."""
    token = secrets.token_urlsafe(32)
    return token, token_hash(token)


def token_hash(token: str) -> str:
    """Of whatever bytes were sent: aiohttp shows those that are no UTF-8 as surrogates."""
    return "sha256:" + sha256(token.encode(errors="surrogateescape")).hexdigest()


class Rate(ABC):
    """How often a tenant may ask."""

    per_s: float
    """0: as often as it likes."""

    @abstractmethod
    def take_now(self) -> bool:
        """Whether there was a place, as far as that can be told at once."""

    @abstractmethod
    async def wait_s(self) -> int:
        """0 if there was a place, else the whole seconds until there is one."""

    async def take(self) -> None:
        """Refuses if there is no place."""
        wait_s = await self.wait_s()
        if wait_s:
            raise Refusal(
                429, "rate_limited", f"more than {self.per_s:g} requests per second",
                {"Retry-After": str(wait_s)},
            )  # fmt: skip


class RateLimit(Rate):
    """A token bucket that holds one second's worth (at least one request)."""

    def __init__(self, per_s: float, clock: Clock):
        self.per_s = per_s
        self._clock = clock
        self._burst = max(1.0, per_s)
        self._level = self._burst
        self._at_s = clock()

    def take_now(self) -> bool:
        if not self.per_s:
            return True
        now_s = self._clock()
        self._level = min(self._burst, self._level + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._level < 1:
            return False
        self._level -= 1
        return True

    async def wait_s(self) -> int:
        return 0 if self.take_now() else max(1, math.ceil((1 - self._level) / self.per_s))


class Tenants:
    """All tenants of a depot, known by their tokens."""

    def __init__(self, tenants: Sequence[Tenant], clock: Clock):
        self._all = tenants
        self.open = tenants[0].settings is PUBLIC  # who may do everything
        self.rates: Mapping[str, Rate] = {
            tenant.name: RateLimit(tenant.settings.requests_per_s, clock) for tenant in tenants
        }
        self._hashes = [
            (hash_, tenant, right)
            for tenant in tenants
            for kind, right in RIGHTS.items()
            for hash_ in getattr(tenant.settings, kind)
        ]

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._all)

    def authenticate(self, authorization: str | None) -> tuple[Tenant, Right]:
        """Whose token this is, and what it may do. Every known hash is compared, whichever fits."""
        if self.open:
            return self._all[0], Right.OPERATE
        scheme, _, token = (authorization or "").partition(" ")
        presented = token_hash(token.strip()) if scheme.lower() == "bearer" else ""
        found = None
        for known, tenant, right in self._hashes:
            if hmac.compare_digest(known, presented):
                found = tenant, right
        if found is None:
            raise Refusal(
                401, "unauthorized", "a valid bearer token is needed",
                {"WWW-Authenticate": 'Bearer realm="kdn"'},
            )  # fmt: skip
        return found
