"""Streams in two parts: the layers with a window may be left out, and nothing else changes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kdn.cache.keys import PUBLIC_SEAL_KEY, Chunk
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec import open_codec
from kdn.codec.base import Codec, Coded
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream, Section, write
from kdn.codec.header import Header
from kdn.codec.klt import KltCodec
from kdn.codec.windowed import WindowedCodec
from kdn.delivery.lookup import verified_head
from kdn.errors import (
    ChecksumError,
    FormatError,
    MismatchError,
    TruncatedError,
    UnsupportedError,
)
from tests.codec.klt_profile import make_profile
from tests.codec.targets import klt_in_parts, windowed

MAKERS: dict[str, Callable[[Any], Codec]] = {
    "exact": lambda spec: open_codec("exact", spec),
    "klt": klt_in_parts,
}


@pytest.fixture(params=MAKERS)
def codec(request: pytest.FixtureRequest, tiny: Any) -> Codec:
    return MAKERS[request.param](windowed(tiny))


def case(codec: Codec, tiny: Any, index: int = 0) -> tuple[Chunk, KVCache, Bitstream]:
    chunk = tiny.chunk(codec.profile_id, 64, index)
    cache = tiny.cache(chunk, torch.float32, (0, 24, 0, 0))
    return chunk, cache, Bitstream.parse(codec.encode(chunk, cache))


def first_parts(stream: Bitstream, levels: int, verified: bool = False) -> Bitstream:
    """What is left if the second parts never came: their bytes are others here."""
    header, data = stream.header, bytearray(b"".join(stream.parts(stream.info.num_levels)))
    for start, end in zip(header.part_ends, header.level_ends, strict=True):
        data[start:end] = b"\xee" * (end - start)
    return Bitstream.without_windowed(header, data, levels, range(levels) if verified else ())


@pytest.mark.parametrize("index", [0, 1])
def test_comes_back_in_the_models_order(codec: Codec, tiny: Any, index: int) -> None:
    chunk, cache, stream = case(codec, tiny, index)
    found = codec.decode(stream, chunk, dtype=torch.float32)
    assert found.valid_from == cache.valid_from
    bound = 0 if codec.is_lossless else 0.1
    assert float((found.keys - cache.keys).abs().max()) <= bound
    assert float((found.values - cache.values).abs().max()) <= bound
    out = KVCache(torch.ones_like(cache.keys), torch.ones_like(cache.keys), chunk.start)
    again = codec.decode(stream, chunk, out=out)
    assert again.keys.data_ptr() == out.keys.data_ptr()
    assert again.valid_from == cache.valid_from
    assert torch.equal(out.keys, found.keys)
    assert torch.equal(out.values, found.values)


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_parts_are_the_layers_without_windows(
    codec: Codec, tiny: Any, index: int
) -> None:
    chunk, _, stream = case(codec, tiny, index)
    for levels in range(1, codec.num_levels + 1):
        whole = codec.decode(stream, chunk, levels=levels, dtype=torch.float32)
        part = codec.decode(first_parts(stream, levels), chunk, levels=levels, dtype=torch.float32)
        assert part.valid_from == (chunk.start, chunk.end, chunk.start, chunk.end)
        for own, all_of_it in ((part.keys, whole.keys), (part.values, whole.values)):
            assert torch.equal(own[::2], all_of_it[::2])
            assert not own[1::2].any()


def test_every_part_of_every_level_has_its_digest(codec: Codec, tiny: Any) -> None:
    _, _, stream = case(codec, tiny)
    header = stream.header
    assert len(header.level_digests) == 2 * codec.num_levels
    data = b"".join(stream.parts(codec.num_levels))
    ends = zip(header.part_ends, header.level_ends, strict=True)
    for level, (border, end) in enumerate(ends):
        assert header.level_start(level) < border < end
        for place, seen_by in ((border - 1, (True, False)), (border, (True,))):
            spoilt = bytearray(data)
            spoilt[place] ^= 1
            own = spoilt[header.level_start(level) : end]
            with pytest.raises(ChecksumError):
                header.check_level(level, own)
            if False in seen_by:
                with pytest.raises(ChecksumError):
                    header.check_level(level, own, windowed=False)
            else:
                header.check_level(level, own, windowed=False)


def test_what_is_not_at_hand_is_never_read(codec: Codec, tiny: Any) -> None:
    _, _, stream = case(codec, tiny)
    part = first_parts(stream, codec.num_levels, verified=True)
    border = stream.info.windowed_from
    assert border is not None
    beyond = next(entry for entry in stream.header.entries if entry.group >= border)
    for what in (
        lambda: part.section(beyond.level, beyond.group, beyond.kind),
        lambda: part.parts(1),
        lambda: part.read_into(memoryview(bytearray(9)), 1),
        part.verify,
    ):
        with pytest.raises(TruncatedError, match="window"):
            what()
    assert part.copies(1) is None


def test_an_engines_memory_takes_whole_streams_only(codec: Codec, tiny: Any) -> None:
    """Its layers stand in the model's order there, too."""
    chunk = tiny.chunk(codec.profile_id, 64)
    cache = tiny.cache(chunk, torch.float32)
    stream = Bitstream.parse(codec.encode(chunk, cache))
    memory = torch.zeros(2, 4, 80, 2, 8)
    rows = TokenRows(list(memory[0]), list(memory[1]), range(2))
    slots = torch.arange(5, 69).numpy()
    part = first_parts(stream, codec.num_levels)
    batch = [Coded(one, chunk, codec.num_levels, slots) for one in (part, stream)]
    refused, taken = codec.decode_rows(batch, rows)
    assert isinstance(refused, UnsupportedError)
    assert taken is None
    expected = codec.decode(stream, chunk, dtype=torch.float32)
    assert torch.equal(memory[0][:, 5:69], expected.keys)
    assert torch.equal(memory[1][:, 5:69], expected.values)


