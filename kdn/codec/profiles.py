"""Where profiles lie: shipped with the package, or calibrated on this machine.

A file is named after the fingerprint of its model, so finding one needs no index and cannot pair a
profile with another model.
"""

from __future__ import annotations

from pathlib import Path

from kdn.cache.folder import cache_folder
from kdn.cache.spec import ModelSpec
from kdn.errors import UnsupportedError

SHIPPED = Path(__file__).parent.parent / "profiles"


def profile_name(spec: ModelSpec) -> str:
    return f"{spec.fingerprint.hex()}.safetensors"


def local_profile(spec: ModelSpec) -> Path:
    """Where `kdn calibrate` puts a model's profile."""
    return cache_folder() / "profiles" / profile_name(spec)


def find_profile(spec: ModelSpec) -> Path:
    """The model's profile; one calibrated here is preferred to the one that was shipped."""
    for path in (local_profile(spec), SHIPPED / profile_name(spec)):
        if path.exists():
            return path
    raise UnsupportedError(
        f"no klt profile for the model {spec.fingerprint.hex()}: "
        "make one with `kdn calibrate MODEL`"
    )
