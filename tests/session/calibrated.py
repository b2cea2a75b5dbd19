"""A sound profile for a model that nobody calibrated: random, with losses at all levels but one."""

from __future__ import annotations

from kdn.cache.spec import ModelSpec
from kdn.codec.klt import Profile
from kdn.codec.profiles import local_profile
from tests.codec.klt_profile import LEVELS, parts


def profile_of(spec: ModelSpec, in_parts: bool = False) -> Profile:
    """Its levels promise a KLD of 0.1, 0.025, 0.00625 and so on."""
    meta, tensors = parts(spec, in_parts=in_parts)
    meta["expected"] = [{"kld": 0.1 / 4**level} for level in range(LEVELS)]
    return Profile.build(meta, tensors)


def calibrate_here(spec: ModelSpec, in_parts: bool = False) -> Profile:
    """As if `kdn calibrate` had run: KDN_CACHE must be the test's own."""
    profile = profile_of(spec, in_parts)
    local_profile(spec).parent.mkdir(parents=True)
    local_profile(spec).write_bytes(profile.to_bytes())
    return profile
