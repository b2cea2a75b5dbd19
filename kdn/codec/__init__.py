"""Codecs by name. `base.py` says what each of them does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from kdn.cache.spec import ModelSpec
    from kdn.codec.base import Codec

__all__ = ["CODECS", "open_codec"]

CODECS = ("klt", "exact")


def open_codec(name: str, spec: ModelSpec, profile: Path | None = None) -> Codec:
    """The codec called `name` for a model. `klt` finds the model's profile itself where it was
    shipped or calibrated on this machine; `exact` has none."""
    if name == "exact":
        from kdn.codec.exact import ExactCodec
        from kdn.codec.windowed import in_order

        return in_order(spec, lambda own: ExactCodec(own, in_parts=own.has_windows))
    if name == "klt":
        from kdn.codec.profiles import find_profile, klt_codec

        return klt_codec(spec, find_profile(spec, profile))
    raise UnsupportedError(f"no codec {name!r}; there are {', '.join(CODECS)}")
