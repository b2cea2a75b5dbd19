"""The stores of a depot, by its settings: RAM over disk, or both over a store that many share.

Each tenant has its share of RAM and disk, by weight, and what others leave of theirs.
"""

from __future__ import annotations

from kdn.checked import shown
from kdn.config import DepotSettings
from kdn.errors import UnsupportedError
from kdn.store.base import Store
from kdn.store.disk import open_disk
from kdn.store.evict import Owners, Retention, open_policy
from kdn.store.memory import MemoryStore
from kdn.store.opening import is_store_url, open_remote
from kdn.store.shared import SharedStore
from kdn.store.tiered import Tier, TieredStore

MEMORY_DEADLINE_S = 1.0
DISK_DEADLINE_S = 30.0
SHARED_SHARE = 0.8
"""Of the time of an operation: what a shared store says is told in the rest."""


async def open_store(settings: DepotSettings, disk_policy: Retention, owners: Owners) -> Store:
    """All tiers in one. `disk_policy` may already hold keys: opening evicts nothing of them, as far
    as they fit. Where it cuts no objects, memory cuts none, either."""
    tiers = []
    if settings.memory_bytes:
        policy = open_policy(settings.policy, owners=owners, may_cut=disk_policy.may_cut)
        memory = MemoryStore(settings.memory_bytes, policy)
        tiers.append(Tier("memory", memory, MEMORY_DEADLINE_S))
    if settings.disk_bytes:
        disk = await open_disk(
            settings.data / "objects", settings.disk_bytes, disk_policy, deadline_s=DISK_DEADLINE_S
        )
        tiers.append(Tier("disk", disk, DISK_DEADLINE_S))
    if not tiers:
        raise UnsupportedError("memory_bytes and disk_bytes are both 0: nowhere to keep bytes")
    return TieredStore(tiers) if len(tiers) > 1 else tiers[0].store


async def open_shared_store(settings: DepotSettings, owners: Owners) -> Store:
    """The one at `settings.store`, behind caches if they are given memory or disk."""
    if not is_store_url(settings.store):
        scheme = settings.store.partition("://")[0]
        raise UnsupportedError(
            f"store: expected redis://, s3:// and the like, found {shown(scheme)}"
        )
    caches = []
    if settings.memory_bytes:
        policy = open_policy(settings.policy, owners=owners, may_cut=False)
        memory = MemoryStore(settings.memory_bytes, policy)
        caches.append(Tier("memory", memory, MEMORY_DEADLINE_S))
    if settings.disk_bytes:
        policy = open_policy(settings.policy, owners=owners, may_cut=False)
        folder = settings.data / "cache"  # not `objects`: those are a depot's own, and not to lose
        disk = await open_disk(folder, settings.disk_bytes, policy, deadline_s=DISK_DEADLINE_S)
        caches.append(Tier("disk", disk, DISK_DEADLINE_S))
    remote = open_remote(settings.store, settings.store_credentials)
    deadline_s = SHARED_SHARE * settings.store_timeout_s
    return SharedStore(caches, Tier("store", remote, deadline_s)) if caches else remote
