"""Mutated streams: each decodes to exactly what it should, or raises a named error.

A mutation damages bytes as a network or a disk would, or is made by an attacker who repairs every
digest and the stream id. Without the tenant's secret no such stream reaches the payload decoder.
With it, as anybody has it in the public namespace, it does, and may then yield other values but
nothing malformed. Each mutation is a function of (codec, index), so a failure names its own
reproduction. `pytest tests/codec --mutations 100000` runs the full count per codec.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec import threads
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.errors import (
    AuthenticityError,
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    TruncatedError,
)
from tests.codec.forgeries import (
    FORGERIES,
    another_chunks,
    another_tenants,
    forge,
    spliced,
    unsealed,
)
from tests.codec.mutations import DAMAGE, Attempt
from tests.codec.targets import CODECS, Target

DEFAULT_MUTATIONS = 5_000
FEWER = 5  # times fewer of what matters less

MAX_SECONDS = 5.0  # for one stream of a few KiB, on a machine busy with other work

MAX_BYTES = 8 * 2**20

TRACED_EVERY = 10  # tracing allocations is slow


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
def most(mutations: int | None) -> int:
    return DEFAULT_MUTATIONS if mutations is None else mutations


@pytest.fixture(scope="module")
def count(target: Target, most: int) -> int:
    return most // FEWER if is_rival(target) or has_two_stages(target) else most


def is_rival(target: Target) -> bool:
    """Nobody but a benchmark decodes its streams, which it made itself."""
    return isinstance(target.codec, CacheGenCodec)


def has_two_stages(target: Target) -> bool:
    """Its sections are those of klt in one stage, which is attacked in full."""
    return isinstance(target.codec, KltCodec) and any(
        group.rows is not None for group in target.codec.profile.groups
    )


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


def test_damaged_streams_decode_rightly_or_are_refused(target: Target, count: int) -> None:
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


def num_levels(data: bytes) -> int:
    try:
        return Bitstream.parse(data).levels_available
    except TruncatedError:
        return 0


def test_truncated_streams_decode_to_their_levels(target: Target) -> None:
    """What is there decodes, and to exactly what its levels say. How many there are is told of each
    cut; decoded are all cuts near the end of a level, and every twentieth between."""
    whole = Bitstream.parse(target.stream)
    expected = [
        bits_of(target.codec.decode(whole, target.chunk, levels=levels))
        for levels in range(1, target.codec.num_levels + 1)
    ]
    ends = [whole.level_end(level) for level in range(target.codec.num_levels)]
    for cut in range(len(target.stream)):
        levels = sum(cut >= end for end in ends)
        assert num_levels(target.stream[:cut]) == levels
        if cut % 20 and all(abs(cut - end) > 3 for end in ends):
            continue
        result = outcome(
            lambda cut=cut: Bitstream.parse(target.stream[:cut]), target.codec, target.chunk
        )
        if levels:
            assert isinstance(result, KVCache)
            assert bits_of(result) == expected[levels - 1]
        else:
            assert isinstance(result, KdnError)


def test_forged_streams_keep_shape_time_and_memory(target: Target, count: int) -> None:
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


def test_no_forgery_without_the_secret_decodes(target: Target, count: int) -> None:
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


def test_a_codec_of_another_profile_or_model_refuses(target: Target) -> None:
    stream = Bitstream.parse(target.stream)
    with pytest.raises(KdnError, match=r"profile|model"):
        target.foreign.decode(stream, target.chunk)


def test_mutated_cachegen_profiles_are_mostly_refused(tiny: Any, most: int) -> None:
    made = tiny.reseed("calibration")
    profile = CacheGenProfile.fit(tiny.spec, [made.cache(made.chunk(bytes(16), 256))])
    accepted = 0
    for index in range(most // 20):
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
    assert accepted < most // 40
