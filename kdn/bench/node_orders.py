"""Orders of egress that `kdn bench node` compares the fair one with, and a node that sends by one.

`python -m kdn.bench.node_orders fifo` is `kdn node`, with the settings that the environment gives,
but for the order in which its frames go out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from random import Random

from kdn.config import load_config
from kdn.node.scheduler import Queue, Ticket
from kdn.node.server import run


class FifoQueue(Queue):
    """In the order of asking."""

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()

    def push(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def pop(self) -> Ticket:
        return self._waiting.popleft()

    def remove(self, ticket: Ticket) -> None:
        self._waiting.remove(ticket)

    def __len__(self) -> int:
        return len(self._waiting)


class InverseQueue(Queue):
    """A client at random, with a chance in inverse proportion to the number of its tickets that
    wait; its oldest ticket. Clients with few pending requests are favoured, but one unlucky draw
    after another may pass over anyone."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._clients: dict[tuple[str, str], deque[Ticket]] = {}
        self._length = 0

    def push(self, ticket: Ticket) -> None:
        self._clients.setdefault((ticket.tenant, ticket.client), deque()).append(ticket)
        self._length += 1

    def pop(self) -> Ticket:
        if not self._length:
            raise IndexError("nobody waits")
        clients = list(self._clients)
        chances = [1 / len(waiting) for waiting in self._clients.values()]
        (client,) = self._rng.choices(clients, chances)
        ticket = self._clients[client][0]
        self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        client = (ticket.tenant, ticket.client)
        waiting = self._clients.get(client, deque())
        waiting.remove(ticket)
        self._length -= 1
        if not waiting:
            del self._clients[client]

    def __len__(self) -> int:
        return self._length


RIVALS: dict[str, Callable[[], Queue]] = {
    "fifo": FifoQueue,
    "inverse": lambda: InverseQueue(Random()),
}
ORDERS = ("fair", *RIVALS)


def main(order: str) -> None:
    run(load_config(), RIVALS[order]())


if __name__ == "__main__":
    main(*sys.argv[1:])
