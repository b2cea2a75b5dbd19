"""Answers of a Redis server mean the same whether they come whole or byte by byte.

A string that is whole takes a shorter way through the reader than one that arrives in parts, so
both ways are held against each other, also with answers that are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from kdn.errors import KdnError
from kdn.store.base import Entry, Hints
from kdn.store.redis_reading import Gathered, SpanJob
from kdn.store.redis_record import RECORD_BYTES, Keys, new_record, pack_record
from kdn.store.redis_wire import ReplyReader, pack

KEY, OTHER, ETAG = b"a key", b"another", b"its etag"
DATA = bytes(range(256)) * 40
RECORD = pack_record(new_record(Entry(KEY, ETAG, len(DATA), Hints()), 0))
ELSEWHERE = pack_record(new_record(Entry(OTHER, ETAG, len(DATA), Hints()), 0))


def string(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


ANSWERS = {
    "whole": string(RECORD + DATA),
    "nothing": string(b""),
    "no string": b":7\r\n",
    "none": b"$-1\r\n",
    "an error": b"-LOADING later\r\n",
    "too short for a record": string(RECORD[:-1]),
    "a record alone": string(RECORD),
    "a byte less than it says": string(RECORD + DATA[:-1]),
    "a byte more than it says": string(RECORD + DATA + b"x"),
    "a damaged record": string(RECORD[:40] + b"\xff" + RECORD[41:] + DATA),
    "another object's record": string(ELSEWHERE + DATA),
    "a list": b"*1\r\n" + string(RECORD + DATA),
    "no line break": string(RECORD + DATA)[:-2] + b"xx",
    "too long": b"$99999999\r\n" + RECORD,
    "two answers": 2 * string(RECORD + DATA),
}


class Seen(NamedTuple):
    """What came of it; an error by its kind, and what was handed over before it."""

    data: bytes
    is_gone: bool
    is_whole: bool
    is_answered: bool
    error: str


@dataclass
class Fed:
    """A job for all of an object, and answers fed to it, at most so many bytes at a time."""

    at_a_time: int
    etag: bytes = ETAG

    def seen(self, answer: bytes) -> Seen:
        gathered, reader = Gathered(), ReplyReader()
        job = SpanJob(Keys("kdn"), KEY, 0, len(DATA), self.etag, gathered)
        commands = list(job.commands())
        assert len(commands) == 1
        assert pack(commands[0]).startswith(b"*4\r\n$8\r\nGETRANGE\r\n")
        reader.expect(job, [True])
        error, left = "", answer
        try:
            while left:
                room = reader.room()
                size = min(len(room), len(left), self.at_a_time)
                room[:size], left = left[:size], left[size:]
                reader.filled(size)
        except KdnError as found:
            error = type(found).__name__
        return Seen(bytes(gathered.data()), job.is_gone, job.is_whole, job.is_answered, error)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("etag", [ETAG, b"another etag"])
def test_a_whole_answer_is_the_same_as_its_parts(name: str, etag: bytes) -> None:
    parts = Fed(1, etag).seen(ANSWERS[name])
    for at_a_time in (7, RECORD_BYTES, 5000, 1 << 20):
        whole = Fed(at_a_time, etag).seen(ANSWERS[name])
        # Of an answer that ends wrongly, nobody uses what was handed over before that showed.
        assert whole._replace(data=b"") == parts._replace(data=b"")
        assert whole.data == parts.data


def test_what_it_should_be() -> None:
    seen = Fed(1 << 20).seen(ANSWERS["whole"])
    assert seen == Seen(DATA, is_gone=False, is_whole=True, is_answered=True, error="")
    for name in ("a damaged record", "another object's record", "a byte less than it says"):
        lost = Fed(1 << 20).seen(ANSWERS[name])
        assert lost == Seen(b"", is_gone=True, is_whole=False, is_answered=True, error="")
