"""What joins ask of the GPU: chunks of any length, at other positions than they were learned at,
without their heads, and repaired. Runs as `test_klt_triton.py` does."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from kdn.blend.seams import Block, Seams
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec, Coded
from kdn.codec.klt import KltCodec
from tests.codec import klt_reference, test_klt_triton
from tests.codec.test_klt_triton import (
    BOUND,
    DEVICE,
    INTERPRETED,
    MIXED,
    PLAIN,
    SMALL,
    Case,
    decode,
    decoder_of,
    error,
    spec_of,
)
from tests.codec.test_klt_triton_encoding import check_as_good, encoded

pytestmark = test_klt_triton.pytestmark
ROPES = (SMALL, None) if INTERPRETED else MIXED
LENGTHS = [13] if INTERPRETED else [1, 13, 37, 63, 255, 256 + 1, 2 * 256 + 129]
LEVELS = 1 if INTERPRETED else 3
HEAD = 5
"""More than there are sinks."""


@cache
def case_of(num_tokens: int) -> Case:
    return Case(spec_of(ROPES), num_tokens)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_chunks_of_any_length_are_decoded(num_tokens: int) -> None:
    case = case_of(num_tokens)
    decoder = decoder_of(case)
    for levels in (4,) if INTERPRETED else (1, 2, 3, 4):
        out = case.poisoned()
        assert decode(case, decoder, out, levels) == []
        assert error(out, case.reference(levels)) < BOUND


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_chunks_of_any_length_are_encoded(num_tokens: int) -> None:
    case = case_of(num_tokens)
    items = [(one, case.cache.slice(one.start, one.end)) for one in case.chunks]
    check_as_good(case, items, encoded(case, items))


def rows_for(case: Case, num_slots: int) -> TokenRows:
    spec = case.spec
    shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
    sides = [list(torch.full(shape, 7.0, device=DEVICE)) for _ in range(2)]
    return TokenRows(*sides, range(spec.num_kv_heads))


def by_kernels(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever the device; returns how many chunks each launch gets."""
    assert isinstance(codec, KltCodec)
    monkeypatch.setattr(codec._gpu, "suits", lambda *_: True)
    monkeypatch.setattr(codec._restorer, "restore", None)  # the reference's last step
    sizes: list[int] = []
    # As rows name the device: with its number.
    device = torch.empty(0, device=DEVICE).device
    decoder = codec._gpu._decoder(device, range(codec.spec.num_kv_heads))
    run = decoder._run
    monkeypatch.setattr(
        decoder, "_run", lambda slab, *rest: (sizes.append(slab.num_chunks), run(slab, *rest))[1]
    )
    return sizes


def check_rows(rows: TokenRows, one: Coded, codec: KltCodec) -> None:
    """That a chunk's wanted tokens are in their slots, turned for where they stand."""
    own = one.slots >= 0
    slots, tokens = torch.from_numpy(one.slots[own]).to(DEVICE), torch.from_numpy(own)
    found = [torch.stack(list(side))[:, slots] for side in (rows.keys, rows.values)]
    expected = klt_reference.decode(codec, one.stream, one.chunk, one.levels, one.at)
    wanted = [side[:, tokens] for side in (expected.keys, expected.values)]
    assert error(KVCache(*found), KVCache(*wanted)) < BOUND


