"""Streams of states: exact, or an error; never another state."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.states import MAX_STATE_BYTES, State, StateLayout, StatePart
from kdn.codec.format import Bitstream, CodecId, DType, Section, StreamInfo, write
from kdn.codec.states import LAYOUT, TENSOR, StateCodec
from kdn.errors import AuthenticityError, KdnError, MismatchError, UnsupportedError

SPEC = ModelSpec(2, 2, 8, 100, (None, None), (None, None), bytes(16), has_states=True)
LAYOUT_OF_THREE = StateLayout(
    (
        StatePart(0, "conv", 0, (1, 6, 4), "bfloat16"),
        StatePart(0, "recurrent", 0, (1, 2, 3, 3), "float32"),
        StatePart(2, "conv", 0, (1, 6, 4), "bfloat16"),
    )
)
CODEC = StateCodec(SPEC, LAYOUT_OF_THREE)
SECRET = b"a secret"
[CHUNK] = cut(range(16), Namespace(SPEC.fingerprint, bytes(16), secret=SECRET))
PLACE = LAYOUT_OF_THREE.chunk_of(CHUNK)


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(one.shape, generator=generator).to(getattr(torch, one.dtype))
        for one in LAYOUT_OF_THREE.parts
    ]
    tensors[1][0, 0, 0, 0] = float("nan")
    return State(LAYOUT_OF_THREE, tuple(tensors))


def bits(one: State) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in one.tensors]


def test_every_bit_comes_back() -> None:
    data = CODEC.encode(PLACE, state())
    stream = Bitstream.parse(data)
    assert CODEC.fits(stream.header)
    assert bits(CODEC.decode(stream, PLACE)) == bits(state())
    assert CODEC.encode(PLACE, state()) == data


def test_the_bytes_are_a_promise() -> None:
    tensors = tuple(
        torch.arange(one.size_bytes // getattr(torch, one.dtype).itemsize)
        .to(getattr(torch, one.dtype))
        .reshape(one.shape)
        for one in LAYOUT_OF_THREE.parts
    )
    data = CODEC.encode(PLACE, State(LAYOUT_OF_THREE, tensors))
    assert (len(data), blake2b(data, digest_size=8).hexdigest()) == GOLDEN


GOLDEN = (409, "85d17100f793a3d5")


def test_keys_are_those_of_a_chunk_and_a_layout() -> None:
    other = StateLayout((*LAYOUT_OF_THREE.parts[:2], StatePart(2, "conv", 0, (1, 6, 4), "float32")))
    keys = {LAYOUT_OF_THREE.chunk_of(CHUNK).key, other.chunk_of(CHUNK).key, CHUNK.key}
    assert len(keys) == 3
    assert PLACE.parent == CHUNK.key
    # Whoever reads one of these must find it again with a later release.
    assert PLACE.key.hex() == KEY


KEY = "a3a93b032654dcc0aa1c22189bffbfee"


def test_damage_is_found_wherever_it_is() -> None:
    data = CODEC.encode(PLACE, state())
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(KdnError):
            CODEC.decode(Bitstream.parse(bytes(bad)), PLACE)
    for end in (0, 20, len(data) // 2, len(data) - 1):
        with pytest.raises(KdnError):
            CODEC.decode(Bitstream.parse(data[:end]), PLACE)


def test_what_others_wrote_is_refused() -> None:
    forged = CODEC.encode(PLACE.with_seal_key(bytes(32)), state())
    with pytest.raises(AuthenticityError):
        CODEC.decode(Bitstream.parse(forged), PLACE)


def written(sections: list[Section], **changes: Any) -> bytes:
    info = StreamInfo.for_chunk(PLACE, SPEC, codec=CodecId.STATE, dtype=DType.FLOAT32, num_levels=1)
    return write(replace(info, **changes), sections, PLACE.seal_key)


def sections(layout: bytes, sizes: tuple[int, ...]) -> list[Section]:
    tensors = [Section(0, TENSOR, n, bytes(size)) for n, size in enumerate(sizes)]
    return [Section(0, LAYOUT, 0, layout), *tensors]


RIGHT = LAYOUT_OF_THREE.described
SIZES = tuple(one.size_bytes for one in LAYOUT_OF_THREE.parts)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (RIGHT, SIZES[:2]),
        (RIGHT, (*SIZES, 0)),
        (RIGHT, (SIZES[0] + 2, *SIZES[1:])),
        (RIGHT, (SIZES[0] // 2, *SIZES[1:])),
        (RIGHT.replace(b"bfloat16", b"xfloat16"), SIZES),
        (RIGHT[:-1], SIZES),
        (b"", SIZES),
    ],
)
def test_a_state_of_another_kind_is_no_state(layout: bytes, sizes: tuple[int, ...]) -> None:
    """Though it is sealed, as by an engine with another release."""
    stream = Bitstream.parse(written(sections(layout, sizes)))
    with pytest.raises(MismatchError):
        CODEC.decode(stream, PLACE)
    if len(layout) != len(RIGHT) or sizes != SIZES:
        assert not CODEC.fits(stream.header)  # seen before anything is fetched


def test_the_right_one_of_these_is_one() -> None:
    found = CODEC.decode(Bitstream.parse(written(sections(RIGHT, SIZES))), PLACE)
    assert all(not tensor.any() for tensor in found.tensors)


def test_a_chunk_is_no_state() -> None:
    data = written(sections(RIGHT, SIZES), codec=CodecId.EXACT)
    with pytest.raises(MismatchError, match="codec"):
        CODEC.decode(Bitstream.parse(data), PLACE)
    data = CODEC.encode(PLACE, state())
    with pytest.raises(MismatchError, match="chunk_key"):
        CODEC.decode(Bitstream.parse(data), CHUNK)


def test_layouts_are_bounded() -> None:
    with pytest.raises(UnsupportedError, match="at most"):
        StateLayout((StatePart(0, "recurrent", 0, (1, MAX_STATE_BYTES), "float32"),))
    with pytest.raises(UnsupportedError, match="int8"):
        StateLayout((StatePart(0, "recurrent", 0, (1, 4), "int8"),))
    with pytest.raises(MismatchError):
        State(LAYOUT_OF_THREE, state().tensors[:2])
