"""Streams on their way to a GPU: every section where kernels look for it, and nothing beyond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream, Section, write
from kdn.codec.klt import KltCodec
from kdn.codec.klt.gpu_input import Job, Slab, SlabMaker, spare_words, split_slabs, token_rows
from kdn.codec.klt.gpu_launch import Batching, Launcher
from kdn.codec.klt.gpu_memory import (
    SLAB_CHUNKS,
    InputBuffer,
    InputRing,
    Scratch,
    StatusPool,
    aligned,
    size_of,
)
from kdn.codec.klt.gpu_tables import Coding, Pairs
from kdn.codec.klt.gpu_target import Channels, Target
from kdn.codec.klt.kinds import KIND_ENTERING, KIND_SINKS, KIND_TOKENS
from kdn.codec.klt.streams import CudaStreams
from kdn.errors import FormatError, MismatchError, UnsupportedError
from tests.codec.klt_profile import make_profile

CPU = torch.device("cpu")
PLAIN = RopeSpec(tuple(10000.0 ** (-i / 8) for i in range(8)))
SPEC = ModelSpec(4, 2, 16, 1000, (PLAIN,) * 4, (None,) * 4, bytes(16))
SPARE_WORDS = 100
NO_TARGET: Any = None
NUM_TOKENS = 2 * 256 + 48


class Context:
    def __init__(self) -> None:
        self.codec = KltCodec(SPEC, make_profile(SPEC))
        rng = np.random.default_rng(1)
        names = Namespace(SPEC.fingerprint, self.codec.profile_id)
        self.chunks = cut(rng.integers(0, SPEC.vocab_size, NUM_TOKENS), names)
        shape = (SPEC.num_layers, NUM_TOKENS, SPEC.num_kv_heads, SPEC.head_dim)
        cache = KVCache(*(torch.from_numpy(rng.normal(size=shape)).float() for _ in range(2)))
        self.data = self.codec.encode_all(self.chunks, cache)
        self.streams = [Bitstream.parse(one) for one in self.data]
        coding = Coding.of(self.codec.profile, CPU)
        self.parts = (*coding.parts, coding.correction)
        profile = self.codec.profile
        self.maker = SlabMaker(
            self.parts, len(profile.groups), profile.num_sinks, SPEC.vocab_size, SPARE_WORDS
        )

    def jobs(self, numbers: Sequence[int], levels: int) -> list[Job]:
        return [
            self.maker.job(self.streams[i], self.chunks[i], levels, slots_of(self.chunks[i]))
            for i in numbers
        ]


@pytest.fixture(scope="module")
def context() -> Context:
    return Context()


def slots_of(chunk: Chunk) -> npt.NDArray[np.int64]:
    return np.arange(chunk.start, chunk.end) * 7


def slab_of(
    context: Context, jobs: Sequence[Job], levels: int, count: int | None = None
) -> tuple[Slab, list[int]]:
    streams = CudaStreams(CPU, 0)

    def take(host_bytes: int, device_bytes: int) -> InputBuffer:
        return InputBuffer.of(CPU, host_bytes, device_bytes, streams)

    return context.maker.begin(jobs, levels, take, count).finish(streams)


def words_at(slab: Slab, place: torch.Tensor) -> bytes:
    first, count = place.tolist()
    found: bytes = slab.words[first : first + count].numpy().tobytes()
    return found


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 2), (2,), (0,)])
def test_every_section_is_where_its_place_says(
    context: Context, levels: int, numbers: tuple[int, ...]
) -> None:
    """As if each section were asked for by its name."""
    slab, failed = slab_of(context, context.jobs(numbers, levels), levels)
    assert failed == []
    for c, number in enumerate(numbers):
        stream = context.streams[number]
        assert words_at(slab, slab.class_places[c]) == stream.section(0, 0, KIND_TOKENS)
        for p, part in enumerate(context.parts):
            for g in range(2):
                place = slab.places[p, c, g]
                if part.level < levels and part.sizes[g]:
                    section = stream.section(part.level, g, part.kind)
                    assert words_at(slab, place) == section
                else:
                    assert place.tolist() == [0, 0]
    for g in range(2):
        if numbers[0] == 0:
            section = context.streams[0].section(0, g, KIND_SINKS)
            assert words_at(slab, slab.sink_places[g]) == section
        else:
            assert slab.sink_places[g].tolist() == [0, 0]


def test_no_place_reaches_beyond_what_was_copied(context: Context) -> None:
    slab, _ = slab_of(context, context.jobs((0, 1, 2), 3), 3)
    ends = (
        slab.places.sum(-1).max(),
        slab.class_places.sum(-1).max(),
        slab.sink_places.sum(-1).max(),
    )
    assert max(int(end) for end in ends) + SPARE_WORDS <= len(slab.words)


def test_tokens_know_their_ids_slots_and_positions(context: Context) -> None:
    slab, _ = slab_of(context, context.jobs((0, 2), 1), 1)
    assert slab.num_tokens == 512
    assert not slab.is_full
    for c, number in enumerate((0, 2)):
        chunk = context.chunks[number]
        own = slice(c * CHUNK_TOKENS, c * CHUNK_TOKENS + chunk.num_tokens)
        rest = slice(own.stop, (c + 1) * CHUNK_TOKENS)
        assert np.array_equal(slab.ids[own].numpy(), token_rows(chunk, SPEC.vocab_size))
        assert slab.slots[own].tolist() == slots_of(chunk).tolist()
        assert slab.positions[own].tolist() == list(range(chunk.start, chunk.end))
        assert torch.all(slab.slots[rest] == -1)
        assert torch.all(slab.ids[rest.start : rest.stop] <= SPEC.vocab_size)
    assert slab.tokens_of.tolist() == [256, 48]
    assert slab.skipped.tolist() == [context.codec.profile.num_sinks, 0]
    assert slab.num_sinks == context.codec.profile.num_sinks
    assert slab.status.tolist() == [0, 0]
    assert torch.all(slab.classes == 2)


def without_head(context: Context, number: int, at: int, head: int) -> Job:
    """A chunk that comes to stand at `at`, of which the first `head` tokens go nowhere."""
    chunk = context.chunks[number]
    slots = slots_of(chunk)
    slots[:head] = -1
    return context.maker.job(context.streams[number], chunk, 2, slots, at)


def test_a_chunk_may_come_to_stand_elsewhere(context: Context) -> None:
    jobs = [without_head(context, 2, at, 0) for at in (0, 9000)]
    slab, _ = slab_of(context, [*jobs, *context.jobs((2,), 2)], 2)
    found = slab.positions.view(3, CHUNK_TOKENS)[:, :48].tolist()
    assert found == [list(range(first, first + 48)) for first in (0, 9000, 512)]


def test_sinks_that_go_nowhere_are_passed_over(context: Context) -> None:
    """Chunks with other sections than their neighbours, in any place of a slab."""
    count = context.codec.profile.num_sinks
    dropped, partly = (without_head(context, 0, 700, n) for n in (count, count - 1))
    assert dropped.sinks == partly.sinks == count
    assert not dropped.wants_sinks
    assert partly.wants_sinks
    assert not context.jobs((1,), 2)[0].wants_sinks
    slab, failed = slab_of(context, [*context.jobs((1,), 2), dropped, dropped], 2)
    assert (failed, slab.num_sinks) == ([], 0)
    assert slab.skipped.tolist() == [0, count, count]
    assert not slab.sink_places.any()
    for c, number in enumerate((1, 0, 0)):
        stream = context.streams[number]
        assert words_at(slab, slab.class_places[c]) == stream.section(0, 0, KIND_TOKENS)
        for p, part in enumerate(context.parts):
            for g in range(2):
                if part.level < 2 and part.sizes[g]:
                    section = stream.section(part.level, g, part.kind)
                    assert words_at(slab, slab.places[p, c, g]) == section
    assert split_slabs([partly, dropped, *context.jobs((1, 0), 2)], 8, 1 << 30) == [
        range(3), range(3, 4),
    ]  # fmt: skip


def rewritten(context: Context, number: int, change) -> Bitstream:  # type: ignore[no-untyped-def]
    """A sealed stream of other sections than the profile's."""
    stream = context.streams[number]
    sections = [
        Section(e.level, e.kind, e.group, bytes(stream.section(e.level, e.group, e.kind)))
        for e in stream.header.entries
    ]
    return Bitstream.parse(write(stream.info, change(sections), context.chunks[number].seal_key))


