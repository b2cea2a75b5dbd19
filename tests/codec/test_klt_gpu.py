"""What surrounds the Triton kernels and needs none of them: the same on any machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kdn.bench.gpu import overlapped, passes
from kdn.bench.gpu_model import STAGES, Synthetic
from kdn.cache.keys import Namespace, cut
from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.duals import dense_rows
from kdn.codec.klt.gpu_input import token_rows
from kdn.codec.klt.gpu_output import Sheet
from kdn.codec.klt.gpu_stages import Parts, Stages
from kdn.codec.klt.gpu_tables import (
    BLOCK_K,
    NEVER,
    Coding,
    Pairs,
    Synthesis,
    base_bounds,
    base_intervals,
    digit_bounds,
    padded_thresholds,
)
from kdn.codec.klt.kinds import KIND_CORRECTION, KIND_ENTERING, KIND_SINKS
from kdn.codec.klt.latents import Latents
from kdn.codec.klt.transform import GroupTransform
from kdn.errors import MismatchError, UnsupportedError
from tests.codec.klt_profile import make_profile, parts

CPU = torch.device("cpu")
PLAIN = RopeSpec(tuple(10000.0 ** (-i / 8) for i in range(8)))
NEIGHBOURS = RopeSpec(PLAIN.inv_freq, 1.3, True)
PARTIAL = RopeSpec((1.0, 0.3, 0.05))


def spec_of(*ropes: RopeSpec | None) -> ModelSpec:
    return ModelSpec(len(ropes), 4, 16, 1000, ropes, (None,) * len(ropes), bytes(16))


@pytest.fixture(scope="module")
def codec() -> KltCodec:
    spec = spec_of(PLAIN, None, NEIGHBOURS, PARTIAL)
    return KltCodec(spec, make_profile(spec))


def test_packed_bounds_find_every_slots_symbol(codec: KltCodec) -> None:
    """As the kernel does: in each half, `slot + 1 - bound` is above zero if a bound is reached."""
    cdf = codec.profile.levels[0].entering.cdf[:40]
    bounds, intervals = base_bounds(cdf), base_intervals(cdf).view(np.uint32)
    slots = np.random.default_rng(0).integers(0, 1 << 14, 500).astype(np.uint32)
    for table in range(len(cdf)):
        halves = bounds[:, table].copy().view("<i2")[:, None]
        symbol = (slots.astype(np.int16) + halves > 0).sum(axis=0)
        wanted = np.searchsorted(cdf[table], slots, side="right") - 1
        assert np.array_equal(symbol, wanted)
        found = intervals[wanted, table]
        assert np.array_equal(found & 0xFFFF, cdf[table][wanted])
        assert np.array_equal(found >> 16, cdf[table][wanted + 1] - cdf[table][wanted])


def test_digit_bounds_and_thresholds(codec: KltCodec) -> None:
    tables = codec.profile.levels[1].digits
    assert tables is not None
    packed = digit_bounds(tables.cdf).view(np.uint32)
    assert np.array_equal(packed & 0xFFFF, tables.cdf[:, 1])
    assert np.array_equal(packed >> 16, tables.cdf[:, 2])
    padded = padded_thresholds([np.ones((2, 7), np.int32), np.full((3, 7), 5, np.int32)])
    assert padded.shape == (2, 3, 8)
    assert np.all(padded[0, 2] == NEVER)
    assert np.all(padded[:, :, 7] == NEVER)


@pytest.mark.parametrize("rope", [None, PLAIN, NEIGHBOURS, PARTIAL])
def test_pairs_hold_every_channel_once(rope: RopeSpec | None) -> None:
    pairs = Pairs.of(spec_of(rope, rope), 4, 64)
    both = np.concatenate([pairs.first[1], pairs.second[1]])
    assert np.array_equal(np.sort(both), np.arange(64))
    turned = pairs.frequency[1] >= 0
    assert turned.sum() == 4 * (len(rope.inv_freq) if rope else 0)
    if rope is not None:
        apart = 1 if rope.interleaved else len(rope.inv_freq)
        assert np.all(pairs.second[1][turned] - pairs.first[1][turned] == apart)
    assert pairs.contiguous == (rope is PLAIN)


def test_pairs_are_padded_to_whole_tiles() -> None:
    pairs = Pairs.of(spec_of(PLAIN), 3, 64)
    assert pairs.first.shape == (1, 32)
    assert np.all(pairs.first[0, 24:] == -1)
    assert not pairs.contiguous


def profile_of(spec: ModelSpec, stages: Sequence[int]) -> Profile:
    """With groups of one stage or of two."""
    if stages == (1, 1):
        return make_profile(spec)
    meta, tensors = parts(spec, leading=96)
    plain = parts(spec)[1]
    for index in (i for i, count in enumerate(stages) if count == 1):
        meta["leading"][index] = []
        for name in ("basis", "basis_scale"):
            tensors[f"g{index}.{name}"] = plain[f"g{index}.{name}"]
    return Profile.build(meta, tensors)


@pytest.mark.parametrize("num_stages", [(1, 1), (2, 2), (1, 2)])
def test_the_product_is_the_references_sum(num_stages: tuple[int, int]) -> None:
    """Latents and components times B: prediction and synthesis of `transform.py`, in one stage or
    in two."""
    spec, rng = spec_of(PLAIN, None, NEIGHBOURS, PARTIAL), np.random.default_rng(1)
    profile = profile_of(spec, num_stages)
    codec = KltCodec(spec, profile)
    coding = Coding.of(profile, CPU)
    stages = Stages.of(profile, CPU, coding.num_rows)
    assert (stages is None) == (num_stages == (1, 1))
    own = Synthesis.of(spec, profile, CPU, range(4), coding.num_rows, stages)
    chunk = cut(rng.integers(0, 1000, 32), Namespace(spec.fingerprint, codec.profile_id))[0]
    latents = Latents(profile, CPU)(torch.from_numpy(token_rows(chunk, spec.vocab_size)))
    known = codec._predict(chunk)
    for index, group in enumerate(profile.groups):
        count = len(group.scale)
        amounts = rng.normal(size=(32, count)).astype(np.float32) * 5
        a = torch.zeros((32, own.num_latents + coding.num_rows))
        a[:, : latents.shape[1]] = latents * own.latent_factor
        scaled = torch.from_numpy(amounts) * own.row_factor[index, :count]
        a[:, own.num_latents : own.num_latents + count] = scaled
        rows = slice(*(n * own.block_columns for n in own.tiles_before[index : index + 2]))
        source = own.source[rows]
        if stages is None or num_stages[index] == 1:
            found = a @ own.matrix[rows, : a.shape[1]].float().T
        else:
            layers = (source - group.columns.start) // 64 % 2
            found = staged_sums(stages, index, a, own.num_latents, own.matrix[rows], layers)
        found = found * own.scale[rows] + own.bias[rows]
        basis = dense_rows(group.basis_tensors, CPU, group.leading).numpy()
        wanted = (amounts * profile.finest_step) @ basis / group.weight
        wanted = torch.from_numpy(wanted) + GroupTransform(group, profile).predict(known)
        assert sorted(source.tolist()) == list(range(group.columns.start, group.columns.stop))
        wanted = wanted[:, source - group.columns.start]
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3


def staged_sums(
    stages: Stages, index: int, a: torch.Tensor, latents: int, b: torch.Tensor, layers: torch.Tensor
) -> torch.Tensor:
    """As `restore` sums them: of each column (in which of the group's layers?) the prediction,
    precise components, and the leading ones of its layer."""
    packed = torch.cat([a, torch.full((len(a), stages.width), torch.nan)], 1).half()
    stages.lead(packed, range(index, index + 1), Parts(latents, a.shape[1]), a.shape[1] - latents)
    shared = latents + BLOCK_K * stages.fine_blocks[index]
    found = torch.empty((len(a), len(b)))
    for layer in range(2):
        begin = a.shape[1] + int(stages.begins[2 * index + layer])
        end = begin + BLOCK_K * int(stages.blocks[2 * index + layer])
        used = torch.cat([packed[:, :shared], packed[:, begin:end]], 1).float()
        chosen = layers == layer
        found[:, chosen] = used @ b[chosen, : used.shape[1]].float().T
        assert not b[chosen, used.shape[1] :].any()
    return found


def test_tokens_know_those_before_them(codec: KltCodec) -> None:
    chunks = cut(np.arange(300) % 999, Namespace(bytes(16), bytes(16)))
    first, second = (token_rows(chunk, 1000) for chunk in chunks)
    assert first[:3].tolist() == [[0, 1000, 1000], [1, 0, 1000], [2, 1, 0]]
    assert second[0].tolist() == [256, 255, 254]
    with pytest.raises(MismatchError):
        token_rows(chunks[1], 200)


def test_a_synthetic_model_may_have_two_stages() -> None:
    """What `kdn bench gpu` decodes: its chunks are coded as its profile says."""
    spec = ModelSpec(4, 2, 16, 1000, (PLAIN,) * 4, (None,) * 4, bytes(range(16)))
    rate = replace(STAGES, kept=0.75, layers=2, leading=0.5)
    synthetic = Synthetic.build(spec, 4, 0, CPU, sample_chunks=1, rate=rate)
    profile = synthetic.codec.profile
    assert profile.meta["leading"] == [[24, 40], [24, 40]]
    assert [group.layers for group in profile.groups] == [(0, 2), (2, 4)]
    chunk = synthetic.context(512, 1)[1]
    (cache,) = synthetic.caches([chunk], 2)
    stream = Bitstream.parse(synthetic.codec.encode(chunk, cache))
    found = synthetic.codec.decode(stream, chunk, levels=3)
    assert (found.values - cache.values).norm() < 0.5 * cache.values.norm()


def test_each_shape_that_was_measured_has_its_bar() -> None:
    row = {"decode": {"3": {"ms": 4.6}}, "repaired_ms": 4.9}
    assert passes({}) == passes({"8b, stages": {"contexts": {"2048": row}}}) == {}
    assert list(passes({"8b, stages": {"contexts": {"8192": row}}}).values()) == [True]
    slow = {"decode": {"3": {"ms": 5.1}}, "repaired_ms": 9.9}
    both = {name: {"contexts": {"8192": slow}} for name in ("8b, grouped", "8b, stages")}
    assert list(passes(both).values()) == [False, False, False]


def test_decoding_overlaps_arrival() -> None:
    """A decoder as fast as the link adds one chunk; a slow one is what is waited for."""
    assert overlapped(10, 1.0, {1: 0.5}) == pytest.approx(10.5)
    assert overlapped(4, 1.0, {1: 3.0}) == pytest.approx(13.0)
    assert overlapped(4, 1.0, {1: 3.0, 2: 3.0}) == pytest.approx(10.0)


def test_a_cpu_machine_never_imports_triton() -> None:
    imports = "import sys, kdn.codec.klt, kdn.codec.klt.device, kdn.bench.gpu"
    code = f"{imports}; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_sections_are_copied_chunk_by_chunk_in_a_streams_order() -> None:
    """Rooms are filled from their ends; groups without rows and unwanted chunks are left out."""
    sheet = Sheet()
    last = sheet.add(1, KIND_CORRECTION, (8, 8), range(3), 20)
    first = sheet.add(0, KIND_ENTERING, (8, 0), range(3), 5)
    sinks = sheet.add(0, KIND_SINKS, (8, 8), (1,), 7)
    rooms = (last, first, sinks)
    assert [room.capacity for room in rooms] == [32, 16, 16]
    assert [room.first_section % 4 for room in rooms] == [0, 0, 0]
    begins = np.zeros(sheet.num_sections, np.int32)
    words = np.zeros(sheet.num_words, np.int16)
    for room in rooms:
        for index in range(room.num_sections):
            length = 1 + room.level + index
            begins[room.first_section + index] = room.capacity - length
            end = room.first_word + (index + 1) * room.capacity
            words[end - length : end] = 100 * (room.level + 1) + 10 * room.kind + index
    filled = sheet.filled(begins, [True, True, False])
    out = np.concatenate([words[a : a + n] for a, n, _ in filled.places.T])
    assert len(out) == filled.num_words
    found = filled.levels(out.data.cast("B"), 3, 2)
    assert found[0].lines == [
        (0, KIND_ENTERING, 0, 2), (1, KIND_CORRECTION, 0, 4), (1, KIND_CORRECTION, 1, 6)
    ]  # fmt: skip
    assert [np.frombuffer(one, "<i2").tolist() for one in found[0].levels] == [
        [100], [230, 230, 231, 231, 231]
    ]  # fmt: skip
    assert [one[:3] for one in found[1].lines] == [
        (0, KIND_ENTERING, 0), (0, KIND_SINKS, 0), (0, KIND_SINKS, 1),
        (1, KIND_CORRECTION, 0), (1, KIND_CORRECTION, 1),
    ]  # fmt: skip
    assert np.frombuffer(found[1].levels[0], "<i2").tolist() == [102, 102, 102, 120, 121, 121]
    assert found[2].lines == []
    assert [len(one) for one in found[2].levels] == [0, 0]


def test_a_cache_in_main_memory_is_none_of_the_gpus_business(codec: KltCodec) -> None:
    """A batch of caches there is encoded on the cores; what cannot be is its own chunk's affair."""
    chunks = cut(np.arange(64), Namespace(codec.spec.fingerprint, codec.profile_id))
    rng = np.random.default_rng(2)
    keys, values = (torch.from_numpy(rng.normal(size=(4, 64, 4, 16))).float() for _ in range(2))
    cache = KVCache(keys, values)
    spoilt = KVCache(keys * float("nan"), values)
    assert not codec._gpu_encoding.suits(chunks[0], cache)
    found = codec.encode_batch([(chunks[0], cache), (chunks[0], spoilt)])
    assert found[0] == codec.encode(chunks[0], cache)
    assert isinstance(found[1], UnsupportedError)
