"""The centre as a region sees it: for each tenant a client with that tenant's own token.

A tenant of a region is a tenant at the centre. So what is put here is found there under the same
key of the same collection, by whoever asks the centre or another region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from kdn.config import DepotSettings
from kdn.credentials import token_from
from kdn.depot.tenants import COLLECTIONS, Tenant
from kdn.errors import LimitError, StoreError, UnsupportedError
from kdn.protocol.frames import MAX_KEY_BYTES
from kdn.store.base import Entry, Span, Stats, Store
from kdn.store.http import HttpStore
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.streaming import Ask, Receiver
from kdn.store.tls import client_tls

Clients = Mapping[str, NodeClient]
"""By the name of a tenant."""


def open_clients(
    settings: DepotSettings, tenants: Sequence[Tenant], limits: HttpLimits
) -> dict[str, NodeClient]:
    """Nothing is asked yet: a centre that is away now may be there later."""
    tls = client_tls(settings.upstream_credentials.tls_ca)
    return {
        tenant.name: NodeClient(
            settings.upstream, token=_token_of(settings, tenant, len(tenants)), client="region",
            limits=limits, tls=tls,
        )
        for tenant in tenants
    }  # fmt: skip


def _token_of(settings: DepotSettings, tenant: Tenant, num_tenants: int) -> str | None:
    own = tenant.settings
    told = (own.upstream_token or None, own.upstream_token_file or None)
    token = token_from(*told, f"tenants.{tenant.name}.upstream_token")
    if token is None and num_tenants > 1:
        raise UnsupportedError(
            f"tenants.{tenant.name}.upstream_token: expected the token of this tenant at "
            "the centre: with one for all, tenants would share their names"
        )
    return token or settings.upstream_credentials.token


class CentreStore(Store):
    """Its objects, under the keys of this region's store: those that a `Tenant` makes."""

    def __init__(self, clients: Clients, tenants: Sequence[Tenant]) -> None:
        self._clients = clients
        self._parts = {
            tenant.store_key(collection, b""): HttpStore(
                clients[tenant.name], collection=collection
            )
            for tenant in tenants
            for collection in COLLECTIONS
        }
        self._prefix_bytes = len(next(iter(self._parts)))

    def prefix_of(self, key: bytes) -> bytes:
        """Of a tenant's collection."""
        return key[: self._prefix_bytes]

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        inner = self._inner(entry)
        kept = await self._part(entry.key).put_entry(inner, data, checksum, replacing)
        return self._outer(self.prefix_of(entry.key), kept)

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        span = await self._part(key).get(self._cut(key), start, end, etag=etag)
        return span and replace(span, entry=self._outer(self.prefix_of(key), span.entry))

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        by_part: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for key in dict.fromkeys(keys):
            by_part[self.prefix_of(key)].append(key)
        found: dict[bytes, Entry] = {}
        for prefix, some in by_part.items():
            inner = [self._cut(key) for key in some]
            entries = await self._part(some[0]).lookup(inner, head_bytes=head_bytes)
            found.update((prefix + one.key, self._outer(prefix, one)) for one in entries if one)
        return [found.get(key) for key in keys]

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """Asks of one tenant's collection."""
        assert len({self.prefix_of(ask.key) for ask in asks}) == 1
        inner = [ask._replace(key=self._cut(ask.key)) for ask in asks]
        await self._part(asks[0].key).read_into(inner, receiver)

    async def delete(self, key: bytes) -> bool:
        return await self._part(key).delete(self._cut(key))

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        if len(prefix) < self._prefix_bytes:
            raise StoreError("expected to list one collection of one tenant")
        outer = self.prefix_of(prefix)
        async for entry in self._part(prefix).list(self._cut(prefix)):
            yield self._outer(outer, entry)

    async def stats(self) -> Stats:
        return Stats()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _part(self, key: bytes) -> HttpStore:
        return self._parts[self.prefix_of(key)]

    def _cut(self, key: bytes) -> bytes:
        return key[self._prefix_bytes :]

    def _inner(self, entry: Entry) -> Entry:
        parent = entry.hints.parent
        cut = parent and self._cut(parent)
        return replace(entry, key=self._cut(entry.key), hints=replace(entry.hints, parent=cut))

    def _outer(self, prefix: bytes, entry: Entry) -> Entry:
        parent = entry.hints.parent
        if len(entry.key) > MAX_KEY_BYTES or len(parent or b"") > MAX_KEY_BYTES:
            raise LimitError(f"expected keys of {MAX_KEY_BYTES} bytes, found {entry.key.hex()}")
        whole = None if parent is None else prefix + parent
        return replace(entry, key=prefix + entry.key, hints=replace(entry.hints, parent=whole))
