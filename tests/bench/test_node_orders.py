"""The orders that the fair one is compared with. What holds of every order of service is tested in
`tests/node/test_scheduler.py`."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from kdn.bench.node_load import check_all
from kdn.bench.node_orders import RIVALS, FifoQueue, InverseQueue
from kdn.bench.node_servers import make_objects, start_kdn
from kdn.config import ClientSettings, Config, NodeSettings
from kdn.node.scheduler import Ticket
from kdn.node.server import make_egress
from tests.node.test_scheduler import Ask, order, play


def test_fifo_keeps_the_order_of_asking() -> None:
    done = play(FifoQueue(), Ask(0, "a", 10, frames=3), Ask(1, "b", 5))
    assert done == [("a", 10), ("a", 20), ("a", 30), ("b", 35)]


def test_first_in_first_out_keeps_a_light_client_waiting_for_all() -> None:
    heavy = [Ask(0, client, 10, frames=64) for client in "abcd"]
    assert play(FifoQueue(), *heavy, Ask(1005, "l", 10))[-1] == ("l", 4 * 64 * 10 + 10)


def test_inverse_favours_short_queues_by_their_inverse() -> None:
    rng, won = Random(1), Counter[str]()
    for _ in range(4000):
        queue = InverseQueue(rng)
        for _ in range(9):
            queue.push(Ticket("t", "heavy", 10))
        queue.push(Ticket("t", "light", 10))
        won[queue.pop().client] += 1
    # 1 / (1 + 1/9) of the draws; four standard deviations of 4000 of them.
    assert won["light"] / 4000 == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 4000))


def test_inverse_repeats_with_its_seed() -> None:
    asks = [Ask(0, client, 10, frames=5) for client in "abc"]
    first = order(InverseQueue(Random(7)), *asks)
    assert first == order(InverseQueue(Random(7)), *asks)
    assert first != order(InverseQueue(Random(8)), *asks)


@pytest.mark.parametrize("rival", RIVALS)
def test_a_node_sends_in_the_order_that_it_is_given(rival: str) -> None:
    queue = RIVALS[rival]()
    egress = make_egress(Config(NodeSettings(), ClientSettings(), (), {}), queue)
    assert egress._queue is queue


@pytest.mark.parametrize("rival", RIVALS)
def test_a_node_that_sends_by_another_order_serves(tmp_path: Path, rival: str) -> None:
    objects = make_objects(4096, 2, 0)
    with start_kdn(tmp_path, program=("kdn.bench.node_orders", rival)) as server:
        server.put(objects)
        check_all(server, objects)
