"""A part of a depot as a store, for whoever uses it without a node: what is deleted or replaced
through it is told to all who share the depot's store."""

from __future__ import annotations

from kdn.depot.depot import Depot
from kdn.store.base import Entry
from kdn.store.part import PartStore


class DepotPart(PartStore):
    def __init__(self, depot: Depot, prefix: bytes) -> None:
        super().__init__(depot.store, prefix)
        self._depot = depot

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        kept = await super().put_entry(entry, data, checksum, replacing)
        if replacing is not None:
            await self._depot.tell_removed([self._prefix + entry.key])
        return kept

    async def delete(self, key: bytes) -> bool:
        return await self._depot.delete(self._prefix + key)
