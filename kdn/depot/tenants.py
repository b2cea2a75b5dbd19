"""Whose a key is, and how much each tenant may hold.

A tenant's store keys begin with a digest of its name: what is another's is simply not there, and
the same code answers both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

from kdn.config import TenantSettings
from kdn.errors import QuotaError
from kdn.store.evict import Owners
from kdn.store.tally import OWNER_BYTES

PUBLIC = TenantSettings("public")
"""Everybody, where there are no tenants."""

COLLECTIONS = {"chunks": b"c", "profiles": b"p", "objects": b"o"}


class Quota:
    """Bytes a tenant may hold. What it does hold the store counts, across restarts and evictions;
    here is only what is on its way there."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._reserved_bytes = 0

    def fits(self, size_bytes: int, held_bytes: int) -> bool:
        """Beside what is held, and what is on its way."""
        wanted_bytes = held_bytes + self._reserved_bytes + size_bytes
        return not self.limit_bytes or wanted_bytes <= self.limit_bytes

    def check(self, size_bytes: int, held_bytes: int) -> None:
        """QuotaError for what does not fit."""
        if not self.fits(size_bytes, held_bytes):
            raise QuotaError(
                f"{size_bytes} more bytes do not fit into the quota of {self.limit_bytes}"
            )

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """While an object is on its way in: two of them never take the same place."""
        self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= size_bytes


class Tenant:
    """One tenant of a depot, and the namespace of its keys."""

    def __init__(self, settings: TenantSettings):
        self.settings = settings
        self.name = settings.name
        self.prefix = blake2b(settings.name.encode(), digest_size=OWNER_BYTES).digest()
        self.quota = Quota(settings.quota_bytes)
        self.changes = asyncio.Lock()
        """Guards deleting a name together with its chunks against every other change of names."""

    def store_key(self, collection: str, key: bytes) -> bytes:
        return self.prefix + COLLECTIONS[collection] + key

    def public_key(self, store_key: bytes) -> bytes:
        """The key as its tenant knows it."""
        assert store_key.startswith(self.prefix)
        return store_key[OWNER_BYTES + 1 :]


def tenants_of(settings: Sequence[TenantSettings]) -> tuple[Tenant, ...]:
    """Without any, everybody is PUBLIC."""
    return tuple(Tenant(one) for one in settings or (PUBLIC,))


def owners_of(tenants: Iterable[Tenant]) -> Owners:
    """Whose a store's object is, and what part of the store each tenant may fill."""
    weights = {tenant.prefix: tenant.settings.weight for tenant in tenants}
    return Owners(lambda key: key[:OWNER_BYTES], weights)
