"""Mutated streams: each decodes to exactly what it should, or raises a named error.

A mutation damages bytes as a network or a disk would, or is made by an attacker who repairs every
digest and the stream id. Without the tenant's secret no such stream reaches the payload decoder.
With it, as anybody has it in the public namespace, it does, and may then yield other values but
nothing malformed. Each mutation is a function of (codec, index), so a failure names its own
reproduction. `pytest tests/codec --mutations 100000` runs the full count per codec.
"""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import pytest
import torch

from kdn.cache.keys import PUBLIC_SEAL_KEY, PUBLIC_SECRET, Chunk, seal_key
from kdn.cache.tensors import KVCache
from kdn.codec import threads
from kdn.codec.base import Codec
from kdn.codec.cachegen import CacheGenCodec
from kdn.codec.cachegen_profile import CacheGenProfile
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream, Section, StreamInfo, write
from kdn.codec.klt import KltCodec
from kdn.errors import (
    AuthenticityError,
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    TruncatedError,
)
from tests.codec.klt_profile import make_profile

DEFAULT_MUTATIONS = 10_000
MAX_SECONDS = 5.0  # for one stream of a few KiB, on a machine busy with other work
MAX_BYTES = 8 * 2**20
TRACED_EVERY = 10  # tracing allocations is slow


@dataclass(frozen=True)
class Target:
    """A codec and its streams under attack. `foreign` is the same codec with another profile, or
    for another model where it has none; `other` a second stream of the very same chunk; `elsewhere`
    the stream of another chunk; `others` what other tenants wrote of the same values."""

    codec: Codec
    foreign: Codec
    chunk: Chunk
    stream: bytes
    other: bytes
    elsewhere: bytes
    others: tuple[bytes, ...]


def _exact(tiny: Any) -> Target:
    other_model = replace(tiny.spec, fingerprint=bytes(16))
    return _target(tiny, ExactCodec(tiny.spec), ExactCodec(other_model))


def _cachegen(tiny: Any) -> Target:
    codecs = []
    for seed in ("calibration", "foreign"):
        made = tiny.reseed(seed)
        profile = CacheGenProfile.fit(tiny.spec, [made.cache(made.chunk(bytes(16), 256))])
        codecs.append(CacheGenCodec(tiny.spec, profile))
    return _target(tiny, *codecs)


def _klt(tiny: Any) -> Target:
    codecs = [KltCodec(tiny.spec, make_profile(tiny.spec, seed)) for seed in (0, 1)]
    return _target(tiny, *codecs)


CODECS: dict[str, Callable[[Any], Target]] = {"exact": _exact, "cachegen": _cachegen, "klt": _klt}


def _target(tiny: Any, codec: Codec, foreign: Codec) -> Target:
    tenant = replace(tiny, secret=b"a tenant's own")
    chunk = tenant.chunk(codec.profile_id, 32)
    another = tenant.reseed("another text").chunk(codec.profile_id, 32)
    absences = (0, 5, 0, 32)
    cache = tiny.cache(chunk, absences=absences)
    tenants = [replace(tiny, secret=secret) for secret in (PUBLIC_SECRET, b"another tenant's")]
    return Target(
        codec,
        foreign,
        chunk,
        stream=codec.encode(chunk, cache),
        other=codec.encode(chunk, tiny.reseed("other").cache(chunk, absences=absences)),
        elsewhere=codec.encode(another, tiny.cache(another)),
        others=tuple(codec.encode(one.chunk(codec.profile_id, 32), cache) for one in tenants),
    )


# What damages bytes. Each takes (random, target) and returns what to decode.

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
    directory = header.size_bytes - 32 - 16 * header.info.num_levels - 8 * len(header.entries)
    places = [(8, "<I"), (68, "<H"), (70, "<H"), (77, "<B"), (78, "<H"), (81, "<H")]
    places += [(directory + 8 * i + 4, "<I") for i in range(len(header.entries))]
    at, form = rng.choice(places)
    (value,) = struct.unpack_from(form, data, at)
    limit = 2 ** (8 * struct.calcsize(form))
    value = rng.choice((value + 1, value - 1, value * 2, 0, limit - 1, rng.randrange(limit)))
    struct.pack_into(form, data, at, value % limit)
    if rng.random() < 0.7:
        return lambda: Bitstream.parse(_renamed(bytes(data), header.size_bytes))
    return lambda: Bitstream.parse(bytes(data))