def test_batches_and_heads(codec: Codec, tiny: Any) -> None:
    chunk, cache, stream = case(codec, tiny)
    other = KVCache(cache.keys[:3], cache.values[:3], cache.start)
    good, bad = codec.encode_batch([(chunk, cache), (chunk, other)])
    assert good == codec.encode(chunk, cache) == codec.encode_all([chunk], cache)[0]
    assert isinstance(bad, MismatchError)
    whole = codec.decode(stream, chunk, dtype=torch.float32)
    out = KVCache(torch.ones(4, 80, 2, 8), torch.ones(4, 80, 2, 8))
    codec.decode_all([stream], [chunk], out)
    assert torch.equal(out.values[:, :64], whole.values)
    assert (out.values[:, 64:] == 1).all()
    one = codec.decode_heads(
        stream, chunk, range(1, 2), levels=codec.num_levels, dtype=torch.float32
    )
    assert torch.equal(one.keys, whole.keys[:, :, 1:])


def test_models_without_windows_have_one_part(tiny: Any) -> None:
    codec = open_codec("exact", tiny.spec)
    assert type(codec) is ExactCodec
    assert codec.profile_id == bytes(16)
    assert codec.windowed_from is None
    # Nor is anything to be moved where layers with windows come last already.
    last = open_codec("exact", replace(tiny.spec, windows=(None, None, 9, 9)))
    assert type(last) is ExactCodec
    assert last.windowed_from == 1
    assert isinstance(open_codec("exact", windowed(tiny)), WindowedCodec)


@pytest.mark.parametrize("name", MAKERS)
def test_all_layers_may_have_windows(name: str, tiny: Any) -> None:
    """Then the first parts are empty, and hold nothing."""
    codec = MAKERS[name](replace(tiny.spec, windows=(9, 9, 9, 9)))
    chunk = tiny.chunk(codec.profile_id, 64)
    stream = Bitstream.parse(codec.encode(chunk, tiny.cache(chunk, torch.float32)))
    starts = [stream.header.level_start(level) for level in range(codec.num_levels)]
    assert list(stream.header.part_ends) == starts
    found = codec.decode(first_parts(stream, 1), chunk, levels=1, dtype=torch.float32)
    assert found.valid_from == (chunk.end,) * 4
    assert not found.keys.any()


def test_streams_of_other_parts_are_refused(tiny: Any) -> None:
    """Of a writer that knows nothing of windows, and of one that drew the border elsewhere."""
    codec = open_codec("exact", windowed(tiny))
    chunk, _, stream = case(codec, tiny)
    sections = [
        Section(e.level, e.kind, e.group, bytes(stream.section(e.level, e.group, e.kind)))
        for e in stream.header.entries
    ]
    for border in (None, 0):
        info = replace(stream.info, windowed_from=border)
        other = write(info, sections, PUBLIC_SEAL_KEY)
        with pytest.raises(MismatchError, match="windowed_from"):
            verified_head(other, chunk, codec)
        with pytest.raises(MismatchError, match="windowed_from"):
            codec.decode(Bitstream.parse(other), chunk)
    with pytest.raises(FormatError, match="second part"):
        write(replace(stream.info, windowed_from=9), sections, PUBLIC_SEAL_KEY)
    grouped = replace(stream.info, params=struct.pack("<HH", 1, 64))
    with pytest.raises(FormatError, match="layers a group"):
        codec.decode(Bitstream.parse(write(grouped, sections, PUBLIC_SEAL_KEY)), chunk)


def test_headers_say_what_follows_in_one_way(tiny: Any) -> None:
    _, _, stream = case(open_codec("exact", windowed(tiny)), tiny)
    sealed = stream.header.sealed
    assert sealed[80] == 3
    assert Header.parse(sealed + stream.header.seal + stream.stream_id).info == stream.info


def test_a_profile_says_where_windows_begin(tiny: Any) -> None:
    spec = windowed(tiny)
    profile = make_profile(spec, in_parts=True)
    assert profile.windowed_from == 1
    with pytest.raises(MismatchError, match="come last"):
        KltCodec(spec, profile)
    with pytest.raises(MismatchError, match="windows"):
        KltCodec(replace(spec, windows=(None, None, None, 9)), profile)
    for bad in (2, -1, 1.0, None):
        with pytest.raises(FormatError, match="windows"):
            type(profile).build({**profile.meta, "windowed_from": bad}, profile.tensors)
