"""All names of a store in memory, as the entries of a log made them: pure, no input or output.

Whoever applies the same entries in the same order has the same state. An entry says what happened,
not what was asked for: what an update forgets is decided once, by its writer, and written down.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from kdn.depot.names import MAX_VERSIONS, UNCHANGED, Change, Totals, Version, beyond, check_known
from kdn.errors import FormatError, QuotaError

MAX_REMOVED, MAX_REMOVED_KEPT = 1 << 16, 1 << 12
"""Keys of deleted objects that are remembered, for caches that follow; and that are kept for those
who come later."""


@dataclass(frozen=True)
class Put:
    """The next version of a name; versions up to `forget` are gone."""

    tenant: str
    name: str
    version: int
    etag: str
    created_s: float
    size_bytes: int
    body: str
    """Where its manifest is."""
    chunks: tuple[bytes, ...]
    forget: int


@dataclass(frozen=True)
class Delete:
    tenant: str
    name: str
    version: int


@dataclass(frozen=True)
class Count:
    """A tenant has so many more objects, or fewer, which take so much more."""

    tenant: str
    more_objects: int
    more_bytes: int
    recounted_s: float = 0.0
    """If not 0: somebody begins to count them anew, at that time."""


@dataclass(frozen=True)
class Removed:
    """Objects were deleted, by their store keys: no cache may keep them."""

    keys: tuple[bytes, ...]


Happening = Put | Delete | Count | Removed
_KINDS: dict[str, type[Happening]] = {
    "put": Put, "delete": Delete, "count": Count, "removed": Removed
}  # fmt: skip

_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (float, int)}


def told(happening: Happening) -> dict[str, Any]:
    """For JSON."""
    [kind] = [name for name, one in _KINDS.items() if isinstance(happening, one)]
    values = asdict(happening)
    for keys in ("chunks", "keys"):
        if keys in values:
            values[keys] = [key.hex() for key in values[keys]]
    return {"kind": kind, **values}


def parse_happening(values: dict[str, Any]) -> Happening:
    """As `told` wrote it."""
    try:
        values = dict(values)
        kind = _KINDS[values.pop("kind")]
        for keys in ("chunks", "keys"):
            if keys in values:
                values[keys] = tuple(bytes.fromhex(key) for key in values[keys])
        happening = kind(**values)
        for name, one in kind.__dataclass_fields__.items():
            expected = _TYPES.get(str(one.type), object)
            if not isinstance(getattr(happening, name), expected):
                raise ValueError(name)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"expected an entry of the log of names: {error!r}") from error
    return happening


@dataclass
class Held:
    """One version of a name."""

    version: int
    etag: str
    created_s: float
    size_bytes: int
    body: str


@dataclass
class Record:
    """One name: its versions, the oldest first, and the last version that uses each chunk."""

    versions: list[Held] = field(default_factory=list)
    uses: dict[bytes, int] = field(default_factory=dict)

    def find(self, version: int | None) -> Held | None:
        if version is None:
            return self.versions[-1]
        at = bisect_left(self.versions, version, key=lambda held: held.version)
        found = self.versions[at] if at < len(self.versions) else None
        return found if found and found.version == version else None


@dataclass
class TenantState:
    names: dict[str, Record] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """All names, sorted."""
    users: Counter[bytes] = field(default_factory=Counter)
    """How many names use each chunk."""
    size_bytes: int = 0
    num_uses: int = 0
    num_objects: int = 0
    objects_bytes: int = 0
    """As all nodes counted them."""
    recounted_s: float = 0.0
    changed: int = UNCHANGED
    """The sequence of the last change of a name."""

    @property
    def totals(self) -> Totals:
        return Totals(len(self.names), self.size_bytes, self.num_uses)

    def put(self, put: Put) -> list[str]:
        record = self.names.get(put.name)
        if record is None:
            record = self.names[put.name] = Record()
            insort(self.order, put.name)
        record.versions.append(Held(put.version, put.etag, put.created_s, put.size_bytes, put.body))
        self.size_bytes += put.size_bytes
        new = [chunk for chunk in put.chunks if chunk not in record.uses]
        self.users.update(new)
        self.num_uses += len(new)
        record.uses.update(dict.fromkeys(put.chunks, put.version))
        return self._forget(record, put.forget)

    def delete(self, name: str) -> list[str]:
        record = self.names.pop(name, None)
        if record is None:
            return []
        del self.order[bisect_left(self.order, name)]
        return self._forget(record, record.versions[-1].version)

    def _forget(self, record: Record, up_to_version: int) -> list[str]:
        """Bodies that nobody needs any more."""
        num = bisect_right(record.versions, up_to_version, key=lambda held: held.version)
        if not num:
            return []
        gone, record.versions = record.versions[:num], record.versions[num:]
        self.size_bytes -= sum(held.size_bytes for held in gone)
        unused = [chunk for chunk, last in record.uses.items() if last <= up_to_version]
        for chunk in unused:
            del record.uses[chunk]
            self.users[chunk] -= 1
            if not self.users[chunk]:
                del self.users[chunk]
        self.num_uses -= len(unused)
        return [held.body for held in gone]


class NameState:
    def __init__(self, sequence: int) -> None:
        """Empty, at that sequence."""
        self.sequence = sequence
        self.first = sequence
        """The changes (first, sequence] are known."""
        self.changes: deque[Change] = deque()
        self.tenants: dict[str, TenantState] = {}
        self.removed_first = sequence
        self.removed: deque[tuple[int, bytes]] = deque()
        """Deleted objects of (removed_first, sequence]."""

    def tenant(self, name: str) -> TenantState:
        """Not kept if it is new: who only asks leaves nothing behind."""
        return self.tenants.get(name) or TenantState()

    def record(self, tenant: str, name: str) -> Record | None:
        return self.tenant(tenant).names.get(name)

    def newest(self, tenant: str, name: str) -> Version | None:
        record = self.record(tenant, name)
        return version_of(name, record.versions[-1]) if record else None

    def apply(self, happening: Happening, max_changes: int) -> list[str]:
        """The next of the log. Bodies of manifests that nobody needs any more."""
        self.sequence += 1
        if isinstance(happening, Removed):
            self._remove(happening.keys)
            return []
        tenant = self.tenants.setdefault(happening.tenant, TenantState())
        if isinstance(happening, Count):
            tenant.num_objects = max(0, tenant.num_objects + happening.more_objects)
            tenant.objects_bytes = max(0, tenant.objects_bytes + happening.more_bytes)
            tenant.recounted_s = happening.recounted_s or tenant.recounted_s
            return []
        etag = happening.etag if isinstance(happening, Put) else None
        tenant.changed = self.sequence
        self.changes.append(
            Change(self.sequence, happening.tenant, happening.name, happening.version, etag)
        )
        while len(self.changes) > max_changes:
            self.first = self.changes.popleft().sequence
        if isinstance(happening, Put):
            return tenant.put(happening)
        return tenant.delete(happening.name)

    def _remove(self, keys: Collection[bytes]) -> None:
        self.removed.extend((self.sequence, key) for key in keys)
        while len(self.removed) > MAX_REMOVED:
            self.removed_first, _ = self.removed.popleft()

    def changes_after(self, after: int, limit: int) -> list[Change]:
        check_known(after, self.first, self.sequence)
        at = bisect_right(self.changes, after, key=lambda change: change.sequence)
        return [self.changes[i] for i in range(at, min(at + limit, len(self.changes)))]

    def removed_after(self, after: int) -> list[bytes] | None:
        """None if nobody knows any more."""
        if not self.removed_first <= after <= self.sequence:
            return None
        at = bisect_right(self.removed, after, key=lambda one: one[0])
        return [self.removed[i][1] for i in range(at, len(self.removed))]

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        removed = list(self.removed)[-MAX_REMOVED_KEPT:]
        left_out = len(self.removed) - len(removed)
        return {
            "sequence": self.sequence,
            "first": self.first,
            "removed_first": self.removed[left_out - 1][0] if left_out else self.removed_first,
            "removed": [(sequence, key.hex()) for sequence, key in removed],
            "changes": [astuple(change) for change in self.changes],
            "tenants": {name: _dump_tenant(tenant) for name, tenant in self.tenants.items()},
        }

    @classmethod
    def parse(cls, values: dict[str, Any]) -> NameState:
        """As `dump` wrote it."""
        try:
            state = cls(values["sequence"])
            state.first = values["first"]
            state.changes.extend(Change(*change) for change in values["changes"])
            state.removed_first = values["removed_first"]
            removed = values["removed"]
            state.removed.extend((sequence, bytes.fromhex(key)) for sequence, key in removed)
            state.tenants = {name: _parse_tenant(one) for name, one in values["tenants"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"expected the state of names: {error!r}") from error
        return state


def version_of(name: str, held: Held) -> Version:
    return Version(name, held.version, held.etag, held.created_s, held.size_bytes)


def forgotten_for(
    tenant: TenantState, made: Version, chunks: Collection[bytes], most: Totals | None
) -> int:
    """Up to which version a name must forget for `made` to be its newest: no more than
    `MAX_VERSIONS` stay, and no more than `most` allows. QuotaError if that is not enough."""
    forget = made.version - MAX_VERSIONS
    if most is None:
        return forget
    record = tenant.names.get(made.name) or Record()
    new = set(chunks)
    last = Counter(version for chunk, version in record.uses.items() if chunk not in new)
    names = len(tenant.names) + (made.name not in tenant.names)
    size_bytes = tenant.size_bytes + made.size_bytes
    uses = tenant.num_uses + len(new) - sum(chunk in record.uses for chunk in new)
    oldest_first: Iterator[Held] = iter(record.versions)
    while found := beyond(Totals(names, size_bytes, uses), most):
        oldest = next(oldest_first, None)
        if oldest is None:
            raise QuotaError(found)
        size_bytes -= oldest.size_bytes
        uses -= last[oldest.version]
        forget = max(forget, oldest.version)
    return forget


def _dump_tenant(tenant: TenantState) -> dict[str, Any]:
    return {
        "num_objects": tenant.num_objects,
        "objects_bytes": tenant.objects_bytes,
        "recounted_s": tenant.recounted_s,
        "changed": tenant.changed,
        "names": {
            name: {
                "versions": [astuple(held) for held in record.versions],
                "uses": {chunk.hex(): last for chunk, last in record.uses.items()},
            }
            for name, record in tenant.names.items()
        },
    }


def _parse_tenant(values: dict[str, Any]) -> TenantState:
    tenant = TenantState(
        num_objects=values["num_objects"],
        objects_bytes=values["objects_bytes"],
        recounted_s=values["recounted_s"],
        changed=values["changed"],
    )
    for name, told_record in values["names"].items():
        versions = [Held(*held) for held in told_record["versions"]]
        uses = {bytes.fromhex(chunk): last for chunk, last in told_record["uses"].items()}
        tenant.names[name] = Record(versions, uses)
        tenant.size_bytes += sum(held.size_bytes for held in versions)
        tenant.num_uses += len(uses)
        tenant.users.update(uses.keys())
    tenant.order = sorted(tenant.names)
    return tenant
