"""The stores of a node, by its settings: RAM over disk, over another node if there is one.

Each tenant has its share of RAM and disk, by weight, and what others leave of theirs. Chunks that
the newest version of a name uses are held on disk, as far as they fit into their tenant's share:
eviction takes what nobody named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kdn.config import NodeSettings
from kdn.errors import UnsupportedError
from kdn.node.names import NameStore
from kdn.node.tenants import Tenant
from kdn.node.turns import Work
from kdn.store.base import Store
from kdn.store.disk import open_disk
from kdn.store.evict import Owners, Retention, open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import Tier, TieredStore

MEMORY_DEADLINE_S = 1.0
DISK_DEADLINE_S = 30.0
UPSTREAM_DEADLINE_S = 20.0


@dataclass
class Retainer:
    """Tells a disk's eviction policy what names use."""

    policies: list[Retention] = field(default_factory=list)

    async def retain(self, tenant: Tenant, name: str, chunks: Iterable[bytes], work: Work) -> None:
        """`name` now uses these chunks; none to forget it."""
        for policy in self.policies:
            steps = policy.retaining(tenant.prefix + name.encode(), _keys(tenant, chunks))
            try:
                for _ in steps:
                    if work.is_over:
                        await work.rest()
            finally:  # all of them, even if nobody waits for it any more
                for _ in steps:
                    pass

    async def retain_all(self, tenants: Iterable[Tenant], names: NameStore) -> None:
        """Everything that is named, at start."""
        if self.policies:
            for tenant in tenants:
                async for name, chunks in names.newest_chunks(tenant.name):
                    for policy in self.policies:
                        policy.retain(tenant.prefix + name.encode(), _keys(tenant, chunks))


def _keys(tenant: Tenant, chunks: Iterable[bytes]) -> list[bytes]:
    return [tenant.store_key("chunks", chunk) for chunk in chunks]


async def open_store(settings: NodeSettings, disk_policy: Retention, owners: Owners) -> Store:
    """All tiers in one. `disk_policy` may already hold keys: opening evicts nothing of them, as far
    as they fit."""
    tiers = []
    if settings.memory_bytes:
        memory = MemoryStore(settings.memory_bytes, open_policy(settings.policy, owners=owners))
        tiers.append(Tier("memory", memory, MEMORY_DEADLINE_S))
    if settings.upstream:
        tiers.append(Tier("upstream", _open_upstream(settings), UPSTREAM_DEADLINE_S))
    if settings.disk_bytes:
        disk = await open_disk(
            settings.data / "objects", settings.disk_bytes, disk_policy, deadline_s=DISK_DEADLINE_S
        )
        tiers.insert(1 if settings.memory_bytes else 0, Tier("disk", disk, DISK_DEADLINE_S))
    if not tiers:
        raise UnsupportedError("memory_bytes and disk_bytes are both 0: nowhere to keep bytes")
    return TieredStore(tiers) if len(tiers) > 1 else tiers[0].store


def _open_upstream(settings: NodeSettings) -> Store:
    from kdn.store.http import HttpStore
    from kdn.store.node_client import NodeClient
    from kdn.store.tls import client_tls

    own = settings.upstream_credentials
    return HttpStore(NodeClient(settings.upstream, token=own.token, tls=client_tls(own.tls_ca)))
