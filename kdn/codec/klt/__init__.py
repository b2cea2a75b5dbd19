"""The flagship codec. `codec.py` ties the parts together; `profile.py` says what is calibrated."""

from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.profile import Profile

__all__ = ["KltCodec", "Profile"]
