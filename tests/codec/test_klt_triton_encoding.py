"""The GPU encoder against the reference: equal integers give equal bytes; streams are as good, for
every model; what cannot be coded is its own chunk's affair. Runs as `test_klt_triton.py` does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream, write_levels
from kdn.codec.klt import KltCodec
from kdn.codec.klt.analysis import Analysis
from kdn.codec.klt.gpu_encoding import BATCH_BYTES, GpuEncoding
from kdn.codec.klt.kinds import KIND_MEANS, KIND_SINKS, KIND_TOKENS
from kdn.codec.klt.means import in_rows
from kdn.errors import KdnError, MismatchError, UnsupportedError
from tests.codec.test_klt_triton import (
    DEVICE,
    INTERPRETED,
    MIXED,
    PLAIN,
    SMALL,
    Case,
    error,
    pytestmark,
    spec_of,
)

__all__ = ["pytestmark"]

Item = tuple[Chunk, KVCache]


def encoded(case: Case, items: list[Item], size: int = BATCH_BYTES) -> list[bytes | KdnError]:
    """By the kernels, wherever they run."""
    encoding = GpuEncoding(case.spec, case.codec.profile)
    moved = [(chunk, on_device(cache)) for chunk, cache in items]
    found = encoding.encode(moved, size)
    return [
        one
        if isinstance(one, KdnError)
        else write_levels(case.codec._info(*item), *one, item[0].seal_key)
        for item, one in zip(items, found, strict=True)
    ]


def on_device(cache: KVCache) -> KVCache:
    return KVCache(cache.keys.to(DEVICE), cache.values.to(DEVICE), cache.start, cache.valid_from)


def restored(case: Case, data: bytes, chunk: Chunk, levels: int) -> KVCache:
    return case.codec.decode(Bitstream.parse(data), chunk, levels=levels)


def check_as_good(case: Case, items: list[Item], found: list[bytes | KdnError]) -> None:
    """At every level, decoded by the reference: no larger an error, and hardly more bytes. (Of a
    few tokens, one that is rounded the other way shows.)"""
    for (chunk, cache), data in zip(items, found, strict=True):
        assert isinstance(data, bytes)
        own = case.codec.encode(chunk, cache)
        assert len(data) < 1.02 * len(own) + 40
        assert Bitstream.parse(data).info == Bitstream.parse(own).info
        exact = KVCache(cache.keys.double(), cache.values.double(), cache.start)
        for levels in range(1, case.codec.num_levels + 1):
            ours, theirs = (restored(case, one, chunk, levels) for one in (data, own))
            absent = [v - cache.start for v in cache.valid_from]
            for layer, count in enumerate(absent):
                assert torch.all(ours.keys[layer, :count] == 0)
            most = 1.02 if chunk.num_tokens > 32 else 1.1
            assert error(ours, exact) < most * error(theirs, exact) + 1e-6


@pytest.mark.parametrize("step", [0.5, 0.01])
def test_equal_integers_give_the_references_bytes(step: float) -> None:
    """Of every level and kind, means, sinks and step classes; the finer step has escapes."""
    if INTERPRETED and step < 0.5:
        pytest.skip("slow")
    from kdn.codec.klt.encoder_triton import GpuEncoder

    ropes = (SMALL, SMALL) if INTERPRETED else (PLAIN,) * 4
    case = Case(spec_of(ropes), 48 if INTERPRETED else 256, step, means=True)
    codec, chunk, stream = case.codec, case.chunks[0], case.streams[0]
    encoder = GpuEncoder(case.spec, codec.profile, DEVICE)
    analysis = codec.analyser.analyse(chunk, case.cache)
    levels = [codec.analyser.quantise(g, analysis) for g in range(len(codec.profile.groups))]
    count = chunk.num_tokens
    classes = torch.full((256,), 2, dtype=torch.uint8, device=DEVICE)
    classes[:count] = torch.from_numpy(analysis.classes).to(DEVICE)

    def plane(values: list[np.ndarray], rows: int, width: int = 256) -> torch.Tensor:
        out = torch.zeros((1, len(values), rows, width), dtype=torch.int16)
        for g, own in enumerate(values):
            out[0, g, : len(own), : own.shape[1]] = torch.from_numpy(own.astype(np.int16))
        return out.to(DEVICE)

    planes = torch.stack([plane([own[k] for own in levels], encoder.coding.num_rows)
                          for k in range(3)])  # fmt: skip
    widths = encoder.coding.correction.sizes
    errors = plane([own[3] for own in levels], max(widths))
    batch = encoder.batch([(chunk, on_device(case.cache))])
    sheet, rooms, means_rooms, sinks_room, classes_room = encoder._rooms(batch)
    words = torch.empty(sheet.num_words, dtype=torch.int16, device=DEVICE)
    begins = torch.zeros(sheet.num_sections, dtype=torch.int32, device=DEVICE)
    jobs = [encoder._pushing(part, room, planes, errors) for part, room in rooms]
    encoder._push_all(jobs, classes, batch.tokens_of, words, begins)
    sinks = plane(analysis.sinks, max(widths), 32)
    encoder._push_sinks(batch, sinks, sinks_room, words, begins)
    for tables, room in zip(encoder.tables.means, means_rooms, strict=True):
        own = [means_of(codec, analysis, tables.part.level, g) for g in range(len(levels))]
        encoder._push_means(tables, plane(own, max(tables.part.sizes), 32), room, words, begins)
    encoder._push_classes(batch, classes, classes_room, words, begins)
    filled = sheet.filled(begins.cpu().numpy(), [True])
    host, places = words.cpu().numpy().view(np.uint8), 2 * filled.places
    entries = stream.header.entries
    assert [(e.level << 24 | e.group << 8 | e.kind) for e in entries] == filled.code.tolist()
    assert {KIND_SINKS, KIND_TOKENS, KIND_MEANS} <= {e.kind for e in entries}
    for e, first, length in zip(entries, places[0], places[1], strict=True):
        own = bytes(stream.section(e.level, e.group, e.kind))
        assert host[first : first + length].tobytes() == own, e


def means_of(codec: KltCodec, analysis: Analysis, level: int, group: int) -> np.ndarray:
    exact = codec.means.exact(level, group, analysis.groups[group].exact, analysis.classes)
    return in_rows(codec.means.round(exact))


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("ropes", [(SMALL, None, SMALL)] if INTERPRETED else [(PLAIN,) * 4, MIXED])
def test_any_chunks_of_any_model(ropes: tuple, means: bool) -> None:  # type: ignore[type-arg]
    """Groups of different sizes, layers that turn differently, tokens that a layer lacks, the same
    beginning twice, and one that is not like all the others."""
    case = Case(spec_of(ropes), 32 if INTERPRETED else 800, means=means)
    first = case.chunks[0]
    whole = case.cache.slice(first.start, first.end)
    windowed = replace(whole, valid_from=(5, *(0,) * (len(ropes) - 1)))
    windowed.keys[0, :5] = 0
    windowed.values[0, :5] = 0
    broken = KVCache(whole.keys.clone(), whole.values.clone())
    broken.values[1, 7, 1, 2] = float("nan")
    items = [(first, windowed), (first, broken)]
    if not INTERPRETED:
        far = KVCache(1e6 * whole.keys, 1e6 * whole.values)
        items += [(first, far), (first, whole)]
        for chunk in (case.chunks[-1], case.chunks[1]):
            items.append((chunk, case.cache.slice(chunk.start, chunk.end)))
        items.append((case.chunks[1], whole))
    found = encoded(case, items)
    assert isinstance(found[1], UnsupportedError)
    assert "finite" in str(found[1])
    if not INTERPRETED:
        assert isinstance(found[2], UnsupportedError)
        assert "calibrated" in str(found[2])
        assert isinstance(found[6], MismatchError)
        assert encoded(case, items, 1)[3] == found[3]  # one at a time: the same bytes
    good = [i for i, one in enumerate(found) if isinstance(one, bytes)]
    assert len(good) == (1 if INTERPRETED else 4)
    check_as_good(case, [items[i] for i in good], [found[i] for i in good])


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_codec_encodes_where_the_cache_is(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, all of a context, or a batch; caches of any layout, when their event has passed."""
    case = Case(spec_of((PLAIN,) * 4), 600)
    monkeypatch.setattr(case.codec.analyser, "analyse", None)
    strided = [side.to(DEVICE, dtype).permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
               for side in (case.cache.keys, case.cache.values)]  # fmt: skip
    cache = KVCache(*strided, ready=torch.cuda.current_stream().record_event())
    together = case.codec.encode_all(case.chunks, cache)
    items = [(chunk, cache.slice(chunk.start, chunk.end)) for chunk in case.chunks]
    assert case.codec.encode_batch(items[::-1]) == together[::-1]
    assert case.codec.encode(*items[1]) == together[1]
    with pytest.raises(MismatchError):
        case.codec.encode(case.chunks[0], cache.slice(0, 16))


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_replayed_launches_give_the_same_bytes() -> None:
    """Whole batches and parts of one, one after the other; what was there before leaves no trace,
    not even a value that cannot be coded."""
    case = Case(spec_of(MIXED), 8 * 256, means=True)
    codec, every = case.codec, []
    for scale in (1.0, 0.5):
        cache = on_device(KVCache(scale * case.cache.keys, scale * case.cache.values))
        launched = codec.encode_all(case.chunks, cache)
        items = [(chunk, cache.slice(chunk.start, chunk.end)) for chunk in case.chunks]
        broken = KVCache(items[2][1].keys.clone(), items[2][1].values, items[2][1].start)
        broken.keys[0, 3] = float("inf")
        assert codec.encode_batch(items[1:7]) == launched[1:7]  # four and two
        failed, *right = codec.encode_batch([(items[2][0], broken), *items[4:7]])
        assert isinstance(failed, UnsupportedError)
        assert right == launched[4:7]
        assert codec.encode_batch(items[3:4]) == launched[3:4]
        every.append(launched)
    assert every[0] != every[1]
    assert any(codec._gpu_encoding._replays.values())


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_memory_is_what_is_told() -> None:
    from kdn.codec.klt.encoder_triton import GpuEncoder

    case = Case(spec_of((PLAIN,) * 4), 1024, means=True)
    encoder = GpuEncoder(case.spec, case.codec.profile, DEVICE)
    cache = on_device(case.cache)
    items = [(chunk, cache.slice(chunk.start, chunk.end)) for chunk in case.chunks]
    encoder.encode(encoder.batch(items))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    encoder.encode(encoder.batch(items))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * encoder.memory_bytes(4) + (1 << 20)
