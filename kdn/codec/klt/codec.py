"""The flagship codec: predict from the token ids, transform, quantise in nested levels, code.

Sections of a stream (`docs/format.md`): level 0 has one TOKENS section (the step class of every
token) and one SINKS section per group where the chunk begins a context. Every level but the last
has, per group, a DIGITS section that refines the components of the level before (level 0 has none)
and an ENTERING section with those that are first coded here. The last level has one CORRECTION
section per group: what the components left of the values themselves, so that it is near-lossless by
construction, whatever the basis lacks. A prefix of levels decodes; groups decode independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from kdn.codec import rans, rans_numba
from kdn.codec.base import Codec, Coded, check_input, clear_absent, output_cache
from kdn.codec.format import Bitstream, CodecId, DType, Section, StreamInfo, write
from kdn.codec.klt import symbols, symbols_numba
from kdn.codec.klt.columns import (
    Band,
    Floats,
    Ints,
    Restored,
    RopeTables,
    Scaled,
    bands,
    read_columns,
    share_of,
    write_band,
)
from kdn.codec.klt.device import BegunRows, GpuDecoding
from kdn.codec.klt.duals import Duals
from kdn.codec.klt.gpu_encoding import BATCH_BYTES, CONTEXT_BYTES, GpuEncoding
from kdn.codec.klt.gpu_memory import SLAB_CHUNKS
from kdn.codec.klt.kinds import (
    KIND_CORRECTION,
    KIND_DIGITS,
    KIND_ENTERING,
    KIND_SINKS,
    KIND_TOKENS,
)
from kdn.codec.klt.profile import NUM_CLASSES, Group, Profile
from kdn.codec.klt.sinks import SinkCoder
from kdn.codec.klt.symbols import Model
from kdn.codec.klt.transform import (
    GroupTransform,
    Latent,
    PackedComponents,
    Predictor,
    leftover,
    pack,
    transpose,
)
from kdn.codec.threads import parallel_call, parallel_map
from kdn.errors import FormatError, KdnError, UnsupportedError


@dataclass(frozen=True)
class GroupAnalysis:
    """A group of a chunk before rounding: components in finest steps, the same in the basis' units,
    and what the large ones leave of the residual [tokens, columns]."""

    exact: Floats
    components: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class FromTokens:
    """What the token ids and their positions tell of a chunk."""

    latent: Latent
    turns: RopeTables


@dataclass(frozen=True)
class Analysis:
    """A chunk on its way to being coded: tokens' step classes; per group its sinks (none unless the
    chunk begins a context) and the rest."""

    classes: npt.NDArray[np.uint8]
    sinks: list[Ints]
    groups: list[GroupAnalysis]


class KltCodec(Codec):
    """Encodes and decodes chunks of the model a profile was calibrated for."""

    name = "klt"
    codec_id = CodecId.KLT
    shares_profile = True

    def __init__(self, spec: ModelSpec, profile: Profile, duals: Path | None = None) -> None:
        """`duals`: a file that spares later processes what the first encoding works out."""
        profile.check_for(spec)
        self.spec = spec
        self.profile = profile
        self.profile_id = profile.profile_id
        self.num_levels = profile.num_levels
        self._token_tables = rans.Tables.from_freqs(profile.tensors["token.freqs"])
        self._predict = Predictor(profile)
        self._transforms = [GroupTransform(group, profile) for group in profile.groups]
        self._duals = Duals(profile, duals)
        self._sinks = [SinkCoder(group, profile) for group in profile.groups]
        self._gpu = GpuDecoding(spec, profile)
        self._gpu_encoding = GpuEncoding(spec, profile)

    @property
    def expected_kld(self) -> tuple[float, ...]:
        """As the profile says, if it does."""
        told = [lv.expected["kld"] for lv in self.profile.levels if "kld" in lv.expected]
        return tuple(map(float, told)) if len(told) == self.num_levels else super().expected_kld

    def decodes_on(self, device: torch.device) -> bool:
        return device.type == "cuda" and find_spec("triton") is not None

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        if self._gpu_encoding.suits(chunk, cache):
            return _whole(self.encode_batch([(chunk, cache)]))[0]
        analysis = self.analyse(chunk, cache)
        sections = [Section(0, KIND_TOKENS, 0, self._encode_classes(analysis.classes))]
        sections += [
            Section(0, KIND_SINKS, index, self._sinks[index].encode(values))
            for index, values in enumerate(analysis.sinks)
        ]
        jobs = []
        groups = range(len(analysis.groups))
        for index, values in enumerate(parallel_map(lambda g: self._quantise(g, analysis), groups)):
            jobs += [(*part, values) for part in self.parts(index)]
        sections += parallel_map(lambda job: self.encode_part(*job, analysis.classes), jobs)
        return self._write(chunk, cache, sections)

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

        def finish(job: tuple[tuple[Chunk, KVCache], list[Section] | KdnError]) -> bytes | KdnError:
            item, sections = job
            return sections if isinstance(sections, KdnError) else self._write(*item, sections)

        coded = self._gpu_encoding.encode(items, memory_bytes)
        return parallel_map(finish, zip(items, coded, strict=True))

    def _write(self, chunk: Chunk, cache: KVCache, sections: Sequence[Section]) -> bytes:
        info = StreamInfo.for_chunk(
            chunk,
            self.spec,
            codec=self.codec_id,
            dtype=DType.of(cache.dtype),
            num_levels=self.num_levels,
            profile=self.profile_id,
            valid_from=cache.valid_from,
        )
        return write(info, sections, chunk.seal_key)

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> KVCache:
        wanted = self._checked_levels(stream, chunk, levels)
        cache = output_cache(stream.info, out, dtype)
        if self._gpu.decode([stream], [chunk], [wanted], cache):
            self._decode_into(cache, stream, chunk, wanted)
        return cache

    def decode_heads(
        self, stream: Bitstream, chunk: Chunk, heads: range, *, levels: int, dtype: torch.dtype
    ) -> KVCache:
        """Sums the columns of these heads only; all symbols have to be decoded for that."""
        wanted = self._checked_levels(stream, chunk, levels)
        check_heads(heads, self.spec.num_kv_heads)
        info = replace(stream.info, num_kv_heads=len(heads))
        cache = output_cache(info, None, dtype)
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
        """On the cores."""
        classes = self._decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
        groups = range(len(self._transforms))
        known, coded = parallel_call(
            lambda: self._known(chunk),
            *(partial(self._decode_levels, stream, g, wanted, classes) for g in groups),
        )
        sinks = []
        if count := self._num_sinks(chunk):
            data = [stream.section(0, g, KIND_SINKS) for g in groups]
            sinks = [self._sinks[g].decode(data[g], count) for g in groups]
        self._assemble(chunk, known, coded, sinks, classes, cache, heads)

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
            # The GPU decodes the first of them while the next are checked and read.
            for first in range(0, len(batch), SLAB_CHUNKS):
                errors = [self._why_not(one, rows) for one in batch[first : first + SLAB_CHUNKS]]
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
            rows.check_slots(one.slots, one.chunk.num_tokens)
            check_whole(one.stream.info.valid_from, one.chunk.start, one.slots)
        except KdnError as error:
            return error
        return None

    def gpu_memory_bytes(self) -> tuple[int, int]:
        return self._gpu.memory_bytes()

    def _checked_levels(self, stream: Bitstream, chunk: Chunk, levels: int | None) -> int:
        """How many levels to decode of what is this chunk's stream."""
        stream.check_for(chunk, self.spec, self.profile_id, self.codec_id)
        if stream.info.num_levels != self.num_levels:
            raise FormatError(f"expected {self.num_levels} levels, found {stream.info.num_levels}")
        wanted = stream.levels_available if levels is None else levels
        if not 1 <= wanted <= self.num_levels:
            raise FormatError(f"expected 1 to {self.num_levels} levels to decode, found {wanted}")
        return wanted

    def simulate(self, chunk: Chunk, cache: KVCache, levels: int) -> KVCache:
        """What the first `levels` levels of this cache's stream decode to, without coding it: for
        calibration, which has no tables yet."""
        analysis = self.analyse(chunk, cache)
        component_levels = min(levels, self.num_levels - 1)
        coded: list[tuple[PackedComponents, Ints | None]] = []
        for index, group in enumerate(analysis.groups):
            finest = self.round(group.exact)
            error = None
            if levels == self.num_levels:
                error = self.correction(index, group, finest, analysis.classes)
            values = symbols.split_levels(finest, self.num_levels - 1)[component_levels - 1]
            coded.append((self._pack(values, index, component_levels, analysis.classes), error))
        sinks = [self._sinks[g].restore(values) for g, values in enumerate(analysis.sinks)]
        out = KVCache(torch.empty_like(cache.keys), torch.empty_like(cache.values), cache.start)
        self._assemble(chunk, self._known(chunk), coded, sinks, analysis.classes, out)
        return out

    def _assemble(
        self,
        chunk: Chunk,
        known: FromTokens,
        coded: list[tuple[PackedComponents, Ints | None]],
        sinks: list[torch.Tensor],
        classes: npt.NDArray[np.uint8],
        cache: KVCache,
        heads: range | None = None,
    ) -> None:
        """Puts prediction, components, correction and sinks of all groups into a cache, which may
        be one of some heads only."""
        latent, tables = known.latent, known.turns
        error_scale = _step_sizes(classes, 1.0)
        # Sinks are not predicted: they are coded as they are.
        for scale in (latent.unit, error_scale, *(packed.token_scale for packed, _ in coded)):
            scale[: self._num_sinks(chunk)] = 0

        def restore(index: int, band: Band) -> None:
            transform, (packed, error) = self._transforms[index], coded[index]
            # Of whole layers, whatever the heads: a product of fewer columns may round otherwise.
            large = transform.sum_large(latent, packed.large, band.columns).numpy()
            for part in share_of(band, self.spec, heads):
                own, first = part.columns, band.columns.start
                base = np.ascontiguousarray(large[:, own.start - first : own.stop - first])
                if sinks:
                    known_first = sinks[index][:, own].numpy()
                    base[: len(known_first)] = known_first - transform.bias[own]
                predicted = transform.sum_latent(latent, own).numpy()
                coarse = transform.sum_coarse(packed.codes, own).numpy()
                restored = Restored(
                    base,
                    transform.bias[own],
                    Scaled(predicted, latent.unit, transform.latent_scale[own]),
                    Scaled(coarse, packed.token_scale, transform.column_scale[own]),
                    None if error is None else self._scaled_error(error, error_scale, index, own),
                )
                write_band(part, restored, tables, cache)

        parallel_map(
            lambda job: restore(*job),
            [
                (index, band)
                for index, group in enumerate(self.profile.groups)
                for band in bands(self.spec, group.layers)
            ],
        )
        clear_absent(cache)

    def _known(self, chunk: Chunk) -> FromTokens:
        turns = RopeTables.of(self.spec, chunk.start, chunk.num_tokens, forward=True)
        return FromTokens(self._predict(chunk), turns)

    def _scaled_error(self, error: Ints, token_scale: Floats, index: int, columns: slice) -> Scaled:
        whole = np.empty((error.shape[1], columns.stop - columns.start), np.int32)
        transpose(error[columns], whole)
        step = self.profile.tensors["fix.step"][self.profile.groups[index].columns]
        return Scaled(whole, token_scale, step[columns])

    def _step_classes(self, log_importance: torch.Tensor) -> npt.NDArray[np.uint8]:
        """How finely each token is quantised: by how much its errors are expected to matter."""
        middle = NUM_CLASSES // 2
        halvings = torch.round(log_importance / np.log(2.0)).clamp(-middle, middle)
        classes: npt.NDArray[np.uint8] = (halvings + middle).to(torch.uint8).numpy()
        return classes

    def analyse(self, chunk: Chunk, cache: KVCache) -> Analysis:
        """What is to be coded, before rounding."""
        check_input(self.spec, chunk, cache)
        if cache.ready is not None:
            cache.ready.synchronize()
        duals = self._duals.all()
        tables = RopeTables.of(self.spec, chunk.start, chunk.num_tokens, forward=False)
        weight = torch.from_numpy(self.profile.tensors["importance"])

        def read(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
            columns = read_columns(cache, self.spec, group.layers, tables)
            if not torch.isfinite(torch.stack(torch.aminmax(columns))).all():
                raise UnsupportedError(
                    "klt codes finite values only; found NaN or infinity in the cache"
                )
            return columns, columns @ weight[group.columns]

        latent, found = parallel_call(
            lambda: self._predict(chunk), *(partial(read, group) for group in self.profile.groups)
        )
        columns, log_importance = zip(*found, strict=True)
        classes = self._step_classes(sum(log_importance) + self.profile.meta["importance_bias"])
        steps = torch.from_numpy(_step_sizes(classes, self.profile.finest_step))

        def analyse_group(index: int) -> GroupAnalysis:
            transform = self._transforms[index]
            residual = columns[index] - transform.predict(latent)
            self._clear_uncoded(residual, cache.valid_from, chunk, transform.group)
            components, rest = transform.analyse(residual, duals[index])
            return GroupAnalysis((components / steps).numpy(), components, rest)

        groups = parallel_map(analyse_group, range(len(self._transforms)))
        sinks = []
        if count := self._num_sinks(chunk):
            sinks = [self._sinks[g].quantise(part[:count]) for g, part in enumerate(columns)]
        return Analysis(classes, sinks, groups)

    def _quantise(self, index: int, analysis: Analysis) -> list[Ints]:
        """A group's integers at every level, the correction last."""
        group = analysis.groups[index]
        finest = self.round(group.exact)
        error = self.correction(index, group, finest, analysis.classes)
        return [*symbols_numba.split_levels(finest, self.num_levels - 1), error]

    def correction(
        self, index: int, group: GroupAnalysis, finest: Ints, classes: npt.NDArray[np.uint8]
    ) -> Ints:
        """What all components together leave of a group's values, in whole steps of the last
        level, [columns, tokens]."""
        transform = self._transforms[index]
        packed = self._pack(finest, index, self.num_levels - 1, classes)
        missed = transform.sum_missed(
            group.components[: len(packed.large)] - torch.from_numpy(packed.large)
        )
        error = np.empty(tuple(group.rest.T.shape), dtype=np.int32)
        largest = leftover(
            group.rest.numpy(), missed.numpy(), transform.sum_coarse(packed.codes).numpy(),
            packed.token_scale, transform.column_scale,
            _step_sizes(classes, 1.0), self.profile.tensors["fix.step"][transform.group.columns],
            error,
        )  # fmt: skip
        if not largest <= symbols.MAX_BASE:
            raise UnsupportedError("values too far from all that the profile was calibrated on")
        return error

    def round(self, exact: Floats) -> Ints:
        """To whole finest steps, as far as an escape reaches. The correction sees to the rest."""
        limit = np.float32(symbols.MAX_BASE)
        rounded: Ints = np.rint(np.clip(exact, -limit, limit)).astype(np.int32)
        return rounded

    def parts(self, index: int) -> list[tuple[int, int, int]]:
        """Level, kind and group of every section that holds a group's components or errors."""
        parts = []
        for level in range(self.num_levels - 1):
            kept, coded = self._coded(level - 1, index), self._coded(level, index)
            parts += [(level, KIND_DIGITS, index)] if kept else []
            parts += [(level, KIND_ENTERING, index)] if coded > kept else []
        return [*parts, (self.num_levels - 1, KIND_CORRECTION, index)]

    def _coded(self, level: int, index: int) -> int:
        """How many components a level codes; none before the first."""
        return self.profile.levels[level].num_components[index] if level >= 0 else 0

    def model(self, level: int, kind: int, index: int, classes: npt.NDArray[np.uint8]) -> Model:
        """What selects the tables of one section."""
        kept = self._coded(level - 1, index) if kind != KIND_CORRECTION else 0
        rows = slice(0, kept) if kind == KIND_DIGITS else slice(kept, self._coded(level, index))
        tables = self.profile.levels[level].tables(kind == KIND_DIGITS)
        draft = self.table_model(kind, index, rows, classes)
        return replace(draft, thresholds=tables.thresholds[index], cdf=tables.cdf)

    def table_model(
        self, kind: int, index: int, rows: slice, classes: npt.NDArray[np.uint8]
    ) -> Model:
        """The same for any components [rows], before tables are counted."""
        group, empty = self.profile.groups[index], np.zeros((0, 0), np.int32)
        if kind == KIND_CORRECTION:
            # Errors of a rounding are as large as its step, whatever the token's class.
            scales = self.profile.tensors["fix.scale"][group.columns]
            return Model(scales, np.zeros(len(classes), np.int8), empty, empty.astype(np.uint16))
        shifts = _scale_shifts(classes)
        return Model(group.scale[rows], shifts, empty, empty.astype(np.uint16))

    def _num_sinks(self, chunk: Chunk) -> int:
        return min(self.profile.num_sinks, chunk.num_tokens) if chunk.start == 0 else 0

    def _clear_uncoded(
        self, residual: torch.Tensor, valid_from: tuple[int, ...], chunk: Chunk, group: Group
    ) -> None:
        """Sinks are coded apart; what a layer lacks is coded as if it were as predicted."""
        residual[: self._num_sinks(chunk)] = 0
        first, last = group.layers
        view = residual.view(chunk.num_tokens, 2, last - first, -1)
        for layer in range(first, last):
            view[: valid_from[layer] - chunk.start, :, layer - first] = 0

    def encode_part(
        self, level: int, kind: int, index: int, values: list[Ints],
        classes: npt.NDArray[np.uint8],
    ) -> Section:  # fmt: skip
        """One section, given the group's integers at every level."""
        model = self.model(level, kind, index, classes)
        first = self._coded(level - 1, index) if kind == KIND_ENTERING else 0
        own = values[level][first : first + len(model.scales)]
        coarse = values[level - 1][: len(own)] if kind == KIND_DIGITS else None
        data = symbols_numba.encode(model, own, coarse)
        return Section(level, kind, index, data)

    def _decode_levels(
        self, stream: Bitstream, index: int, levels: int, classes: npt.NDArray[np.uint8]
    ) -> tuple[PackedComponents, Ints | None]:
        """What the first levels say of a group: its components, and the correction
        [columns, tokens] if the last level is among them."""
        values, error = np.zeros((0, len(classes)), dtype=np.int32), None
        for level, kind, _ in self.parts(index):
            if level >= levels:
                break
            model, data = (
                self.model(level, kind, index, classes),
                stream.section(level, index, kind),
            )
            if kind == KIND_DIGITS:
                values = symbols_numba.decode(model, data, values)
            elif kind == KIND_ENTERING:
                values = np.concatenate([values, symbols_numba.decode(model, data, None)])
            else:
                error = symbols_numba.decode(model, data, None)
        return self._pack(values, index, min(levels, self.num_levels - 1), classes), error

    def _pack(
        self, values: Ints, index: int, levels: int, classes: npt.NDArray[np.uint8]
    ) -> PackedComponents:
        """The components that integers of the first `levels` levels stand for."""
        group, count = self.profile.groups[index], self._coded(levels - 1, index)
        step = self.profile.finest_step * 3 ** (self.num_levels - 1 - levels)
        num_large, num_tokens = min(len(group.fine), count), len(classes)
        packed = PackedComponents(
            np.empty((num_large, num_tokens), np.float32),
            np.empty((count - num_large, num_tokens), np.int8),
            np.empty(num_tokens, np.float32),
        )
        pack(
            values[:count], group.scale, _scale_shifts(classes),
            self.profile.levels[levels - 1].centroids, _step_sizes(classes, step),
            group.basis_scale, packed.large, packed.codes, packed.token_scale,
        )  # fmt: skip
        return packed

    def _encode_classes(self, classes: npt.NDArray[np.uint8]) -> bytes:
        return rans_numba.encode(classes, self._token_tables, *_token_steps(len(classes)))

    def _decode_classes(self, data: memoryview, num_tokens: int) -> npt.NDArray[np.uint8]:
        return rans_numba.decode(data, self._token_tables, *_token_steps(num_tokens))


def _whole(found: Sequence[bytes | KdnError]) -> list[bytes]:
    """All streams; raises what the first that is none says."""
    streams = []
    for one in found:
        if isinstance(one, KdnError):
            raise one
        streams.append(one)
    return streams


def _step_sizes(classes: npt.NDArray[np.uint8], step: float) -> Floats:
    """Each token's step."""
    halvings = classes.astype(np.float32) - NUM_CLASSES // 2
    sizes: Floats = (step * np.exp2(-halvings / 2)).astype(np.float32)
    return sizes


def _scale_shifts(classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """By how many scale classes a token's components are larger in its own steps."""
    return (2 * (classes.astype(np.int8) - NUM_CLASSES // 2)).astype(np.int8)


def _token_steps(num_tokens: int) -> tuple[Ints, Ints]:
    """Tables and widths of the steps that code the step classes: one lane, one table."""
    return np.zeros(num_tokens, dtype=np.int32), np.ones(num_tokens, dtype=np.int32)
