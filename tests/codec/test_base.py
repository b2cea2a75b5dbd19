"""What codecs say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdn.codec import open_codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.profiles import find_profile
from kdn.errors import UnsupportedError
from tests.codec.conftest import Tiny
from tests.codec.klt_profile import LEVELS, make_profile, parts

TINY = Tiny.with_layers(4)
SPEC = TINY.spec


def test_each_codec_tells_what_its_levels_are_worth() -> None:
    assert ExactCodec(SPEC).expected_kld == (0.0,)
    meta, tensors = parts(SPEC)
    meta["expected"] = [{"kld": 0.1 / 4**level} for level in range(LEVELS)]
    codec = KltCodec(SPEC, Profile.build(meta, tensors))
    assert codec.expected_kld == tuple(0.1 / 4**level for level in range(LEVELS))


def test_a_profile_that_does_not_tell_what_levels_are_worth_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="worth"):
        _ = KltCodec(SPEC, make_profile(SPEC)).expected_kld


def test_lossless_streams_decode_to_their_own_dtype_only() -> None:
    for codec, others in ((ExactCodec(SPEC), False), (KltCodec(SPEC, make_profile(SPEC)), True)):
        chunk = TINY.chunk(codec.profile_id)
        info = Bitstream.parse(codec.encode(chunk, TINY.cache(chunk, torch.bfloat16))).info
        assert info.codec == codec.codec_id
        assert codec.decodes_to(info, torch.bfloat16)
        assert codec.decodes_to(info, torch.float32) == others
        assert codec.is_lossless != others


def test_without_a_profile_klt_opens_only_with_a_file_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path))
    assert find_profile(SPEC) is None
    with pytest.raises(UnsupportedError, match="kdn calibrate"):
        open_codec("klt", SPEC)
    made = make_profile(SPEC)
    (tmp_path / "made").write_bytes(made.to_bytes())
    assert open_codec("klt", SPEC, tmp_path / "made").profile_id == made.profile_id