def swap_levels(rng: random.Random, target: Target) -> Attempt:
    levels = _levels(target.stream)
    a, b = rng.sample(sorted(levels), 2) if len(levels) > 1 else (0, 0)
    right = dict(levels)
    levels[a], levels[b] = levels[b][::-1], levels[a][::-1] if a == b else levels[a]
    if rng.random() < 0.5:  # of equal length, as in a stream of fixed-size levels
        levels = {i: (levels[i] + bytes(len(right[i])))[: len(right[i])] for i in levels}
    return _apart(target.stream, levels)


def foreign_levels(rng: random.Random, target: Target) -> Attempt:
    """Levels of another stream of the same chunk, some cut or filled to the right length."""
    levels, other = _levels(target.stream), _levels(target.other)
    for index in rng.sample(sorted(levels), rng.randrange(1, len(levels) + 1)):
        fitted = (other[index] + bytes(len(levels[index])))[: len(levels[index])]
        levels[index] = rng.choice((other[index], fitted))
    return _apart(target.stream, levels)


def missing_levels(rng: random.Random, target: Target) -> Attempt:
    levels = _levels(target.stream)
    for index in rng.sample(sorted(levels), rng.randrange(1, len(levels) + 1)):
        del levels[index]
    return _apart(target.stream, levels)


DAMAGE = (
    flip_bits, overwrite_run, truncate, extend_or_remove, wrong_length, swap_levels,
    foreign_levels, missing_levels,
)  # fmt: skip


# What an attacker makes.


def forge(rng: random.Random, target: Target) -> Attempt:
    """A stream with sections and fields of the attacker's choice and every digest right, by one who
    has the secret."""
    info, sections = _forged_parts(rng, target)
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
    levels = _levels(target.stream) | {level: _levels(target.other)[level]}
    digests_at = good.size_bytes - 32 - 16 * good.info.num_levels
    directory_at = digests_at - 8 * len(good.entries)
    head = bytearray(target.stream[: good.size_bytes])
    for i, entry in enumerate(other.entries):
        if entry.level == level:
            struct.pack_into("<I", head, directory_at + 8 * i + 4, entry.length)
    at = digests_at + 16 * level
    head[at : at + 16] = other.level_digests[level]
    if good.info.num_levels > 1 and rng.random() < 0.3:  # of one level, it would be all of `other`
        head[-32:-16] = other.seal
    data = bytes(head) + b"".join(levels[i] for i in sorted(levels))
    return lambda: Bitstream.parse(_renamed(data, good.size_bytes))


FORGERIES = (unsealed, another_tenants, another_chunks, spliced)


def _rekeyed(rng: random.Random, data: bytes, key: bytes) -> bytes:
    if rng.random() < 0.3:
        return data
    size = Bitstream.parse(data).header.size_bytes
    return _renamed(data[:12] + key + data[28:], size)


def _renamed(data: bytes, header_bytes: int) -> bytes:
    """With the stream id that this header has."""
    front = data[: header_bytes - 16]
    stream_id = blake2b(front, digest_size=16, person=b"kdn-stream").digest()
    return front + stream_id + data[header_bytes:]


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


def _levels(stream: bytes) -> dict[int, bytes]:
    header = Bitstream.parse(stream).header
    every = range(header.info.num_levels)
    return {level: stream[header.level_start(level) : header.level_end(level)] for level in every}


def _apart(stream: bytes, levels: dict[int, bytes]) -> Attempt:
    header = stream[: Bitstream.parse(stream).header.size_bytes]
    return lambda: Bitstream.from_levels(header, levels)


# What is checked.


def bits_of(cache: KVCache) -> tuple[bytes, bytes]:
    keys, values = (t.view(torch.uint8).numpy().tobytes() for t in (cache.keys, cache.values))
    return keys, values