def test_a_chunk_at_many_places_is_one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins a context, as a piece's first chunk does. Only where its sinks are wanted does it
    take a slab for itself."""
    case = case_of(LENGTHS[0] if INTERPRETED else 37)
    stream, chunk, count = case.streams[0], case.chunks[0], case.chunks[0].num_tokens
    rows, sizes = rows_for(case, 5 * count), by_kernels(case.codec, monkeypatch)
    first = np.arange(count)
    batch = [Coded(stream, chunk, LEVELS, first)]
    for number, at in enumerate((300, 40_000, 77), 1):
        slots = np.where(first < HEAD, -1, first + number * count)
        batch.append(Coded(stream, chunk, LEVELS, slots, at))
    assert case.codec.decode_rows(batch, rows) == [None] * 4
    assert sum(sizes) >= 4
    assert len(sizes) == 1
    monkeypatch.undo()
    for one in batch:
        check_rows(rows, one, case.codec)
    used = {int(slot) for one in batch for slot in one.slots}
    for slot in set(range(5 * count)) - used:
        assert all(torch.all(one[slot] == 7) for one in (*rows.keys, *rows.values))


def seams_of(case: Case) -> Seams:
    rng, spec, blocks = torch.Generator().manual_seed(0), case.spec, []
    for layer in range(spec.num_layers):
        width = 2 * spec.num_kv_heads * spec.head_dim
        down = torch.randn(width, 3, generator=rng) * 0.3 / width**0.5
        up, bias = torch.randn(3, width, generator=rng), torch.randn(width, generator=rng)
        blocks.append(Block((layer, layer + 1), down, up, bias))
    return Seams(spec.fingerprint, blocks)


def test_a_repaired_codec_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(LENGTHS[0] if INTERPRETED else 300)
    codec = case.codec.repaired(seams_of(case))
    assert isinstance(codec, KltCodec)
    by_kernels(codec, monkeypatch)
    rows, slots = rows_for(case, 300), np.arange(300)
    slots[:HEAD] = -1
    batch = [
        Coded(stream, chunk, LEVELS, slots[chunk.start : chunk.end], 900 + chunk.start)
        for stream, chunk in zip(case.streams, case.chunks, strict=True)
    ]
    assert codec.decode_rows(batch, rows) == [None] * len(batch)
    monkeypatch.undo()
    for one in batch:
        check_rows(rows, one, codec)
        plain, repaired = (
            klt_reference.decode(which, one.stream, one.chunk, LEVELS)
            for which in (case.codec, codec)
        )
        assert error(plain, repaired) > 0.1


def test_repaired_sinks_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel repairs them."""
    case = case_of(LENGTHS[0])
    codec = case.codec.repaired(seams_of(case))
    assert isinstance(codec, KltCodec)
    monkeypatch.setattr(codec._gpu, "suits", lambda *_: True)
    stream, chunk = case.streams[0], case.chunks[0]
    rows, slots = rows_for(case, 16), np.arange(chunk.num_tokens)
    assert codec.decode_rows([Coded(stream, chunk, LEVELS, slots)], rows) == [None]
    monkeypatch.undo()
    expected = codec.decode(stream, chunk, levels=LEVELS)
    assert torch.equal(torch.stack(list(rows.keys)).cpu()[:, : chunk.num_tokens], expected.keys)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_launches_turn_keys_for_where_they_are_now() -> None:
    """Positions are what launches read, not what they are."""
    case = Case(spec_of((PLAIN,) * 4), 2 * 256 + 129)
    rows = rows_for(case, 1000)
    plain, repaired = case.codec, case.codec.repaired(seams_of(case))
    assert isinstance(repaired, KltCodec)
    for time in range(10):
        codec = repaired if time % 2 else plain
        shift = 0 if time == 4 else 1000 * time
        batch = []
        for stream, chunk in zip(case.streams, case.chunks, strict=True):
            slots = np.arange(chunk.start, chunk.end)
            slots[:HEAD] = -1
            batch.append(Coded(stream, chunk, 2, slots, chunk.start + shift))
        assert codec.decode_rows(batch, rows) == [None] * 3
        for one in batch:
            check_rows(rows, one, codec)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cache_on_the_device_is_decoded_into_where_it_begins() -> None:
    case = Case(spec_of((PLAIN,) * 4), 256 + 37)
    chunk, stream = case.chunks[1], case.streams[1]
    out = case.poisoned().slice(0, 37)
    out = KVCache(out.keys.clone(), out.values.clone(), 5000)
    found = case.codec.decode(stream, chunk, levels=3, out=out, at=5000)
    assert error(found, klt_reference.decode(case.codec, stream, chunk, 3, 5000)) < BOUND
