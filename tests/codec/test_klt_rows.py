"""The GPU decoder into engines' memory: every arrangement takes the same values.

Symbols are decoded once; only the last kernel, which writes values, runs for every arrangement. So
Triton's interpreter takes a minute or two: see `test_klt_triton.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Coded
from kdn.codec.format import Bitstream
from kdn.codec.klt.gpu_input import Slab
from kdn.codec.klt.gpu_target import Target
from kdn.errors import ChecksumError, MismatchError
from tests.codec import test_klt_triton
from tests.codec.test_klt_triton import DEVICE, INTERPRETED, MIXED, PLAIN, Case, decode, decoder_of

pytestmark = test_klt_triton.pytestmark
SLOTS, TOKENS, DIM = 64, 16, 16
SPEC = test_klt_triton.ModelSpec(2, 2, DIM, 1000, (PLAIN,) * 2, (None,) * 2, bytes(range(16)))


@dataclass
class Decoded:
    """A context in a plain cache, and what the last kernel wrote it from."""

    case: Case
    plain: KVCache
    decoder: Any
    calls: list[tuple[Any, ...]]

    @property
    def slab(self) -> Slab:
        found: Slab = next(one for one in self.calls[0] if isinstance(one, Slab))
        return found

    def write(self, rows: TokenRows, slots: np.ndarray, decoder: Any = None) -> Target:
        """The last kernel again, into other memory; another decoder has no sinks."""
        target = Target.of_rows(rows)
        for args in self.calls:
            self.slab.slots[: len(slots)] = torch.from_numpy(slots)
            own = [target if isinstance(one, Target) else one for one in args]
            if decoder is not None:
                sinks = next(i for i, one in enumerate(own) if one is self.slab) + 1
                own[sinks] = None
            (decoder or self.decoder)._restore(*own)
        return target


@pytest.fixture(scope="module")
def decoded() -> Decoded:
    case = Case(SPEC, TOKENS)
    decoder, plain, calls = decoder_of(case), case.poisoned(), []
    restore = decoder._restore
    decoder._restore = lambda *args: calls.append(args) or restore(*args)
    assert decode(case, decoder, plain, 1) == []
    decoder._restore = restore
    return Decoded(case, plain, decoder, calls)


def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 7.0, device=DEVICE).to(dtype)


def side_by_side(dtype: torch.dtype = torch.float32) -> TokenRows:
    """vLLM: blocks of tokens, of each head a key and then a value."""
    layers = [full(SLOTS, 2, 2 * DIM, dtype=dtype) for _ in range(2)]
    return TokenRows([m[..., :DIM] for m in layers], [m[..., DIM:] for m in layers], range(2))


def heads_first() -> TokenRows:
    """transformers: [heads, tokens, channels]."""
    keys, values = (full(2, 2, SLOTS, DIM).transpose(1, 2) for _ in range(2))
    return TokenRows(list(keys), list(values), range(2))


def pair_first() -> TokenRows:
    """FlashAttention: [2, blocks, tokens, heads, channels]."""
    layers = [full(2, SLOTS, 2, DIM) for _ in range(2)]
    return TokenRows([m[0] for m in layers], [m[1] for m in layers], range(2))


def different_strides() -> TokenRows:
    plain, turned = pair_first(), heads_first()
    return TokenRows(plain.keys, turned.values, range(2))


def unaligned() -> TokenRows:
    """One value off, so that no vector is written whole."""
    flat = [full(SLOTS * 2 * DIM + 1)[1:].view(SLOTS, 2, DIM) for _ in range(4)]
    return TokenRows(flat[:2], flat[2:], range(2))


def overlapping() -> TokenRows:
    """Blocks of 4 tokens, each head's tokens together: a slot every DIM values."""
    flat = [full(SLOTS * 2 * DIM) for _ in range(4)]
    slots = 2 * SLOTS - 4
    views = [one.as_strided((slots, 2, DIM), (DIM, 4 * DIM, 1)) for one in flat]
    return TokenRows(views[:2], views[2:], range(2))


def copy_of(rows: TokenRows, make: Callable[[], TokenRows]) -> TokenRows:
    """The same arrangement, written by the reference."""
    other = make()
    return TokenRows(other.keys, other.values, rows.heads, rows.key_scales, rows.value_scales)


ARRANGEMENTS = [side_by_side, heads_first, pair_first, different_strides, unaligned, overlapping]


@pytest.mark.parametrize("make", ARRANGEMENTS)
def test_every_arrangement_takes_the_same_values(
    decoded: Decoded, make: Callable[[], TokenRows]
) -> None:
    rows, expected = make(), make()
    slots = np.random.default_rng(1).permutation(SLOTS)[:TOKENS]
    if make is overlapping:
        slots = slots // 4 * 8 + slots % 4  # of a block's first head
    slots[3] = -1
    target = decoded.write(rows, slots)
    assert target.is_aligned == (make is not unaligned)
    expected.write(decoded.plain, slots)
    for side in ("keys", "values"):
        for found, wanted in zip(getattr(rows, side), getattr(expected, side), strict=True):
            assert torch.equal(found, wanted)


