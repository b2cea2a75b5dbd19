"""The flagship codec: predict from the token ids, transform, quantise in nested levels, code.

Sections of a stream (`docs/format.md`): level 0 has one TOKENS section (the step class of every
token), one SINKS section per group where the chunk begins a context, and every level has one
COMPONENTS section per group. A prefix of levels decodes; groups decode independently.
"""

from __future__ import annotations


import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rans, rans_numba
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream, CodecId, DType, Section, StreamInfo, write
from kdn.codec.klt import symbols, symbols_numba
from kdn.codec.klt.profile import NUM_CLASSES, Profile
from kdn.codec.klt.symbols import Ints, Model
from kdn.codec.klt.transform import (
    Floats,
    GroupTransform,
    Predictor,
    add_components,
    from_columns,
    gather_nonzeros,
    to_columns,
)
from kdn.codec.outputs import check_input, output_cache
from kdn.codec.threads import parallel_map
from kdn.errors import FormatError, UnsupportedError

KIND_COMPONENTS, KIND_TOKENS, KIND_SINKS = 0, 1, 2
MAX_BLOCK_COLUMNS = 256


class KltCodec(Codec):
    """Encodes and decodes chunks of the model a profile was calibrated for."""

    name = "klt"

    def __init__(self, spec: ModelSpec, profile: Profile) -> None:
        profile.check_for(spec)
        self.spec = spec
        self.profile = profile
        self.profile_id = profile.profile_id
        self.num_levels = profile.num_levels
        self._predict = Predictor(profile)
        width = spec.num_kv_heads * spec.head_dim
        block = width if width <= MAX_BLOCK_COLUMNS else spec.head_dim
        self._transforms = [GroupTransform(group, block) for group in profile.groups]

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        num_sinks = self._num_sinks(chunk)
        classes, exact = self.components(chunk, cache)
        sections = [Section(0, KIND_TOKENS, 0, self._encode_classes(classes))]
        if num_sinks:
            first = cache.slice(cache.start, cache.start + num_sinks)
            sections += self._encode_sinks(to_columns(first, self.spec, self.profile.groups))
        finest = [self._round(part, g) for g, part in enumerate(exact)]
        jobs = [(g, k) for g in range(len(finest)) for k in range(self.num_levels)]
        levels = [symbols.split_levels(values, self.num_levels) for values in finest]
        sections += parallel_map(lambda job: self._encode_level(*job, levels[job[0]], classes), jobs)
        info = StreamInfo.for_chunk(
            chunk,
            self.spec,
            codec=CodecId.KLT,
            dtype=DType.of(cache.dtype),
            num_levels=self.num_levels,
            profile=self.profile_id,
            valid_from=cache.valid_from,
        )
        return write(info, sections)

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> KVCache:
        stream.check_for(chunk, self.spec, self.profile_id, CodecId.KLT)
        if stream.info.num_levels != self.num_levels:
            raise FormatError(
                f"expected {self.num_levels} levels, found {stream.info.num_levels}"
            )
        wanted = stream.levels_available if levels is None else levels
        if not 1 <= wanted <= self.num_levels:
            raise FormatError(f"expected 1 to {self.num_levels} levels to decode, found {wanted}")
        cache = output_cache(stream.info, out, dtype)
        classes = self._decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
        columns = self._predict(chunk)

        def decode_group(index: int) -> None:
            group = self.profile.groups[index]
            part = columns[:, group.columns]
            self._decode_group(stream, index, wanted, classes, part)
            num_sinks = self._num_sinks(chunk)
            if num_sinks:
                self._decode_sinks(stream.section(0, index, KIND_SINKS), index, part[:num_sinks])

        parallel_map(decode_group, range(len(self._transforms)))
        for group in self.profile.groups:
            from_columns(columns[:, group.columns], self.spec, group, cache)
        for layer, absent in enumerate(stream.info.absences):
            cache.keys[layer, :absent] = 0
            cache.values[layer, :absent] = 0
        return cache

    def _step_classes(self, columns: torch.Tensor) -> npt.NDArray[np.uint8]:
        """How finely each token is quantised: by how much its errors are expected to matter."""
        weight = torch.from_numpy(self.profile.tensors["importance"])
        log_importance = columns @ weight + float(self.profile.meta["importance_bias"])
        middle = NUM_CLASSES // 2
        halvings = torch.round(log_importance / np.log(2.0)).clamp(-middle, middle)
        classes: npt.NDArray[np.uint8] = (halvings + middle).to(torch.uint8).numpy()
        return classes

    def components(
        self, chunk: Chunk, cache: KVCache
    ) -> tuple[npt.NDArray[np.uint8], list[Floats]]:
        """What is coded, before rounding: the step class of each token, and of each group the
        components in finest steps, [components, tokens]."""
        check_input(self.spec, chunk, cache)
        columns = to_columns(cache, self.spec, self.profile.groups)
        if not bool(torch.isfinite(columns).all()):
            raise UnsupportedError("klt codes finite values only; found NaN or infinity in the cache")
        classes = self._step_classes(columns)
        steps = torch.from_numpy(_step_sizes(classes, self.profile.finest_step))
        columns -= self._predict(chunk)
        self._mark_absent(columns, cache.valid_from, chunk)
        columns[: self._num_sinks(chunk)] = 0
        exact = []
        for transform in self._transforms:
            found = columns[:, transform.group.columns] @ transform.analysis
            exact.append((found / steps[:, None]).T.contiguous().numpy())
        return classes, exact

    def _round(self, exact: Floats, index: int) -> Ints:
        """To whole finest steps. A component that a coarse level does not code is limited to what
        rounds to zero there."""
        limit = symbols.MAX_BASE * 3 ** (self.num_levels - 1)
        if exact.size and float(np.abs(exact).max()) > limit:
            raise UnsupportedError("values too far from all that the profile was calibrated on")
        finest = np.rint(exact).astype(np.int32)
        for level in range(self.num_levels - 1, -1, -1):
            largest = (3 ** (self.num_levels - 1 - level) - 1) // 2
            tail = finest[self.profile.levels[level].num_components[index] :]
            np.clip(tail, -largest, largest, out=tail)
        return finest

    def level_model(self, level: int, index: int, classes: npt.NDArray[np.uint8]) -> Model:
        """What selects the tables of one level of one group."""
        parts = self.profile.levels[level]
        count = parts.num_components[index]
        shifts = (2 * (classes.astype(np.int8) - NUM_CLASSES // 2)).astype(np.int8)
        scales = self.profile.groups[index].scale[:count]
        return Model(scales, shifts, parts.thresholds[index], parts.cdf)

    def _num_sinks(self, chunk: Chunk) -> int:
        return min(self.profile.num_sinks, chunk.num_tokens) if chunk.start == 0 else 0

    def _mark_absent(
        self, residual: torch.Tensor, valid_from: tuple[int, ...], chunk: Chunk
    ) -> None:
        """What a layer lacks is coded as if it were as predicted."""
        for group in self.profile.groups:
            width = group.last_layer - group.first_layer
            view = residual[:, group.columns].view(chunk.num_tokens, 2, width, -1)
            for layer in range(group.first_layer, group.last_layer):
                view[: valid_from[layer] - chunk.start, :, layer - group.first_layer] = 0

    def _encode_level(
        self, index: int, level: int, levels: list[Ints], classes: npt.NDArray[np.uint8]
    ) -> Section:
        model = self.level_model(level, index, classes)
        count = model.shape[0]
        coarse = levels[level - 1][:count] if level else None
        data = symbols_numba.encode(model, levels[level][:count], coarse)
        return Section(level, KIND_COMPONENTS, index, data)

    def _decode_group(
        self,
        stream: Bitstream,
        index: int,
        levels: int,
        classes: npt.NDArray[np.uint8],
        out: torch.Tensor,
    ) -> None:
        """Adds a group's components to its prediction, in place."""
        values: Ints | None = None
        for level in range(levels):
            model = self.level_model(level, index, classes)
            if values is not None and len(values) < model.shape[0]:
                grown = np.zeros(model.shape, dtype=np.int32)
                grown[: len(values)] = values
                values = grown
            data = stream.section(level, index, KIND_COMPONENTS)
            values = symbols_numba.decode(model, data, values)
        assert values is not None
        step = self.profile.finest_step * 3 ** (self.num_levels - levels)
        nonzeros = int(np.count_nonzero(values))
        starts = np.empty(values.shape[1] + 1, dtype=np.int64)
        entries, sizes = np.empty(nonzeros, dtype=np.int32), np.empty(nonzeros, dtype=np.float32)
        centroids = self.profile.levels[levels - 1].centroids
        gather_nonzeros(
            values, model.scales, model.shifts, centroids, _step_sizes(classes, step), starts,
            entries, sizes,
        )  # fmt: skip
        add_components(self._transforms[index].synthesis, starts, entries, sizes, out.numpy())

    def _encode_classes(self, classes: npt.NDArray[np.uint8]) -> bytes:
        tables = rans.Tables.from_freqs(self.profile.tensors["token.freqs"])
        return rans_numba.encode(classes, tables, *_token_steps(len(classes)))

    def _decode_classes(self, data: memoryview, num_tokens: int) -> npt.NDArray[np.uint8]:
        tables = rans.Tables.from_freqs(self.profile.tensors["token.freqs"])
        return rans_numba.decode(data, tables, *_token_steps(num_tokens))

    def _sink_model(self, index: int, num_sinks: int) -> Model:
        scales = self.profile.tensors["sink.scale"][self.profile.groups[index].columns]
        blocks = -(-len(scales) // symbols.BLOCK)
        # No activity reaches these thresholds: all sinks share one class.
        limit = np.full((blocks, symbols.NUM_ACTIVITIES - 1), 2**31 - 1, dtype=np.int32)
        shifts = np.zeros(num_sinks, dtype=np.int8)
        return Model(scales, shifts, limit, self.profile.sink_cdf)

    def _encode_sinks(self, columns: torch.Tensor) -> list[Section]:
        t, sections = self.profile.tensors, []
        mean = torch.from_numpy(t["sink.mean"]).float()[: len(columns)]
        scaled = torch.round((columns - mean) / torch.from_numpy(t["sink.step"]))
        if float(scaled.abs().max()) > symbols.MAX_BASE:
            raise UnsupportedError("first tokens too far from all that the profile was calibrated on")
        for index, group in enumerate(self.profile.groups):
            values = scaled[:, group.columns].T.to(torch.int32).contiguous().numpy()
            data = symbols_numba.encode(self._sink_model(index, len(columns)), values, None)
            sections.append(Section(0, KIND_SINKS, index, data))
        return sections

    def _decode_sinks(self, data: memoryview, index: int, out: torch.Tensor) -> None:
        t, columns = self.profile.tensors, self.profile.groups[index].columns
        values = symbols_numba.decode(self._sink_model(index, len(out)), data, None)
        mean = torch.from_numpy(t["sink.mean"][: len(out), columns]).float()
        step = torch.from_numpy(t["sink.step"][columns])
        out.copy_(mean + torch.from_numpy(values).T * step)


def _step_sizes(classes: npt.NDArray[np.uint8], step: float) -> Floats:
    """Each token's step."""
    halvings = classes.astype(np.float32) - NUM_CLASSES // 2
    sizes: Floats = (step * np.exp2(-halvings / 2)).astype(np.float32)
    return sizes


def _token_steps(num_tokens: int) -> tuple[Ints, Ints]:
    """Tables and widths of the steps that code the step classes: one lane, one table."""
    return np.zeros(num_tokens, dtype=np.int32), np.ones(num_tokens, dtype=np.int32)


