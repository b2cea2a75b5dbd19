"""What tenants hold of a node that has several processes, counted in memory that all of them see.

Each process writes a row of its own and reads all. So nothing is locked, and the row of one that
died is simply set to zero. Two processes that count at the same moment may each take the last
place: a bound can be passed by as many as there are processes less one, never by more.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

from kdn.node.shares import Shares

_NUMBER_BYTES = 8
OPEN = "open connections"
"""The column of all of them, strangers' too."""


class Ledger:
    """Made before the processes are, which inherit it. `columns`: what is counted."""

    def __init__(self, num_rows: int, columns: Sequence[str]):
        self._columns = {name: number for number, name in enumerate(columns)}
        self._width = len(columns)
        memory = mmap.mmap(-1, num_rows * self._width * _NUMBER_BYTES)  # shared by those who fork
        self._counts = memoryview(memory).cast("q")
        self._row = 0

    def begin_row(self, row: int) -> None:
        """From now on this process counts in that row, whose last user is gone."""
        self._row = row * self._width
        self._counts[self._row : self._row + self._width] = memoryview(
            bytes(self._width * _NUMBER_BYTES)
        ).cast("q")

    def add(self, column: str, amount: int) -> None:
        self._counts[self._row + self._columns[column]] += amount

    def total(self, column: str) -> int:
        return sum(self._counts[self._columns[column] :: self._width])

    def own(self, column: str) -> int:
        """Of this process alone."""
        return self._counts[self._row + self._columns[column]]


class LedgerShares(Shares):
    """Shares of what all processes of a node have together."""

    def __init__(self, ledger: Ledger, what: str, total: int, caps: Mapping[str, int]):
        super().__init__(total, caps)
        self._ledger = ledger
        self._names = {tenant: column(what, tenant) for tenant in caps}

    def held(self, tenant: str) -> int:
        return self._ledger.total(self._names[tenant])

    def held_here(self, tenant: str) -> int:
        return self._ledger.own(self._names[tenant])

    def take(self, tenant: str, amount: int, *, common: bool = True) -> bool:
        held = self.held(tenant)
        wanted = self._beyond_own(held + amount) - self._beyond_own(held)
        if held + amount > self.most(tenant) or (wanted and wanted > self._free(common)):
            return False
        self._ledger.add(self._names[tenant], amount)
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        held = self.held_here(tenant)
        assert amount <= held, f"{tenant} holds {held} here, not {amount}"
        self._ledger.add(self._names[tenant], -amount)

    def _free(self, common: bool) -> int:
        """What is left of the common part."""
        if not common:
            return 0
        return self._common - sum(self._beyond_own(self.held(tenant)) for tenant in self._names)


def column(what: str, tenant: str) -> str:
    return f"{what} of {tenant}"
