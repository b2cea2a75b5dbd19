"""Who is asking, and how much they may: tokens, namespaces, rates, quotas.

A token is known by its SHA-256 only (tokens are random, so no slow hash is needed), and compared
with every known one in constant time. A tenant's store keys begin with a digest of its name: what
is another's is simply not there, and the same code answers both.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from hashlib import blake2b, sha256

from kdn.config import TOKEN_LISTS, TenantSettings
from kdn.node.answers import Refusal
from kdn.store.evict import Owners

PUBLIC = TenantSettings("public")
"""Everybody, at a node without tokens. May do everything."""

COLLECTIONS = {"chunks": b"c", "profiles": b"p", "objects": b"o"}
_PREFIX_BYTES = 8
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


class RateLimit:
    """A token bucket that holds one second's worth (at least one request)."""

    def __init__(self, per_s: float, clock: Clock):
        self._per_s = per_s
        self._clock = clock
        self._burst = max(1.0, per_s)
        self._level = self._burst
        self._at_s = clock()

    def take(self) -> None:
        """Refuses with the whole seconds after which there is a place again."""
        if not self._per_s:
            return
        now_s = self._clock()
        self._level = min(self._burst, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._level < 1:
            wait_s = math.ceil((1 - self._level) / self._per_s)
            raise Refusal(
                429, "rate_limited", f"more than {self._per_s:g} requests per second",
                {"Retry-After": str(max(1, wait_s))},
            )  # fmt: skip
        self._level -= 1


class Tenant:
    """One tenant of this node, and the namespace of its keys."""

    def __init__(self, settings: TenantSettings, clock: Clock):
        self.settings = settings
        self.name = settings.name
        self.prefix = blake2b(settings.name.encode(), digest_size=_PREFIX_BYTES).digest()
        self.rate = RateLimit(settings.requests_per_s, clock)
        self.quota = Quota(settings.quota_bytes)
        self.lookups = asyncio.Lock()
        """Held during each part of a long lookup."""
        self.changes = asyncio.Lock()
        """Guards deleting a name together with its chunks against every other change of names."""

    def store_key(self, collection: str, key: bytes) -> bytes:
        return self.prefix + COLLECTIONS[collection] + key

    def public_key(self, store_key: bytes) -> bytes:
        """The key as its tenant knows it."""
        assert store_key.startswith(self.prefix)
        return store_key[_PREFIX_BYTES + 1 :]


class Quota:
    """Bytes a tenant may hold. What it does hold the store counts, across restarts and evictions;
    here is only what is on its way there."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._reserved_bytes = 0

    def check(self, size_bytes: int, held_bytes: int) -> None:
        """Refuse what would not fit beside what is held."""
        if self.limit_bytes and held_bytes + self._reserved_bytes + size_bytes > self.limit_bytes:
            raise Refusal(
                507, "quota_exceeded",
                f"{size_bytes} more bytes do not fit into the quota of {self.limit_bytes}",
            )  # fmt: skip

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """While an object is on its way in: two of them never take the same place."""
        self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= size_bytes


class Tenants:
    """All tenants; without any, everybody is PUBLIC."""

    def __init__(self, settings: Sequence[TenantSettings], clock: Clock):
        self.open = not settings
        self._all = [Tenant(tenant, clock) for tenant in settings or (PUBLIC,)]
        self._hashes = [
            (hash_, tenant, right)
            for tenant in self._all
            for kind, right in RIGHTS.items()
            for hash_ in getattr(tenant.settings, kind)
        ]

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._all)

    def owners(self) -> Owners:
        """Whose a store's object is, and what part of the store each tenant may fill."""
        weights = {tenant.prefix: tenant.settings.weight for tenant in self._all}
        return Owners(lambda key: key[:_PREFIX_BYTES], weights)

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