def outcome(attempt: Attempt, codec: Codec, chunk: Chunk) -> KVCache | KdnError:
    """The decoded cache or the named error; anything else is raised and fails the test."""
    begin = time.perf_counter()
    try:
        result: KVCache | KdnError = codec.decode(attempt(), chunk)
    except KdnError as error:
        result = error
    assert time.perf_counter() - begin < MAX_SECONDS
    return result


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Faster for tiny streams, much so on a busy machine, where torch's threads wait for each other
    by spinning; and tracemalloc of Python 3.11 crashes if stopped beside threads."""
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)


@pytest.fixture(scope="module", params=CODECS)
def target(request: pytest.FixtureRequest, tiny: Any) -> Target:
    return CODECS[request.param](tiny)


@pytest.fixture(scope="module")
def count(mutations: int | None) -> int:
    return DEFAULT_MUTATIONS if mutations is None else mutations


def each(target: Target, purpose: str, count: int) -> Any:
    """A random source per mutation; traces the memory of some of them."""
    for index in range(count):
        name = f"{target.codec.name} {purpose} {index}"
        traced = index % TRACED_EVERY == 0
        if traced:
            tracemalloc.start()
        yield name, random.Random(name)
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MAX_BYTES, f"{name} allocated {peak} bytes"


def test_damaged_streams(target: Target, count: int) -> None:
    whole = Bitstream.parse(target.stream)
    expected = {
        bits_of(target.codec.decode(whole, target.chunk, levels=levels))
        for levels in range(1, target.codec.num_levels + 1)
    }
    refused = set()
    for name, rng in each(target, "damaged", count * 7 // 10):
        mutate = rng.choice(DAMAGE)
        result = outcome(mutate(rng, target), target.codec, target.chunk)
        if isinstance(result, KVCache):
            assert bits_of(result) in expected, f"{name} ({mutate.__name__}) decoded wrongly"
        else:
            refused.add(mutate)
    assert refused == set(DAMAGE)


def test_truncated_streams_decode_to_their_levels(target: Target) -> None:
    """Every cut, not a sample: what is there decodes, and to exactly what its levels say."""
    whole = Bitstream.parse(target.stream)
    expected = [
        bits_of(target.codec.decode(whole, target.chunk, levels=levels))
        for levels in range(1, target.codec.num_levels + 1)
    ]
    for cut in range(len(target.stream)):
        result = outcome(
            lambda cut=cut: Bitstream.parse(target.stream[:cut]), target.codec, target.chunk
        )
        levels = sum(cut >= whole.level_end(i) for i in range(target.codec.num_levels))
        if levels:
            assert isinstance(result, KVCache)
            assert bits_of(result) == expected[levels - 1]
        else:
            assert isinstance(result, KdnError)


def test_forged_streams(target: Target, count: int) -> None:
    """Whoever has the secret can change values, but not shape, time or memory."""
    seen = set()
    for name, rng in each(target, "forged", count * 3 // 10):
        result = outcome(forge(rng, target), target.codec, target.chunk)
        seen.add(type(result))
        if isinstance(result, KVCache):
            assert result.keys.shape == (4, 32, 2, 8), name
            assert all(0 <= valid <= 32 for valid in result.valid_from), name
            if target.codec.name != "exact":
                assert result.keys.isfinite().all(), name
                assert result.values.isfinite().all(), name
    assert ChecksumError not in seen  # or it was no forgery
    assert {KVCache, FormatError, TruncatedError} <= seen


def test_forgeries_without_the_secret(target: Target, count: int) -> None:
    """None decodes: neither right values under another seal nor sealed ones in another place."""
    seen: dict[Any, set[type[KdnError]]] = {forgery: set() for forgery in FORGERIES}
    for name, rng in each(target, "without the secret", count // 10):
        forgery = rng.choice(FORGERIES)
        result = outcome(forgery(rng, target), target.codec, target.chunk)
        assert isinstance(result, KdnError), f"{name} ({forgery.__name__}) decoded"
        seen[forgery].add(type(result))
    assert seen[unsealed] - {FormatError} == {AuthenticityError}  # the writer refuses some itself
    for forgery in (another_tenants, another_chunks):
        assert seen[forgery] == {AuthenticityError, MismatchError}
    assert seen[spliced] == {AuthenticityError}


def test_foreign_profile_or_model(target: Target) -> None:
    stream = Bitstream.parse(target.stream)
    with pytest.raises(KdnError, match=r"profile|model"):
        target.foreign.decode(stream, target.chunk)


def test_mutated_cachegen_profiles(tiny: Any, count: int) -> None:
    made = tiny.reseed("calibration")
    profile = CacheGenProfile.fit(tiny.spec, [made.cache(made.chunk(bytes(16), 256))])
    accepted = 0
    for index in range(count // 20):
        rng = random.Random(f"profile {index}")
        data = bytearray(profile.to_bytes())
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(rng.choice((len(data), 600)))
            data[at] = rng.choice((data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        cut = rng.choice((len(data), len(data), rng.randrange(len(data))))
        try:
            found = CacheGenProfile.from_bytes(bytes(data[:cut]))
            accepted += found.profile_id != profile.profile_id
        except KdnError:
            pass
    assert accepted < count // 40
