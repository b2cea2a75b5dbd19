"""The flagship codec: predict from the token ids, transform, quantise in nested levels, code.

Sections of a stream (`docs/format.md`): level 0 has one TOKENS section (the step class of every
token) and one SINKS section per group where the chunk begins a context. Every level but the last
has, per group, a DIGITS section that refines the components of the level before (level 0 has none)
and an ENTERING section with those that are first coded here. The last level has one CORRECTION
section per group: what the components left of the values themselves, so that it is near-lossless by
construction, whatever the basis lacks. Levels before may have, per group, a MEANS section: of the
components that no level so far codes, the means over the chunk (`means.py`). A prefix of levels
decodes; groups decode independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows, check_whole
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache, check_heads
from kdn.cache.windows import ordered
from kdn.codec.base import Codec, Coded, info_at_hand, moved, output_cache
from kdn.codec.format import Bitstream, CodecId, DType, Section, StreamInfo, write, write_levels
from kdn.codec.klt import symbols
from kdn.codec.klt.analysis import Analyser
from kdn.codec.klt.columns import Floats, Ints
from kdn.codec.klt.device import BegunRows, GpuDecoding
from kdn.codec.klt.duals import Duals
from kdn.codec.klt.gpu_encoding import BATCH_BYTES, CONTEXT_BYTES, GpuEncoding
from kdn.codec.klt.gpu_memory import SLAB_CHUNKS
from kdn.codec.klt.gpu_output import CodedLevels
from kdn.codec.klt.kinds import KIND_MEANS, KIND_SINKS, KIND_TOKENS
from kdn.codec.klt.level_coding import LevelCoder
from kdn.codec.klt.means import MeanCoder
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.restoring import FromStream, GroupFromStream, Restorer
from kdn.codec.klt.sinks import SinkCoder
from kdn.codec.klt.stages import transforms_of
from kdn.codec.klt.transform import Predictor
from kdn.codec.repair import Repair
from kdn.codec.threads import parallel_call, parallel_map
from kdn.errors import FormatError, KdnError, MismatchError


class KltCodec(Codec):
    """Encodes and decodes chunks of the model a profile was calibrated for."""

    name = "klt"
    codec_id = CodecId.KLT
    shares_profile = True

    def __init__(
        self,
        spec: ModelSpec,
        profile: Profile,
        duals: Path | None = None,
        *,
        unrepaired: KltCodec | None = None,
    ) -> None:
        """`duals`: a file that spares later processes what the first encoding works out.
        `unrepaired`: the codec into whose rows a repair was folded, to make this one's."""
        profile.check_for(spec)
        if profile.windowed_from is not None and spec != ordered(spec):
            raise MismatchError("expected the layers with a window to come last")
        self.spec = spec
        self.windowed_from = profile.windowed_from
        self.profile = profile
        self.profile_id = profile.profile_id
        self.num_levels = profile.num_levels
        self.coder = LevelCoder(profile)
        self._predict = Predictor(profile)
        self._transforms = transforms_of(profile)
        self._duals = Duals(profile, duals)
        self._sinks = [SinkCoder(group, profile) for group in profile.groups]
        self.means = MeanCoder(profile)
        self.analyser = Analyser(
            spec, self.coder, self._predict, self._transforms, self._sinks, self._duals
        )
        self._restorer = Restorer(spec, profile, self._predict, self._transforms)
        self._gpu: GpuDecoding = GpuDecoding(
            spec, profile, unrepaired=None if unrepaired is None else unrepaired._gpu
        )
        self._gpu_encoding = GpuEncoding(spec, profile)

    @property
    def expected_kld(self) -> tuple[float, ...]:
        """As the profile says, if it does."""
        told = [lv.expected["kld"] for lv in self.profile.levels if "kld" in lv.expected]
        return tuple(map(float, told)) if len(told) == self.num_levels else super().expected_kld

    def decodes_on(self, device: torch.device) -> bool:
        return device.type == "cuda" and find_spec("triton") is not None

    def repaired(self, repair: Repair) -> Codec:
        """With the repair folded into its rows, where each of its maps lies within a group of the
        profile: UnsupportedError else."""
        from kdn.codec.klt.repaired import RepairedKlt

        return RepairedKlt(self, repair)

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        if self._gpu_encoding.suits(chunk, cache):
            return _whole(self.encode_batch([(chunk, cache)]))[0]
        analysis = self.analyser.analyse(chunk, cache)
        sections = [Section(0, KIND_TOKENS, 0, self.coder.encode_classes(analysis.classes))]
        sections += [
            Section(0, KIND_SINKS, index, self._sinks[index].encode(values))
            for index, values in enumerate(analysis.sinks)
        ]
        groups = range(len(analysis.groups))
        # This also refuses what is not finite.
        quantised = parallel_map(lambda g: self.analyser.quantise(g, analysis), groups)
        for level, index in self.means.parts():
            exact = self.means.exact(level, index, analysis.groups[index].exact, analysis.classes)
            data = self.means.encode(level, index, self.means.round(exact))
            sections.append(Section(level, KIND_MEANS, index, data))
        jobs = []
        for index, values in enumerate(quantised):
            jobs += [(*part, values) for part in self.coder.parts(index)]
        sections += parallel_map(lambda job: self.coder.encode_part(*job, analysis.classes), jobs)
        return write(self._info(chunk, cache), sections, chunk.seal_key)

    def encode_all(self, chunks: Sequence[Chunk], cache: KVCache) -> list[bytes]:
        """On the GPU where the cache is on one."""
        items = [(chunk, cache.slice(chunk.start, chunk.end)) for chunk in chunks]
        if items and all(self._gpu_encoding.suits(*item) for item in items):
            return _whole(self._encode_on_gpu(items, CONTEXT_BYTES))
        self._duals.all()  # by all threads of the pool, before each takes a chunk
        return super().encode_all(chunks, cache)

    def encode_batch(self, items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        """Those whose caches are on a GPU are encoded there, all together."""
        found: dict[int, bytes | KdnError] = {}
        by_device: dict[torch.device | None, list[int]] = {}
        for index, (chunk, cache) in enumerate(items):
            suits = self._gpu_encoding.suits(chunk, cache)
            by_device.setdefault(cache.keys.device if suits else None, []).append(index)
        for device, own in by_device.items():
            part = [items[index] for index in own]
            on_cores = super().encode_batch
            done = on_cores(part) if device is None else self._encode_on_gpu(part, BATCH_BYTES)
            found |= dict(zip(own, done, strict=True))
        return [found[index] for index in range(len(items))]

    def _encode_on_gpu(
        self, items: Sequence[tuple[Chunk, KVCache]], memory_bytes: int
    ) -> list[bytes | KdnError]:
        """Of caches on one GPU, which suit; it may take so much memory there."""

        def finish(job: tuple[tuple[Chunk, KVCache], CodedLevels | KdnError]) -> bytes | KdnError:
            (chunk, cache), coded = job
            if isinstance(coded, KdnError):
                return coded
            return write_levels(self._info(chunk, cache), *coded, chunk.seal_key)

        coded = self._gpu_encoding.encode(items, memory_bytes)
        return parallel_map(finish, zip(items, coded, strict=True))

    def _info(self, chunk: Chunk, cache: KVCache) -> StreamInfo:
        return StreamInfo.for_chunk(
            chunk,
            self.spec,
            codec=self.codec_id,
            dtype=DType.of(cache.dtype),
            num_levels=self.num_levels,
            profile=self.profile_id,
            valid_from=cache.valid_from,
            windowed_from=self.windowed_from,
        )

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype = torch.float32,
        at: int | None = None,
    ) -> KVCache:
        """Keys are stored without rotation: to decode them elsewhere costs nothing."""
        wanted = self._checked_levels(stream, chunk, levels)
        cache = output_cache(info_at_hand(stream, self.spec), out, dtype, at)
        by_cores = not stream.has_windowed  # the others know whole streams only
        if by_cores or self._gpu.decode([stream], [chunk], [wanted], cache, at=at):
            self._decode_into(cache, stream, chunk, wanted)
        return cache

    def decode_heads(
        self,
        stream: Bitstream,
        chunk: Chunk,
        heads: range,
        *,
        levels: int,
        dtype: torch.dtype,
        at: int | None = None,
    ) -> KVCache:
        """Sums the columns of these heads only; all symbols have to be decoded for that."""
        wanted = self._checked_levels(stream, chunk, levels)
        check_heads(heads, self.spec.num_kv_heads)
        info = replace(info_at_hand(stream, self.spec), num_kv_heads=len(heads))
        cache = output_cache(info, None, dtype, at)
        self._decode_into(cache, stream, chunk, wanted, heads)
        return cache

    def _decode_into(
        self,
        cache: KVCache,
        stream: Bitstream,
        chunk: Chunk,
        wanted: int,
        heads: range | None = None,
    ) -> None:
        """On the cores, for positions from the cache's beginning on. Groups whose part of the
        stream is not at hand are left out."""
        every = len(self._transforms)
        groups = range(every if stream.has_windowed else self.windowed_from or 0)
        if not groups:
            return
        classes = self.coder.decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
        known, coded = parallel_call(
            lambda: self._restorer.known(chunk, cache.start),
            *(partial(self._decode_group, stream, g, wanted, classes) for g in groups),
        )
        count = self.profile.num_sinks_of(chunk)
        sinks = self._decode_sinks(stream, groups, count) if count else []
        self._restorer.restore(chunk, known, FromStream(classes, coded, sinks), cache, heads)

    def _decode_group(
        self, stream: Bitstream, index: int, wanted: int, classes: npt.NDArray[np.uint8]
    ) -> GroupFromStream:
        packed, error = self.coder.decode(stream, index, wanted, classes)
        last, shift = wanted - 1, None
        if self.means.count(last, index):
            whole = self.means.decode(last, index, stream.section(last, index, KIND_MEANS))
            shift = self._shift(last, index, whole, len(classes))
        return GroupFromStream(packed, error, shift)

    def _shift(self, level: int, index: int, means: Ints, num_tokens: int) -> Floats:
        """What a level's means add to a group's columns."""
        restored = self.means.restore(level, means, num_tokens)
        first = self.profile.levels[level].num_components[index]
        return self._transforms[index].sum_alike(restored, first)

    def _decode_sinks(self, stream: Bitstream, groups: range, count: int) -> list[torch.Tensor]:
        """Of each of these groups, the values [sinks, columns] of a context's first tokens."""
        return [self._sinks[g].decode(stream.section(0, g, KIND_SINKS), count) for g in groups]

    def decode_all(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        out: KVCache,
        *,
        levels: int | None = None,
    ) -> None:
        """Chunks that a GPU can decode are decoded there, all at once."""
        counts = [self._checked_levels(*both, levels) for both in zip(streams, chunks, strict=True)]
        whole = all(stream.has_windowed for stream in streams)
        left: Sequence[int] = range(len(streams))
        if whole:
            left = self._gpu.decode(streams, chunks, counts, out)
        super().decode_all(
            [streams[i] for i in left], [chunks[i] for i in left], out, levels=levels
        )

    def decode_rows(
        self,
        batch: Sequence[Coded],
        rows: TokenRows,
        *,
        after: torch.cuda.Event | None = None,
    ) -> list[KdnError | None]:
        """On the GPU where the memory is on one. What that cannot do is left to the reference."""
        if not self._gpu.suits(rows):
            return super().decode_rows(batch, rows, after=after)
        found: list[KdnError | None] = []
        begun: list[tuple[list[int], BegunRows]] = []
        rest: list[int] = []
        try:
            # The GPU decodes the first of them while the others are checked and read: these in one
            # go, so that one slab is read while another is launched.
            for part in filter(None, (batch[:SLAB_CHUNKS], batch[SLAB_CHUNKS:])):
                first, errors = len(found), [self._why_not(one, rows) for one in part]
                found += errors
                sound = [first + i for i, error in enumerate(errors) if error is None]
                begun.append((sound, self._gpu.begin_rows([batch[i] for i in sound], rows, after)))
        finally:
            # Also where something went wrong: the memory is the engine's again.
            for sound, some in begun:
                rest += [sound[i] for i in some.left()]
        others = super().decode_rows([batch[i] for i in rest], rows, after=after)
        for i, error in zip(rest, others, strict=True):
            found[i] = error
        return found

    def _why_not(self, one: Coded, rows: TokenRows) -> KdnError | None:
        """What is wrong with a chunk and its slots before anything is decoded."""
        try:
            self._checked_levels(one.stream, one.chunk, one.levels)
            if one.at is not None:
                moved(one.stream.info, one.at)
            rows.check_slots(one.slots, one.chunk.num_tokens)
            held = info_at_hand(one.stream, self.spec).valid_from
            check_whole(held, one.chunk.start, one.slots)
        except KdnError as error:
            return error
        return None

    def gpu_memory_bytes(self) -> tuple[int, int]:
        on_devices, pinned = self._gpu.memory_bytes()
        return on_devices + self._gpu_encoding.memory_bytes(), pinned

    def _checked_levels(self, stream: Bitstream, chunk: Chunk, levels: int | None) -> int:
        """How many levels to decode of what is this chunk's stream."""
        stream.check_for(chunk, self.spec, self.profile_id, self.codec_id, self.windowed_from)
        if stream.info.num_levels != self.num_levels:
            raise FormatError(f"expected {self.num_levels} levels, found {stream.info.num_levels}")
        wanted = stream.levels_available if levels is None else levels
        if not 1 <= wanted <= self.num_levels:
            raise FormatError(f"expected 1 to {self.num_levels} levels to decode, found {wanted}")
        return wanted

    def simulate(self, chunk: Chunk, cache: KVCache, levels: int) -> KVCache:
        """What the first `levels` levels of this cache's stream decode to, without coding it: for
        calibration, which has no tables yet."""
        analysis = self.analyser.analyse(chunk, cache)
        component_levels = min(levels, self.num_levels - 1)
        coded = []
        for index, group in enumerate(analysis.groups):
            finest = self.analyser.round(group.exact)
            error = None
            if levels == self.num_levels:
                error = self.analyser.correction(index, group, finest, analysis.classes)
            values = symbols.split_levels(finest, self.num_levels - 1)[component_levels - 1]
            packed = self.coder.pack(values, index, component_levels, analysis.classes)
            shift = None
            if self.means.count(levels - 1, index):
                exact = self.means.exact(levels - 1, index, group.exact, analysis.classes)
                whole = self.means.round(exact)
                shift = self._shift(levels - 1, index, whole, chunk.num_tokens)
            coded.append(GroupFromStream(packed, error, shift))
        sinks = [self._sinks[g].restore(values) for g, values in enumerate(analysis.sinks)]
        out = KVCache(torch.empty_like(cache.keys), torch.empty_like(cache.values), cache.start)
        told = FromStream(analysis.classes, coded, sinks)
        self._restorer.restore(chunk, self._restorer.known(chunk), told, out)
        return out


def _whole(found: Sequence[bytes | KdnError]) -> list[bytes]:
    """All streams; raises what the first that is none says."""
    streams = []
    for one in found:
        if isinstance(one, KdnError):
            raise one
        streams.append(one)
    return streams
