"""Codecs and their streams, for tests that attack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.cache.keys import PUBLIC_SECRET, Chunk
from kdn.cache.spec import ModelSpec
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.klt import KltCodec
from kdn.codec.profiles import codec_with
from tests.codec.klt_profile import make_profile


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


def _two_stages(tiny: Any) -> Target:
    codecs = [KltCodec(tiny.spec, make_profile(tiny.spec, seed, leading=24)) for seed in (0, 1)]
    return _target(tiny, *codecs)


def _klt_in_runs(tiny: Any) -> Target:
    profiles = [make_profile(tiny.spec, seed, leading=24, run_rows=16) for seed in (0, 1)]
    return _target(tiny, *(KltCodec(tiny.spec, profile) for profile in profiles))


def _klt_with_means(tiny: Any) -> Target:
    profiles = [make_profile(tiny.spec, seed, leading=24, means=True) for seed in (0, 1)]
    return _target(tiny, *(KltCodec(tiny.spec, profile) for profile in profiles))


def _klt_in_parts(tiny: Any) -> Target:
    spec = windowed(tiny)
    return _target(tiny, *(klt_in_parts(spec, seed) for seed in (0, 1)))


def windowed(tiny: Any) -> ModelSpec:
    """Every second layer has a window."""
    spec: ModelSpec = replace(tiny.spec, windows=(None, 40, None, 40))
    return spec


def klt_in_parts(spec: ModelSpec, seed: int = 0) -> Codec:
    return codec_with(spec, make_profile(spec, seed, in_parts=True))


CODECS: dict[str, Callable[[Any], Target]] = {
    "exact": _exact,
    "cachegen": _cachegen,
    "klt": _klt,
    "klt in two stages": _two_stages,
    "klt in two parts": _klt_in_parts,
    "klt in runs": _klt_in_runs,
    "klt with means": _klt_with_means,
}


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
