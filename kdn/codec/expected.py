"""How far off a model's answers are expected to be, by codec and number of levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from kdn.codec.base import Codec


def expected_kld(codec: Codec) -> tuple[float, ...]:
    """By levels - 1: what a delivery plans with. Measured on held-out text when the profile was
    made; zeros where nothing is lost."""
    if codec.name == "exact":
        return (0.0,) * codec.num_levels
    levels = getattr(getattr(codec, "profile", None), "levels", ())
    told = [level.expected["kld"] for level in levels if "kld" in level.expected]
    if len(told) != codec.num_levels:
        raise UnsupportedError(
            f"the profile of the codec {codec.name!r} does not say what its levels are worth"
        )
    return tuple(map(float, told))
