"""Names: mutable, versioned pointers to manifests. What every store of names does.

Every update is one transaction: after a crash a name has its old version or its new one, and an
acknowledged one is never lost. All operations of one store, from however many processes, are
linearizable: a read that begins after an update was acknowledged sees it.

Versions are forgotten from the oldest on. So of every chunk that a name uses it is enough to know
the last version that uses it, however many do.

Every change of any name has a number of the store, its sequence: ascending, no two changes share
one. A new store begins at the time (in microseconds), so a store that was lost and begun anew has
no number of the old one. The last `MAX_CHANGES` changes or so are known. To follow a store: read
`sequence`, list all names, then ask for the `changes` after it, again and again; on ForgottenError
begin anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

from kdn.errors import ForgottenError
from kdn.store.tally import Usage

MAX_VERSIONS = 100
UNCHANGED = 1
MAX_CHANGES = 10_000
"""Changes that a reader of the feed may fall behind before it has to list all names."""
Must = Callable[[str | None], bool]
"""Whether an update may happen, given the newest version's etag (None: there is no version)."""


@dataclass(frozen=True)
class Version:
    """One version of a name, without its manifest."""

    name: str
    version: int
    etag: str
    created_s: float
    size_bytes: int


@dataclass(frozen=True)
class Totals:
    """What a tenant's names are, all versions together; or what they may be at most."""

    names: int
    size_bytes: int
    chunks: int
    """Each counted once for every name that uses it."""


@dataclass(frozen=True)
class Change:
    """A name's newest version became this one; or, without an etag, the name was deleted (`version`
    is the last it had)."""

    sequence: int
    tenant: str
    name: str
    version: int
    etag: str | None


@dataclass(frozen=True)
class Asked:
    """How new an answer about a name must be. It matters where names are copies (`region/`)."""

    latest: bool = False
    """Not older than any update that was acknowledged before the question."""
    stale_ok: bool = False
    """If that cannot be known now: any answer, that says how old it may be."""
    seen: int = 0
    """Not older than this sequence, of which the one who asks has heard."""


@dataclass(frozen=True)
class Told:
    """An answer about a name."""

    about: Version | None
    sequence: int
    """Of the tenant's names. No answer of this sequence or a later one is older."""
    stale_s: float | None = None
    """None: it is as new as was asked for. A number: it may be older, by so many seconds."""


@dataclass(frozen=True)
class FeedReport:
    """How far a copy of a tenant's names has followed them."""

    position: int
    """The sequence of the last change it heard of."""
    age_s: float
    """How long ago all that it knows was all there was; infinite while nobody can tell."""


class NameStore(ABC):
    """All tenants' names. Methods may be called from many tasks of one event loop."""

    async def read(
        self, tenant: str, name: str, version: int | None = None, asked: Asked | None = None
    ) -> Told:
        """The newest version, or that one, as new as asked for."""
        about = await self.find(tenant, name, version)
        return Told(about, await self.last_change(tenant))

    @abstractmethod
    async def find(self, tenant: str, name: str, version: int | None = None) -> Version | None:
        """The newest version, or that one."""

    @abstractmethod
    async def manifest(self, tenant: str, about: Version) -> bytes | None:
        """Of that version; None if it is gone meanwhile."""

    async def get(
        self, tenant: str, name: str, version: int | None = None
    ) -> tuple[Version, bytes] | None:
        """The newest version, or that one, and its manifest."""
        while (about := await self.find(tenant, name, version)) is not None:
            if (manifest := await self.manifest(tenant, about)) is not None:
                return about, manifest
        return None

    @abstractmethod
    async def put(
        self,
        tenant: str,
        name: str,
        manifest: bytes,
        chunks: Iterable[bytes],
        must: Must,
        most: Totals | None = None,
    ) -> Version:
        """Make the next version. ConditionError if `must` does not hold of the newest, QuotaError
        if the tenant would have more than `most`; old versions of the name give way first. `must`
        may be asked several times, and about several etags, before one is updated."""

    @abstractmethod
    async def delete(self, tenant: str, name: str, must: Must) -> bool:
        """Forget a name and all its versions; False if there is none."""

    @abstractmethod
    async def history(self, tenant: str, name: str) -> list[Version]:
        """Newest first."""

    @abstractmethod
    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        """Newest versions of the names that begin so and come after that one, in order."""

    @abstractmethod
    async def chunks_of(self, tenant: str, name: str) -> tuple[list[bytes], list[bytes]]:
        """Chunks that any version of it uses: (by this name only, by others as well)."""

    @abstractmethod
    def newest_chunks(self, tenant: str) -> AsyncIterator[tuple[str, list[bytes]]]:
        """Names and the chunks that the newest version of each uses, one name at a time."""

    @abstractmethod
    async def totals(self, tenant: str) -> Totals:
        """What the tenant has."""

    async def known(self, tenant: str) -> Totals:
        """What the tenant has, as far as this store knows: for people, not for limits."""
        return await self.totals(tenant)

    async def num_versions(self, tenant: str) -> int | None:
        """Versions of all names of a tenant; None where counting them would take too long."""
        return None

    @abstractmethod
    async def sequence(self) -> int:
        """Of the last change there was, of any tenant."""

    @abstractmethod
    async def last_change(self, tenant: str) -> int:
        """The sequence of the last change of this tenant's names; `UNCHANGED` if there was none.
        What tenants are told: that of all changes would tell them of each other."""

    @abstractmethod
    async def changes(self, after: int, limit: int) -> list[Change]:
        """The first changes after that sequence, of all tenants, in order; none if it is the last.
        ForgottenError if some of them are no longer known, or if the store never came that far."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Nothing may be called afterwards."""


class SharedNames(NameStore):
    """Names in a store that many nodes share, and what else they must agree on: how much each
    tenant holds, and what no cache may keep."""

    recount_s: float
    """How often tenants' objects are counted anew: what is evicted is not told, and lists cost."""

    @abstractmethod
    async def count(self, tenant: str, more: Usage) -> Usage:
        """The tenant has so many more objects (or fewer), which take so much more. What it has now,
        as all nodes counted it, never below 0; manifests are among the bytes."""

    @abstractmethod
    async def begin_recount(self, tenant: str, every_s: float) -> bool:
        """True for one caller in that time, who then counts the tenant's objects anew."""

    @abstractmethod
    async def remove(self, keys: Sequence[bytes]) -> None:
        """These objects were deleted (by their store keys): caches that follow let go of them."""

    @abstractmethod
    async def removed(self, after: int) -> tuple[int, list[bytes] | None]:
        """A sequence, and the objects that were removed between that one and this one; None if that
        is no longer known: anything may have been."""


def make_version(name: str, version: int, created_s: float, manifest: bytes) -> Version:
    """The etag covers version and time, so going back to old contents is a new etag."""
    digest = blake2b(manifest, digest_size=16, salt=version.to_bytes(16, "little"))
    digest.update(repr(created_s).encode())
    return Version(name, version, digest.hexdigest(), created_s, len(manifest))


def beyond(found: Totals, most: Totals) -> str:
    """What there is too much of, in words; empty if nothing is."""
    for field in fields(Totals):
        have, limit = getattr(found, field.name), getattr(most, field.name)
        if have > limit:
            return f"{field.name} of all names: {have} would be more than {limit}"
    return ""


def check_known(after: int, first: int, last: int) -> None:
    """Of a store that knows the changes (first, last]."""
    if not first <= after <= last:
        raise ForgottenError(f"expected a sequence from {first} to {last}, found {after}")
