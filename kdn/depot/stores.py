"""The stores of a data folder, by its settings: RAM over disk.

Each tenant has its share of RAM and disk, by weight, and what others leave of theirs.
"""

from __future__ import annotations

from kdn.config import DepotSettings
from kdn.errors import UnsupportedError
from kdn.store.base import Store
from kdn.store.disk import open_disk
from kdn.store.evict import Owners, Retention, open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import Tier, TieredStore

MEMORY_DEADLINE_S = 1.0
DISK_DEADLINE_S = 30.0


async def open_store(settings: DepotSettings, disk_policy: Retention, owners: Owners) -> Store:
    """All tiers in one. `disk_policy` may already hold keys: opening evicts nothing of them, as far
    as they fit."""
    tiers = []
    if settings.memory_bytes:
        memory = MemoryStore(settings.memory_bytes, open_policy(settings.policy, owners=owners))
        tiers.append(Tier("memory", memory, MEMORY_DEADLINE_S))
    if settings.disk_bytes:
        disk = await open_disk(
            settings.data / "objects", settings.disk_bytes, disk_policy, deadline_s=DISK_DEADLINE_S
        )
        tiers.append(Tier("disk", disk, DISK_DEADLINE_S))
    if not tiers:
        raise UnsupportedError("memory_bytes and disk_bytes are both 0: nowhere to keep bytes")
    return TieredStore(tiers) if len(tiers) > 1 else tiers[0].store
