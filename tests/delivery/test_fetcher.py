"""A fetcher's life, and the memory that it shares with its engine."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdn.delivery.arena import Arena
from kdn.delivery.fetch_messages import (
    Hello,
    News,
    Order,
    Span,
    Stop,
    pack,
    parse_news,
    parse_order,
)
from kdn.delivery.fetcher_process import _cut
from kdn.store.base import NodeAt

ROOT = Path(__file__).parents[2]
ENGINE = """
import asyncio, sys
from kdn.delivery.fetch_messages import Hello
from kdn.delivery.fetcher import Fetcher

async def main():
    fetcher = Fetcher(Hello(2, 1 << 20))
    while not fetcher.is_ready():
        await asyncio.sleep(0.01)
    print(fetcher.pid, flush=True)
    {then}

asyncio.run(main())
"""


def engine(then: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", ENGINE.format(then=then)]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE)


def ends(pid: int, limit_s: float = 10.0) -> bool:
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # who would wait for it has gone
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_engine(how: signal.Signals) -> None:
    with engine("await asyncio.sleep(60)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(process.pid, how)
        process.wait(10)
        assert ends(pid)


def test_closing_ends_it() -> None:
    with engine("await fetcher.close()") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.wait(20) == 0
        assert ends(pid, 1.0)


def test_it_needs_neither_torch_nor_a_codec() -> None:
    program = (
        "import kdn.delivery.fetcher_process, sys;"
        "assert not {'torch', 'numba', 'kdn.codec.base'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_messages_arrive_as_they_were_sent() -> None:
    span = Span("ab", "cd", 1, 20, 4096, 7, [(10, "ef"), (20, "01")])
    order = Order(3, 12.5, [span], [(NodeAt("http://a:1", "127.0.0.1"), [0])])
    told = parse_order(pack(order))
    assert isinstance(told, Order)
    parts = [(end, digest) for end, digest in told.spans[0].parts]
    assert told.spans[0]._replace(parts=parts) == span
    assert (told.number, told.until_s, told.shares) == (3, 12.5, order.shares)
    hello = Hello(2, 1 << 20, "token", None, "ca.pem")
    assert parse_order(pack(hello)) == hello
    assert parse_order(pack(Stop(4))) == Stop(4)
    news = parse_news(pack(News(1, 2, [(0, 3)], True, "why")))
    assert (news.number, dict(news.verified), news.ended, news.trouble) == (1, {0: 3}, True, "why")


def test_pieces_are_about_as_large_as_asked_for() -> None:
    assert _cut([0, 1, 2, 3, 4], [10] * 5, 20) == [[0, 1], [2, 3], [4]]
    assert _cut([1, 3], [1, 100, 1, 100], 20) == [[1], [3]]
    assert _cut([], [], 20) == []


def test_a_region_is_taken_again_when_the_last_view_of_it_has_gone() -> None:
    arena = Arena(1 << 20)
    first, second = arena.take(5000), arena.take(5000)
    assert first is not None
    assert second is not None
    assert (first.start, second.start) == (0, 8192)
    view = first.view[10:20]
    view[:] = b"0123456789"
    del first
    gc.collect()
    third = arena.take(100)
    assert third is not None
    assert third.start == 16384
    assert bytes(view) == b"0123456789"
    del view
    gc.collect()
    again = arena.take(5000)
    assert again is not None
    assert again.start == 0
    assert arena.take(1 << 20) is None
    arena.close()


def test_memory_that_nobody_uses_goes_back_beyond_a_limit() -> None:
    arena = Arena(1 << 24, kept_bytes=1 << 16)
    for _ in range(3):
        region = arena.take(1 << 22)
        assert region is not None
        assert region.start == 0
        region.view[:] = bytes(1 << 22)
        assert arena.used_bytes() >= 1 << 22
        del region
        gc.collect()
        arena.tidy()
        assert arena.used_bytes() <= 1 << 16
    arena.close()