def test_quantised_memory_holds_values_over_scales(decoded: Decoded) -> None:
    plain, other = side_by_side(torch.float8_e4m3fn), side_by_side(torch.float8_e4m3fn)
    scales = ((0.03, 0.5), (0.02, 1e-7))  # the last is too small: values end at the largest
    slots = np.arange(TOKENS)
    rows, expected = (TokenRows(m.keys, m.values, range(2), *scales) for m in (plain, other))
    decoded.write(rows, slots)
    expected.write(decoded.plain, slots)
    for side in ("keys", "values"):
        for found, wanted in zip(getattr(rows, side), getattr(expected, side), strict=True):
            a, b = found.float(), wanted.float()
            # The interpreter does not carry when it rounds up to a power of two: 1.97 becomes 1.
            assert INTERPRETED or torch.allclose(a, b, rtol=0.13, atol=0.02)
            assert float((a == b).float().mean()) > 0.95
    assert torch.all(rows.values[1][:TOKENS].float().abs() == 448)


def test_a_share_of_heads_is_that_part_of_all(decoded: Decoded) -> None:
    whole = side_by_side()
    rows = TokenRows([k[:, 1:] for k in whole.keys], [v[:, 1:] for v in whole.values], range(1, 2))
    decoded.write(rows, np.arange(TOKENS), decoder_of(decoded.case, range(1, 2)))
    sinks = decoded.case.codec.profile.num_sinks
    for layer in range(2):
        for found, wanted in ((rows.keys, decoded.plain.keys), (rows.values, decoded.plain.values)):
            a, b = found[layer][sinks:TOKENS, 0], wanted[layer, sinks:, 1]
            assert torch.allclose(a, b, atol=1e-4)
        assert torch.all(whole.keys[layer][:, 0] == 7)


def test_of_a_chunk_that_failed_nothing_is_written(decoded: Decoded) -> None:
    rows = side_by_side()
    decoded.slab.status[0] = 1
    decoded.write(rows, np.arange(TOKENS))
    decoded.slab.status[0] = 0
    assert all(torch.all(one == 7) for one in (*rows.keys, *rows.values))


