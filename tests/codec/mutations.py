"""What networks, disks and attackers make of a stream.

Each mutation takes a source of chance and a target, and returns an attempt: a function that parses
what became of the stream, or raises.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from hashlib import blake2b

from kdn.codec.format import Bitstream
from tests.codec.targets import Target

Attempt = Callable[[], Bitstream]


def flip_bits(rng: random.Random, target: Target) -> Attempt:
    data = bytearray(target.stream)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return lambda: Bitstream.parse(bytes(data))


def overwrite_run(rng: random.Random, target: Target) -> Attempt:
    data = bytearray(target.stream)
    at = rng.randrange(len(data))
    length = min(rng.randrange(1, 64), len(data) - at)
    data[at : at + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    return lambda: Bitstream.parse(bytes(data))


def truncate(rng: random.Random, target: Target) -> Attempt:
    data = target.stream[: rng.randrange(len(target.stream) + 1)]
    return lambda: Bitstream.parse(data)


def extend_or_remove(rng: random.Random, target: Target) -> Attempt:
    at, length = rng.randrange(len(target.stream)), rng.randrange(1, 40)
    tail = target.stream[at + length :] if rng.random() < 0.5 else target.stream[at:]
    data = target.stream[:at] + rng.randbytes(rng.choice((0, length))) + tail
    return lambda: Bitstream.parse(data)


def wrong_length(rng: random.Random, target: Target) -> Attempt:
    """A count or length field changed, with or without a stream id that fits."""
    header = Bitstream.parse(target.stream).header
    data = bytearray(target.stream)
    directory = header.size_bytes - 32 - 16 * len(header.level_digests) - 8 * len(header.entries)
    places = [(8, "<I"), (68, "<H"), (70, "<H"), (77, "<B"), (78, "<H"), (80, "<B"), (81, "<H")]
    places += [(directory + 8 * i + 4, "<I") for i in range(len(header.entries))]
    at, form = rng.choice(places)
    (value,) = struct.unpack_from(form, data, at)
    limit = 2 ** (8 * struct.calcsize(form))
    value = rng.choice((value + 1, value - 1, value * 2, 0, limit - 1, rng.randrange(limit)))
    struct.pack_into(form, data, at, value % limit)
    if rng.random() < 0.7:
        return lambda: Bitstream.parse(renamed(bytes(data), header.size_bytes))
    return lambda: Bitstream.parse(bytes(data))


def swap_levels(rng: random.Random, target: Target) -> Attempt:
    levels = levels_of(target.stream)
    a, b = rng.sample(sorted(levels), 2) if len(levels) > 1 else (0, 0)
    right = dict(levels)
    levels[a], levels[b] = levels[b][::-1], levels[a][::-1] if a == b else levels[a]
    if rng.random() < 0.5:  # of equal length, as in a stream of fixed-size levels
        levels = {i: (levels[i] + bytes(len(right[i])))[: len(right[i])] for i in levels}
    return _apart(target.stream, levels)


def foreign_levels(rng: random.Random, target: Target) -> Attempt:
    """Levels of another stream of the same chunk, some cut or filled to the right length."""
    levels, other = levels_of(target.stream), levels_of(target.other)
    for index in rng.sample(sorted(levels), rng.randrange(1, len(levels) + 1)):
        fitted = (other[index] + bytes(len(levels[index])))[: len(levels[index])]
        levels[index] = rng.choice((other[index], fitted))
    return _apart(target.stream, levels)


def missing_levels(rng: random.Random, target: Target) -> Attempt:
    levels = levels_of(target.stream)
    for index in rng.sample(sorted(levels), rng.randrange(1, len(levels) + 1)):
        del levels[index]
    return _apart(target.stream, levels)


DAMAGE = (
    flip_bits, overwrite_run, truncate, extend_or_remove, wrong_length, swap_levels,
    foreign_levels, missing_levels,
)  # fmt: skip


def levels_of(stream: bytes) -> dict[int, bytes]:
    header = Bitstream.parse(stream).header
    every = range(header.info.num_levels)
    return {level: stream[header.level_start(level) : header.level_end(level)] for level in every}


def _apart(stream: bytes, levels: dict[int, bytes]) -> Attempt:
    header = stream[: Bitstream.parse(stream).header.size_bytes]
    return lambda: Bitstream.from_levels(header, levels)


def renamed(data: bytes, header_bytes: int) -> bytes:
    """With the stream id that this header has."""
    front = data[: header_bytes - 16]
    stream_id = blake2b(front, digest_size=16, person=b"kdn-stream").digest()
    return front + stream_id + data[header_bytes:]