def with_half_a_word(sections: list[Section]) -> list[Section]:
    first = sections[0]
    return [Section(first.level, first.kind, first.group, b"abc"), *sections[1:]]


HOSTILE = {
    "half a word": with_half_a_word,
    "a section is missing": lambda s: [one for one in s if (one.level, one.group) != (1, 1)],
    "one too many": lambda s: [*s, Section(0, 9, 0, b"ab")],
    "of a group too many": lambda s: [*s, Section(1, KIND_ENTERING, 2, b"ab")],
    "sinks in the middle": lambda s: [*s, Section(0, KIND_SINKS, 0, b"ab")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_directory_that_is_not_the_profiles_is_refused(context: Context, name: str) -> None:
    stream = rewritten(context, 1, HOSTILE[name])
    with pytest.raises(FormatError):
        context.maker.job(stream, context.chunks[1], 2, slots_of(context.chunks[1]))


def test_what_lies_beyond_the_levels_does_not_matter(context: Context) -> None:
    stream = rewritten(context, 1, lambda s: [*s, Section(2, 9, 0, b"ab")])
    chunk = context.chunks[1]
    assert len(context.maker.job(stream, chunk, 2, slots_of(chunk)).lengths)
    with pytest.raises(FormatError):
        context.maker.job(stream, chunk, 3, slots_of(chunk))


def test_unknown_tokens_are_refused(context: Context) -> None:
    profile = context.codec.profile
    maker = SlabMaker(context.parts, 2, profile.num_sinks, 900, SPARE_WORDS)
    with pytest.raises(MismatchError, match="below 900"):
        maker.job(context.streams[1], context.chunks[1], 1, slots_of(context.chunks[1]))


def test_a_stream_that_cannot_be_read_is_decoded_to_nowhere(context: Context) -> None:
    """Bytes that are not what the header says: the others are decoded all the same."""
    spoilt = bytearray(context.data[1])
    spoilt[context.streams[1].header.size_bytes] ^= 1
    broken = Bitstream.of(context.streams[1].header, spoilt)
    jobs = context.jobs((0, 1, 2), 2)
    jobs[1] = jobs[1]._replace(stream=broken)
    slab, failed = slab_of(context, jobs, 2)
    assert failed == [1]
    slots = slab.slots.view(3, CHUNK_TOKENS)
    assert torch.all(slots[1] == -1)
    assert slots[0].tolist() == slots_of(context.chunks[0]).tolist()


def test_a_slab_is_filled_up_with_what_goes_nowhere(context: Context) -> None:
    jobs = context.jobs((0, 1), 2)
    plain, _ = slab_of(context, jobs, 2)
    slab, failed = slab_of(context, jobs, 2, 4)
    assert (slab.num_chunks, failed) == (4, [])
    assert torch.equal(slab.slots[: 2 * CHUNK_TOKENS], plain.slots)
    assert torch.all(slab.slots[2 * CHUNK_TOKENS :] == -1)
    assert torch.equal(slab.places[:, :2], plain.places)
    assert torch.equal(slab.places[:, 2:], plain.places[:, 1:].expand(-1, 2, -1, -1))
    assert slab.skipped.tolist() == [int(plain.skipped[0]), 0, 0, 0]


def test_slabs_begin_where_contexts_do_and_end_with_their_memory(context: Context) -> None:
    jobs = context.jobs((0, 1, 2), 1)
    sizes = [job.size_bytes for job in jobs]
    assert split_slabs(jobs, 2, 1 << 30) == [range(2), range(2, 3)]
    assert split_slabs([*jobs[:2], *jobs], 4, 1 << 30) == [range(2), range(2, 5)]
    assert split_slabs(jobs, 9, sizes[0] + sizes[1]) == [range(2), range(2, 3)]
    assert split_slabs(jobs, 9, 1) == [range(1), range(1, 2), range(2, 3)]
    slab, _ = slab_of(context, jobs, 1)
    beside = context.maker.overhead_bytes(3) + 2 * SPARE_WORDS
    assert slab.size_bytes <= sum(sizes) + beside < slab.size_bytes + 100


def test_buffers_come_in_turn_and_grow() -> None:
    ring, streams = InputRing(CPU, 2, 1000), CudaStreams(CPU, 0)
    first, second = ring.take(10, 30, streams), ring.take(900, 920, streams)
    assert first is not second
    assert ring.take(1000, 1020, streams) is first
    assert len(ring.take(1001, 1021, streams).host) == 1001
    assert ring.memory_bytes() == (1020 + 1021, 1000 + 1001)


class Filling(Launcher):
    """Brings chunks into its buffers, and decodes nothing."""

    def plan(self, num_chunks: int, target: Target) -> Batching:
        return Batching(num_chunks, 1)

    def run(self, slab: Slab, *_: Any) -> torch.Tensor:
        return slab.status


def test_a_stream_that_is_too_large_for_a_buffer_is_refused(context: Context) -> None:
    """Buffers stay as they are, whatever a stream says of itself."""
    chunk, stream = context.chunks[1], context.streams[1]
    slots = slots_of(chunk)
    size = context.jobs((1,), 2)[0].size_bytes
    room = -(-size // 16) * 16 + context.maker.overhead_bytes(1)
    for ring_bytes in (room, room + 1000):
        launcher = Filling(CPU, context.maker, CudaStreams(CPU, 2))
        launcher._ring = InputRing(CPU, 2, ring_bytes)
        launcher.launch([launcher.job(stream, chunk, 2, slots)] * 3, 2, NO_TARGET, None)
        assert launcher._ring.memory_bytes()[1] == 2 * ring_bytes
    launcher = Filling(CPU, context.maker, CudaStreams(CPU, 2))
    launcher._ring = InputRing(CPU, 2, room - 32)
    with pytest.raises(UnsupportedError, match="too many for a buffer"):
        launcher.job(stream, chunk, 2, slots)
    assert launcher.decode([stream], [chunk], 2, NO_TARGET, [slots]) == [0]  # left to the reference


def test_a_damaged_section_reads_its_states_and_two_words_a_symbol() -> None:
    assert spare_words(10) == 32 * 2 + 256 * 10 * 2


def test_scratch_is_carved_without_overlap() -> None:
    scratch = Scratch(CPU)
    assert scratch.size_bytes == 0
    carving = scratch.carve(4096)
    a, b = carving.take((3, 5), torch.int32), carving.take((7,), torch.float16)
    a.fill_(1)
    b.fill_(2)
    assert torch.all(a == 1)
    assert b.data_ptr() - a.data_ptr() == aligned(60)
    assert scratch.carve(100).take((1,), torch.uint8).data_ptr() == a.data_ptr()
    assert scratch.size_bytes == 4096
    with pytest.raises(AssertionError):
        scratch.carve(100).take((4097,), torch.uint8)


def test_tensors_are_counted_once(context: Context) -> None:
    one = torch.zeros(100)
    assert size_of([one, one[:10]], {"a": torch.zeros(3)}) == 412
    assert size_of(Coding.of(context.codec.profile, CPU)) > 10_000


def pages(dtype: torch.dtype, shift: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A key, then a value, in each of 40 slots."""
    flat = [torch.zeros(40 * 2 * 32 + shift, dtype=dtype)[shift:] for _ in range(4)]
    both = [one.view(40, 2, 32) for one in flat]
    return [one[..., :16] for one in both], [one[..., 16:] for one in both]


@pytest.mark.parametrize(
    ("dtype", "shift", "expected"),
    [(torch.bfloat16, 0, True), (torch.bfloat16, 1, False), (torch.float8_e4m3fn, 0, True),
     (torch.float8_e4m3fn, 8, False), (torch.float32, 4, True)],
)  # fmt: skip
def test_vectors_need_alignment(dtype: torch.dtype, shift: int, expected: bool) -> None:
    target = Target.of(*pages(dtype, shift))
    assert target.is_aligned == expected
    assert (target.key_stride, target.head_strides) == (64, (32, 32))


def test_heads_that_are_not_a_whole_run_apart_need_no_vectors() -> None:
    keys = [torch.zeros(40, 80)[:, :40].view(40, 2, 20)[..., :16] for _ in range(4)]
    assert keys[0].stride() == (80, 20, 1)
    assert not Target.of(keys, keys).is_aligned


def test_channels_are_found_by_head_strides() -> None:
    pairs = Pairs.of(SPEC, 2, 64)
    channels = Channels(pairs, 16, CPU)
    first, second = channels.of((16, 1000))
    width = 32 // 2
    assert np.array_equal(first[0, :, :width], pairs.first[:, :width])
    heads, own = np.divmod(pairs.second[:, :width], 16)
    assert np.array_equal(second[1, :, :width], heads * 1000 + own)
    assert torch.all(first[:, :, width:] == -1)
    far, _ = channels.of((1 << 40, 16))
    assert far.dtype == torch.int64
    assert channels.of((16, 1000))[0] is first


def test_memory_for_answers_is_used_again_and_grows_where_it_must() -> None:
    pool = StatusPool(torch.device("cpu"))
    first, second = pool.take(4), pool.take(4)
    assert first.data_ptr() != second.data_ptr()
    pool.give_back(first)
    assert pool.take(SLAB_CHUNKS).data_ptr() == first.data_ptr()
    pool.give_back(second)
    assert len(pool.take(SLAB_CHUNKS + 1)) == SLAB_CHUNKS + 1