def test_predictions_are_those_of_the_reference(decoded: Decoded) -> None:
    from kdn.codec.klt.gpu_memory import Fresh
    from kdn.codec.klt.known_triton import place_latents

    synthesis, latents = decoded.decoder.synthesis, decoded.decoder._latents
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1001, (64, 3))).to(DEVICE)
    wanted = (latents(ids) * synthesis.latent_factor).half()
    sums = latents.products_in(64, Fresh(DEVICE))(ids)
    rank, width, sinks = latents.rank, synthesis.num_latents, 3
    out = torch.full((64, width + 8), 7.0, dtype=torch.float16, device=DEVICE)
    place_latents[(8,)](
        sums, latents.scale, synthesis.latent_factor, out, sums.shape[1], out.shape[1], rank,
        latents.num_fine, width, sinks, BT=8, BR=64,
    )  # fmt: skip
    assert torch.allclose(out[sinks:, :rank], wanted[sinks:], rtol=1e-3)
    assert torch.all(out[:sinks, :width] == 0)
    assert torch.all(out[sinks:, rank:width] == 0)
    assert torch.all(out[:, width:] == 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_angles_are_those_of_float64(decoded: Decoded, dtype: torch.dtype) -> None:
    """Also far into a context."""
    positions = torch.arange(16, device=DEVICE) * 65_537
    angles = tuple(torch.empty((16, 8), dtype=dtype, device=DEVICE) for _ in range(2))
    decoded.decoder._turn(positions, angles)
    exact = positions.double()[:, None] * decoded.decoder._turns[0]
    bound = 2**-24 if dtype == torch.float32 else 2**-11
    for found, wanted in zip(angles, (exact.cos(), exact.sin()), strict=True):
        assert float((found.double() - wanted).abs().max()) < bound


def spoilt(case: Case) -> Bitstream:
    header, data = case.streams[0].header, bytearray(case.data[0])
    data[header.size_bytes] ^= 1
    return Bitstream.of(header, data)


def on_this_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the interpreter's CPU were a GPU."""
    monkeypatch.setattr(case.codec._gpu, "suits", lambda *_: True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what a spoilt byte decodes to
def test_a_batch_is_decoded_into_an_engines_memory(
    decoded: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The good chunk by kernels; the others are named, and leave memory as it was."""
    case, rows, expected = decoded.case, side_by_side(), side_by_side()
    on_this_device(case, monkeypatch)
    monkeypatch.setattr(case.codec._restorer, "restore", None)  # the reference's last step
    stream, chunk, slots = case.streams[0], case.chunks[0], np.arange(TOKENS)
    other = cut(np.arange(32), Namespace(SPEC.fingerprint, case.codec.profile_id))[0]
    batch = [
        Coded(stream, chunk, 1, slots),
        Coded(stream, chunk, 1, slots + SLOTS),
        Coded(stream, other, 1, np.arange(32)),
        Coded(spoilt(case), chunk, 1, slots + TOKENS),
    ]
    good, far, wrong, broken = case.codec.decode_rows(batch, rows)
    assert good is None
    assert isinstance(far, MismatchError)
    assert isinstance(wrong, MismatchError)
    assert isinstance(broken, ChecksumError)
    expected.write(decoded.plain, slots)
    for found, wanted in zip(rows.keys, expected.keys, strict=True):
        assert torch.equal(found, wanted)
    on_gpu, pinned = case.codec.gpu_memory_bytes()
    assert on_gpu > 0
    assert pinned > 0


def test_what_kernels_cannot_do_the_reference_writes(
    decoded: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, rows = decoded.case, side_by_side()
    on_this_device(case, monkeypatch)
    monkeypatch.setattr(case.codec._gpu, "_can", lambda *_: False)
    slots = np.arange(TOKENS) + 5
    assert case.codec.decode_rows([Coded(case.streams[0], case.chunks[0], 1, slots)], rows) == [
        None
    ]
    wanted = case.codec.decode(case.streams[0], case.chunks[0], levels=1)
    assert torch.equal(rows.values[1][5 : 5 + TOKENS].cpu(), wanted.values[1])


def test_without_memory_on_the_gpu_the_reference_writes(
    decoded: Decoded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def take_too_much(*_: object) -> None:
        raise torch.OutOfMemoryError

    case, rows = decoded.case, side_by_side()
    on_this_device(case, monkeypatch)
    monkeypatch.setattr(case.codec._gpu, "_decoder", take_too_much)
    one = Coded(case.streams[0], case.chunks[0], 1, np.arange(TOKENS))
    assert case.codec.decode_rows([one], rows) == [None]
    assert "too little memory" in caplog.text
    assert not torch.any(rows.keys[0][:TOKENS] == 7)


@pytest.mark.skipif(INTERPRETED, reason="slow")
@pytest.mark.parametrize("ropes", [(PLAIN,) * 4, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("levels", [1, 3, 4])
def test_two_loads_at_once_and_several_slabs(
    ropes: Any, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread's values are what one alone decodes."""
    case = Case(test_klt_triton.spec_of(ropes), 1024 + 240)
    monkeypatch.setattr("kdn.codec.klt.decoder_triton.SLAB_CHUNKS", 2)
    plain = case.poisoned(torch.bfloat16)
    case.codec.decode_all(case.streams, case.chunks, plain, levels=levels)
    found: list[Any] = [None] * 4

    def load(number: int) -> None:
        layers = [full(2000, 4, 2 * DIM, dtype=torch.bfloat16) for _ in ropes]
        rows = TokenRows([m[..., :DIM] for m in layers], [m[..., DIM:] for m in layers], range(4))
        places = np.random.default_rng(number).permutation(2000)[: 1024 + 240]
        event = torch.cuda.current_stream().record_event() if DEVICE.type == "cuda" else None
        batch = [
            Coded(stream, chunk, levels, places[chunk.start : chunk.end])
            for stream, chunk in zip(case.streams, case.chunks, strict=True)
        ]
        errors = case.codec.decode_rows(batch[::-1], rows, after=event)
        found[number] = (rows, places, errors)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=120)
    for rows, places, errors in found:
        assert errors == [None] * 5
        for layer in range(4):
            for side, wanted in ((rows.keys, plain.keys), (rows.values, plain.values)):
                assert torch.equal(side[layer][torch.from_numpy(places).to(DEVICE)], wanted[layer])


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_replayed_launches_write_the_same_values() -> None:
    """Slabs of many sizes, over and over into the same memory: with the beginning of a context and
    without, whole chunks and short ones, and a stream that is damaged."""
    case = Case(test_klt_triton.spec_of(MIXED), 9 * 256 + 48)
    plain = case.poisoned(torch.bfloat16)
    case.codec.decode_all(case.streams, case.chunks, plain, levels=2)
    layers = [full(4000, 4, 2 * DIM, dtype=torch.bfloat16) for _ in MIXED]
    rows = TokenRows([m[..., :DIM] for m in layers], [m[..., DIM:] for m in layers], range(4))
    rng = np.random.default_rng(0)
    for number in range(30):
        first, last = [(0, 10), (0, 9), (2, 7), (4, 6), (3, 10), (0, 1)][number % 6]
        for one in layers:
            one.fill_(7.0)
        places = rng.permutation(4000)[: case.chunks[-1].end]
        both = zip(case.streams[first:last], case.chunks[first:last], strict=True)
        batch = [Coded(s, chunk, 2, places[chunk.start : chunk.end]) for s, chunk in both]
        assert case.codec.decode_rows(batch, rows) == [None] * len(batch)
        own = slice(case.chunks[first].start, case.chunks[last - 1].end)
        for layer in range(4):
            for side, wanted in ((rows.keys, plain.keys), (rows.values, plain.values)):
                found = side[layer][torch.from_numpy(places[own]).to(DEVICE)]
                assert torch.equal(found, wanted[layer][own]), number
            untouched = int((layers[layer] == 7.0).all(dim=(1, 2)).sum())
            assert untouched == 4000 - (own.stop - own.start), number
    [decoder] = case.codec._gpu._decoders.values()
    assert sum(one.graph is not None for one in decoder._replays._known.values()) >= 5
