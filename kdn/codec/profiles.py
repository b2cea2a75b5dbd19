"""Where profiles lie: shipped with the package, or calibrated on this machine; and klt with one.

A file is named after the fingerprint of its model, so finding one needs no index and cannot pair a
profile with another model by mistake; what a file says of itself is checked all the same.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kdn.cache.folder import cache_folder
from kdn.cache.spec import ModelSpec
from kdn.errors import FormatError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from kdn.codec.base import Codec
    from kdn.codec.klt import Profile

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent.parent / "profiles"


def profile_name(spec: ModelSpec) -> str:
    return f"{spec.fingerprint.hex()}.safetensors"


def local_profile(spec: ModelSpec) -> Path:
    """Where `kdn calibrate` puts a model's profile."""
    return cache_folder() / "profiles" / profile_name(spec)


def find_profile(spec: ModelSpec, named: Path | None = None) -> Profile | None:
    """The model's profile: the named file, else one calibrated here, else the one that was shipped.
    Of the last two, what is no profile of this model is passed over with a warning: it must not
    keep the model from being served."""
    from kdn.codec.klt import Profile

    if named is not None:
        return Profile.load(named)
    for path in (local_profile(spec), SHIPPED / profile_name(spec)):
        if not path.exists():
            continue
        try:
            profile = Profile.load(path)
            profile.check_for(spec)
        except (FormatError, MismatchError) as error:
            logger.warning("%s is not used, please delete it: %s", path, error)
        else:
            return profile
    return None


def klt_codec(spec: ModelSpec, profile: Profile | None) -> Codec:
    """With the profile that was found; if none was, the error says what to do."""
    if profile is None:
        raise UnsupportedError(
            f"no klt profile for the model {spec.fingerprint.hex()}: make one with "
            '`kdn calibrate MODEL`, connect to where one is shared, or use codec="exact"'
        )
    try:
        duals = local_profile(spec).with_suffix(".duals")
    except RuntimeError:  # no home: they are worked out by every process
        duals = None
    return codec_with(spec, profile, duals)


def codec_with(spec: ModelSpec, profile: Profile, duals: Path | None = None) -> Codec:
    """`klt` with a profile, whose layers may stand in another order than the model's."""
    from kdn.codec.klt import KltCodec
    from kdn.codec.windowed import in_order

    if profile.windowed_from is None:
        return KltCodec(spec, profile, duals)
    return in_order(spec, lambda own: KltCodec(own, profile, duals))
