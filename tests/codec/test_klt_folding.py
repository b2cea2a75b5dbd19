"""Repairs folded into a profile's rows, against the reference that repairs what was decoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kdn.blend.seams import Block, Seams
from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.folding import folded, group_maps
from kdn.errors import MismatchError, UnsupportedError
from tests.codec.klt_profile import LEVELS, make_profile
from tests.codec.rotations import HALVES, NEIGHBOURS

SPEC = ModelSpec(4, 3, 16, 100, (HALVES, HALVES, NEIGHBOURS, HALVES), (None,) * 4, bytes(16))
AT = 5000
BLOCKS = ((0, 1), (1, 2), (2, 4))
"""In groups of layers [0, 2) and [2, 4)."""


def block(layers: tuple[int, int], rng: torch.Generator, size: float = 0.3) -> Block:
    count, rank = 2 * (layers[1] - layers[0]) * 48, 5
    down = torch.randn(count, rank, generator=rng) * size / count**0.5
    up = torch.randn(rank, count, generator=rng) / rank**0.5
    return Block(layers, down, up, torch.randn(count, generator=rng) * size)


def seams(*layers: tuple[int, int], size: float = 0.3) -> Seams:
    rng = torch.Generator().manual_seed(0)
    return Seams(SPEC.fingerprint, [block(one, rng, size) for one in layers or BLOCKS])


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "means"])
def klt(request: pytest.FixtureRequest) -> KltCodec:
    return KltCodec(SPEC, make_profile(SPEC, means=request.param))


def context(codec: Codec, num_tokens: int = 256 + 75) -> tuple[list[Chunk], KVCache]:
    tokens = np.random.default_rng(1).integers(0, SPEC.vocab_size, num_tokens)
    chunks = cut(tokens, Namespace(SPEC.fingerprint, codec.profile_id), whole=True)
    torch.manual_seed(2)
    shape = (SPEC.num_layers, num_tokens, SPEC.num_kv_heads, SPEC.head_dim)
    keys = rope.redo(torch.randn(shape), SPEC, 0)
    return chunks, KVCache(keys, torch.randn(shape), 0)


def streams(codec: Codec) -> list[tuple[Bitstream, Chunk]]:
    chunks, cache = context(codec)
    return [
        (Bitstream.parse(d), c)
        for d, c in zip(codec.encode_all(chunks, cache), chunks, strict=True)
    ]


def columns(cache: KVCache) -> torch.Tensor:
    """[tokens, all columns], without rotation."""
    sides = torch.stack([rope.undo(cache.keys, SPEC, cache.start), cache.values])
    return sides.transpose(0, 2).flatten(1)


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "means"])
def staged(request: pytest.FixtureRequest) -> KltCodec:
    return KltCodec(SPEC, make_profile(SPEC, leading=80, means=request.param))


@pytest.mark.parametrize("levels", range(1, LEVELS))
@pytest.mark.parametrize("stages", [1, 2])
def test_decoding_with_folded_rows_is_decoding_and_then_repairing(
    klt: KltCodec, staged: KltCodec, stages: int, levels: int
) -> None:
    repair = seams() if stages == 1 else seams((0, 1), (1, 2), (2, 3), (3, 4))
    klt = klt if stages == 1 else staged
    codec = klt.repaired(repair)
    assert codec.profile_id == klt.profile_id
    for stream, chunk in streams(klt):
        plain = klt.decode(stream, chunk, levels=levels)
        found = codec.decode(stream, chunk, levels=levels, at=AT)
        expected = repair.repair(plain, SPEC, AT)
        assert found.start == expected.start == AT
        effect = columns(expected) - columns(plain)
        error = columns(found) - columns(expected)
        # Rows, and components of a token, are rounded to 8 bits. Here nearly all are; of a real
        # profile's values those matter less.
        assert rms(error) < 0.04 * float(columns(plain).std(0).mean())
        assert rms(error) < 0.1 * rms(effect)


def test_a_repair_across_layers_is_not_folded_into_two_stages(staged: KltCodec) -> None:
    with pytest.raises(UnsupportedError, match="layer by layer"):
        staged.repaired(seams())


def test_with_the_last_level_it_is_the_reference(klt: KltCodec) -> None:
    """Whatever is wanted of it: some heads, another dtype, memory that is there."""
    repair = seams()
    codec = klt.repaired(repair)
    for stream, chunk in streams(klt):
        expected = repair.repair(klt.decode(stream, chunk), SPEC, AT)
        found = codec.decode(stream, chunk, dtype=torch.bfloat16, at=AT)
        assert torch.equal(found.keys, expected.keys.bfloat16())
        assert torch.equal(found.values, expected.values.bfloat16())
        heads = codec.decode_heads(
            stream, chunk, range(1, 3), levels=LEVELS, dtype=torch.float32, at=AT
        )
        assert torch.equal(heads.keys, expected.keys[:, :, 1:])


def test_what_a_layer_lacks_stays_zero(klt: KltCodec) -> None:
    chunks, cache = context(klt)
    chunk, own = chunks[1], cache.slice(chunks[1].start, chunks[1].end)
    for side in (own.keys, own.values):
        side[0, :7] = 0
    lacking = KVCache(own.keys, own.values, own.start, (own.start + 7, *(own.start,) * 3))
    stream = Bitstream.parse(klt.encode(chunk, lacking))
    for levels in (1, LEVELS):
        found = klt.repaired(seams()).decode(stream, chunk, levels=levels, at=AT)
        assert found.valid_from[0] == AT + 7
        assert not found.keys[0, :7].any()
        assert found.keys[0, 7:].any()


def test_sinks_are_repaired_as_all_others(klt: KltCodec) -> None:
    repair = seams()
    stream, chunk = streams(klt)[0]
    found = columns(klt.repaired(repair).decode(stream, chunk))[:4]
    expected = columns(repair.repair(klt.decode(stream, chunk), SPEC))[:4]
    assert (found - expected).abs().max() < 1e-4


def test_a_repair_of_nothing_leaves_values_as_they_are(klt: KltCodec) -> None:
    codec = klt.repaired(seams(size=0.0))
    for stream, chunk in streams(klt):
        plain, found = klt.decode(stream, chunk, levels=3), codec.decode(stream, chunk, levels=3)
        assert rms(found.values - plain.values) < 0.04 * float(columns(plain).std(0).mean())


def test_a_map_that_reaches_beyond_a_group(klt: KltCodec) -> None:
    with pytest.raises(UnsupportedError, match=r"layers \[1, 3\) does not lie within"):
        klt.repaired(seams((0, 1), (1, 3), (3, 4)))


def test_a_repair_of_another_model(klt: KltCodec) -> None:
    for codec in (klt, ExactCodec(SPEC)):
        with pytest.raises(MismatchError, match="of the model"):
            codec.repaired(replace(seams(), model=b"o" * 16))


def test_maps_of_other_shapes_and_without_bounds(klt: KltCodec) -> None:
    sound = seams()
    one, *others = sound.blocks
    with pytest.raises(MismatchError, match="a repair of layers"):
        klt.repaired(replace(sound, blocks=[replace(one, up=one.up[:, 1:]), *others]))
    for wrong in (float("nan"), 1e30):
        with pytest.raises(UnsupportedError, match="too large"):
            klt.repaired(replace(sound, blocks=[replace(one, up=one.up * wrong), *others]))


def test_nothing_is_encoded(klt: KltCodec) -> None:
    chunks, cache = context(klt)
    own = cache.slice(chunks[0].start, chunks[0].end)
    for codec in (klt.repaired(seams()), ExactCodec(SPEC).repaired(seams())):
        with pytest.raises(UnsupportedError, match="does not encode"):
            codec.encode(chunks[0], own)
        with pytest.raises(UnsupportedError, match="does not encode"):
            codec.encode_all(chunks, cache)
    with pytest.raises(UnsupportedError, match="does not encode"):
        klt.repaired(seams()).encode_batch([(chunks[0], own)])


def test_nothing_is_repaired_twice(klt: KltCodec) -> None:
    with pytest.raises(UnsupportedError, match="already"):
        klt.repaired(seams()).repaired(seams())


def test_a_folded_profile_is_a_sound_one(klt: KltCodec) -> None:
    """Of the same shapes and dtypes, so that every decoder reads it."""
    found = folded(klt.profile, group_maps(klt.profile, seams()))
    again = Profile.from_bytes(found.to_bytes())
    assert again.meta == klt.profile.meta
    same = {name for name, t in klt.profile.tensors.items() if t is found.tensors[name]}
    changed = set(found.tensors) - same
    rows = {"predict.fine", "predict.out", "predict.out_scale", "predict.bias"}
    basis = {f"g{g}.{n}" for g in range(2) for n in ("fine", "basis", "basis_scale", "weight")}
    assert changed == rows | basis


def test_exact_values_are_repaired_after_decoding() -> None:
    codec, repair = ExactCodec(SPEC), seams()
    chunks, cache = context(codec)
    chunk = chunks[1]
    own = cache.slice(chunk.start, chunk.end)
    stream = Bitstream.parse(codec.encode(chunk, own))
    found = codec.repaired(repair).decode(stream, chunk, at=AT)
    expected = repair.repair(own, SPEC, AT)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)
    out = KVCache.empty(4, chunk.num_tokens, 3, 16, start=AT)
    codec.repaired(repair).decode(stream, chunk, at=AT, out=out)
    assert torch.equal(out.keys, expected.keys)
