"""What levels are worth, as profiles tell."""

from __future__ import annotations

import pytest

from kdn.codec.exact import ExactCodec
from kdn.codec.expected import expected_kld
from kdn.codec.klt import KltCodec, Profile
from kdn.errors import UnsupportedError
from tests.codec.conftest import Tiny
from tests.codec.klt_profile import LEVELS, make_profile, parts

SPEC = Tiny.with_layers(4).spec


def test_by_codec() -> None:
    assert expected_kld(ExactCodec(SPEC)) == (0.0,)
    meta, tensors = parts(SPEC)
    meta["expected"] = [{"kld": 0.1 / 4**level} for level in range(LEVELS)]
    codec = KltCodec(SPEC, Profile.build(meta, tensors))
    assert expected_kld(codec) == tuple(0.1 / 4**level for level in range(LEVELS))


def test_a_profile_that_does_not_tell() -> None:
    with pytest.raises(UnsupportedError, match="worth"):
        expected_kld(KltCodec(SPEC, make_profile(SPEC)))
