"""What an attacker makes of a stream, every digest and the stream id repaired.

`forge` has the tenant's secret; the others have not.
"""

from __future__ import annotations

import random
import struct
from dataclasses import replace

from kdn.cache.keys import PUBLIC_SEAL_KEY, seal_key
from kdn.codec.format import Bitstream, Section, StreamInfo, write
from tests.codec.mutations import Attempt, levels_of, renamed
from tests.codec.targets import Target


def forge(rng: random.Random, target: Target) -> Attempt:
    """A stream with sections and fields of the attacker's choice and every digest right, by one who
    has the secret."""
    info, sections = _forged_parts(rng, target)
    if info.windowed_from is not None and rng.random() < 0.1:
        info = replace(info, windowed_from=rng.choice((None, 0, 1, 2, 65535)))
    return lambda: Bitstream.parse(write(info, sections, target.chunk.seal_key))


def _forged_parts(rng: random.Random, target: Target) -> tuple[StreamInfo, list[Section]]:
    good = Bitstream.parse(target.stream)
    info, parts = good.info, _sections(target.stream)
    for _ in range(rng.choice((1, 1, 2, 4))):
        index = rng.choice(sorted(parts))
        parts[index] = _forge_section(rng, parts[index], parts[rng.choice(sorted(parts))])
    if rng.random() < 0.2:
        info = replace(info, params=_forge_section(rng, info.params, b"\0\0")[:1024])
    if rng.random() < 0.2:
        absences = [rng.choice((absent, rng.randrange(33))) for absent in info.absences]
        info = replace(info, valid_from=tuple(info.start + absent for absent in absences))
    if rng.random() < 0.1:
        info = replace(info, dtype=rng.choice(list(type(info.dtype))))
    sections = [
        Section(e.level, e.kind, e.group, parts[i]) for i, e in enumerate(good.header.entries)
    ]
    if rng.random() < 0.1:
        victim = rng.choice(sections)
        sections.remove(victim)
        sections.append(replace(victim, group=rng.randrange(4)))
    return info, sections


def unsealed(rng: random.Random, target: Target) -> Attempt:
    """The right values, or others, under a seal of the attacker's."""
    good = Bitstream.parse(target.stream)
    info, parts = good.info, _sections(target.stream)
    sections = [
        Section(e.level, e.kind, e.group, parts[i]) for i, e in enumerate(good.header.entries)
    ]
    if rng.random() < 0.7:
        info, sections = _forged_parts(rng, target)
    key = rng.choice((PUBLIC_SEAL_KEY, seal_key(b"a guess"), rng.randbytes(32)))
    return lambda: Bitstream.parse(write(info, sections, key))


def another_tenants(rng: random.Random, target: Target) -> Attempt:
    """A stream of another tenant, as it is or under this tenant's key."""
    data = rng.choice(target.others)
    return lambda: Bitstream.parse(_rekeyed(rng, data, target.chunk.key))


def another_chunks(rng: random.Random, target: Target) -> Attempt:
    """A stream that this tenant sealed for another chunk."""
    return lambda: Bitstream.parse(_rekeyed(rng, target.elsewhere, target.chunk.key))


def spliced(rng: random.Random, target: Target) -> Attempt:
    """A level of one sealed stream, with its digest, within another of the same chunk."""
    good, other = (Bitstream.parse(data).header for data in (target.stream, target.other))
    level = rng.randrange(good.info.num_levels)
    levels = levels_of(target.stream) | {level: levels_of(target.other)[level]}
    digests_at = good.size_bytes - 32 - 16 * len(good.level_digests)
    directory_at = digests_at - 8 * len(good.entries)
    head = bytearray(target.stream[: good.size_bytes])
    for i, entry in enumerate(other.entries):
        if entry.level == level:
            struct.pack_into("<I", head, directory_at + 8 * i + 4, entry.length)
    parts = good.info.num_parts
    for number in range(level * parts, (level + 1) * parts):
        at = digests_at + 16 * number
        head[at : at + 16] = other.level_digests[number]
    if good.info.num_levels > 1 and rng.random() < 0.3:  # of one level, it would be all of `other`
        head[-32:-16] = other.seal
    data = bytes(head) + b"".join(levels[i] for i in sorted(levels))
    return lambda: Bitstream.parse(renamed(data, good.size_bytes))


FORGERIES = (unsealed, another_tenants, another_chunks, spliced)


def _rekeyed(rng: random.Random, data: bytes, key: bytes) -> bytes:
    if rng.random() < 0.3:
        return data
    size = Bitstream.parse(data).header.size_bytes
    return renamed(data[:12] + key + data[28:], size)


def _forge_section(rng: random.Random, data: bytes, other: bytes) -> bytes:
    forged = bytearray(data)
    how = rng.randrange(7)
    if how == 0:
        return other
    if how == 1:
        return data[: rng.randrange(len(data) + 1)]
    if how == 2:
        return data + rng.randbytes(rng.randrange(1, 9))
    if how == 3:
        return rng.randbytes(rng.randrange(200))
    for _ in range(rng.choice((1, 2, 16))):
        if forged:  # the first bytes hold counts, scales and tables: they deserve more
            at = rng.randrange(len(forged) if how < 6 else min(40, len(forged)))
            forged[at] = rng.choice((forged[at] ^ 1 << rng.randrange(8), 0, 255))
    return bytes(forged)


def _sections(stream: bytes) -> dict[int, bytes]:
    entries = Bitstream.parse(stream).header.entries
    return {i: stream[e.offset : e.end] for i, e in enumerate(entries)}
