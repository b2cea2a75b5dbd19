"""Whose frame goes out next. Pure: no I/O; the order follows from what was asked and when, alone.

`FairQueue` is start-time fair queueing (Goyal, Vin and Cheng, 1996) in two levels: among tenants by
weight, then among a tenant's clients, by bytes. Every flow (a tenant, or a client within its
tenant) has a start tag: the bytes it was sent, divided by its weight, counted from the virtual time
at which it woke. The lowest start tag is served, and the virtual time is the start tag last served.
So:

- While two flows both have frames waiting, what they were sent (by weight) differs by at most one
  frame of each.
- A flow that slept starts at the virtual time, before those that were sent more: a light client
  waits for at most one frame of each heavy one, however much those have queued.
- A flow's tag stands still while it waits and all others' rise: nobody starves.

A start tag does not depend on a frame's length, so the two levels need not know of each other's
choice. `kdn bench node` compares it with other orders of service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

MAX_FLOWS = 1024
"""Flows that one level tells apart; those beyond it share one, so that inventing client names buys
no more than this, neither of memory nor of the link."""

F = TypeVar("F", bound="_Flow")


class Ticket:
    """One frame that waits for its turn. Equal only to itself."""

    __slots__ = ("client", "flows", "num_bytes", "queued_s", "tenant")

    def __init__(self, tenant: str, client: str, num_bytes: int, queued_s: float = 0.0):
        self.tenant = tenant
        self.client = client
        self.num_bytes = num_bytes
        self.queued_s = queued_s
        self.flows: tuple[_Tenant, _Client] | None = None  # where a FairQueue keeps it


class Queue(ABC):
    """An order of service. Its length is the number of tickets that wait."""

    @abstractmethod
    def push(self, ticket: Ticket) -> None:
        """Let a ticket wait."""

    @abstractmethod
    def pop(self) -> Ticket:
        """Whose turn it is: it waits no longer, and its bytes count as sent. IndexError if nobody
        waits."""

    @abstractmethod
    def remove(self, ticket: Ticket) -> None:
        """Forget one that waits: nothing counts as sent. ValueError if it does not wait."""

    @abstractmethod
    def __len__(self) -> int: ...

    def pass_by(self, ticket: Ticket) -> None:
        """Count a frame that goes out at once because nobody waits."""
        assert not len(self)
        self.push(ticket)
        self.pop()


class FairQueue(Queue):
    """Start-time fair queueing among tenants by weight (1 unless told), then among clients."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0:
                raise ValueError(f"weight of tenant {tenant}: expected more than 0, found {weight}")
        self._tenants = _Level(_Tenant)
        self._length = 0

    def push(self, ticket: Ticket) -> None:
        tenant = self._tenants.wake(ticket.tenant)
        client = tenant.clients.wake(ticket.client)
        client.tickets.append(ticket)
        client.waiting += 1
        tenant.waiting += 1
        ticket.flows = (tenant, client)
        self._length += 1

    def pop(self) -> Ticket:
        if not self._length:
            raise IndexError("nobody waits")
        tenant = self._tenants.first()
        client = tenant.clients.first()
        ticket = client.tickets.popleft()
        self._forget(ticket)
        # Not less than a byte: a tag that stands still would be served for ever.
        cost = max(ticket.num_bytes, 1)
        tenant.clients.serve(client, cost)
        self._tenants.serve(tenant, cost / self._weights.get(ticket.tenant, 1.0))
        return ticket

    def remove(self, ticket: Ticket) -> None:
        if ticket.flows is None:
            raise ValueError("this ticket does not wait")
        ticket.flows[1].tickets.remove(ticket)
        self._forget(ticket)

    def __len__(self) -> int:
        return self._length

    def _forget(self, ticket: Ticket) -> None:
        assert ticket.flows is not None
        for flow in ticket.flows:
            flow.waiting -= 1
        ticket.flows = None
        self._length -= 1


class _Flow:
    """One sender of a level. `tag`: the start tag of its next frame. `awake`: it is in its level's
    heap, though perhaps all its tickets were removed since."""

    __slots__ = ("awake", "name", "tag", "waiting")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.tag = 0.0
        self.awake = False
        self.waiting = 0


class _Client(_Flow):
    __slots__ = ("tickets",)

    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self.tickets: deque[Ticket] = deque()


class _Tenant(_Flow):
    __slots__ = ("clients",)

    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self.clients = _Level(_Client)


class _Level(Generic[F]):
    """The flows among which one choice is made."""

    def __init__(self, make: Callable[[str | None], F]) -> None:
        self._make = make
        self._virtual = 0.0
        self._order = count()
        # (start tag, 0 if it just woke, order of arrival, flow): of equals the light one is first.
        self._heap: list[tuple[float, int, int, F]] = []
        self._flows: dict[str | None, F] = {}
        # Flows that sleep with a tag beyond the virtual time (were it not, they could be forgotten
        # without a loss), roughly by tag.
        self._asleep: OrderedDict[str | None, F] = OrderedDict()

    def wake(self, name: str) -> F:
        """The flow of this name, which is about to have a ticket."""
        flow = self._flows.get(name) or self._new(name)
        if not flow.awake:
            flow.awake = True
            self._asleep.pop(flow.name, None)
            flow.tag = max(flow.tag, self._virtual)
            heappush(self._heap, (flow.tag, 0, next(self._order), flow))
        return flow

    def first(self) -> F:
        """The flow to serve; IndexError if none has a ticket."""
        while not (flow := self._heap[0][-1]).waiting:
            heappop(self._heap)
            self._sleep(flow)
        return flow

    def serve(self, flow: F, cost: float) -> None:
        """Count what the first flow was just sent."""
        assert flow is self._heap[0][-1]
        self._virtual = flow.tag
        flow.tag += cost
        if flow.waiting:
            heapreplace(self._heap, (flow.tag, 1, next(self._order), flow))
        else:
            heappop(self._heap)
            self._sleep(flow)

    def _sleep(self, flow: F) -> None:
        flow.awake = False
        self._asleep[flow.name] = flow

    def _new(self, name: str | None) -> F:
        while self._asleep and next(iter(self._asleep.values())).tag <= self._virtual:
            forgotten, _ = self._asleep.popitem(last=False)
            del self._flows[forgotten]
        if len(self._flows) >= MAX_FLOWS:
            name = None
        return self._flows.get(name) or self._flows.setdefault(name, self._make(name))
