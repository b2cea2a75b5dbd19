"""The flagship codec: predict from the token ids, transform, quantise in nested levels, code.

Sections of a stream (`docs/format.md`): level 0 has one TOKENS section (the step class of every
token), one SINKS section per group where the chunk begins a context, and every level but the last
has one COMPONENTS section per group. The last level has one CORRECTION section per group: what the
components left of the values themselves, so that it is near-lossless by construction, whatever the
basis lacks. A prefix of levels decodes; groups decode independently.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    dequantise,
    from_columns,
    to_columns,
)
from kdn.codec.outputs import check_input, output_cache
from kdn.codec.threads import parallel_map
from kdn.errors import FormatError, UnsupportedError

KIND_COMPONENTS, KIND_TOKENS, KIND_SINKS, KIND_CORRECTION = 0, 1, 2, 3


@dataclass(frozen=True)
class Analysis:
    """A chunk on its way to being coded: tokens' step classes, values and their prediction
    [tokens, columns], and of each group the components in finest steps, [components, tokens]."""

    classes: npt.NDArray[np.uint8]
    columns: torch.Tensor
    residual: torch.Tensor
    exact: list[Floats]
    valid_from: tuple[int, ...]


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
        self._transforms = [GroupTransform(group) for group in profile.groups]

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        analysis = self.analyse(chunk, cache)
        sections = [Section(0, KIND_TOKENS, 0, self._encode_classes(analysis.classes))]
        if self._num_sinks(chunk):
            sections += self._encode_sinks(analysis.columns, chunk)
        coded = [self._round(exact, g) for g, exact in enumerate(analysis.exact)]
        error = self.correction(chunk, analysis, coded)
        levels = [
            [*symbols.split_levels(values, self.num_levels - 1), _whole(error[:, group.columns])]
            for values, group in zip(coded, self.profile.groups, strict=True)
        ]
        jobs = [(g, k) for g in range(len(levels)) for k in range(self.num_levels)]
        sections += parallel_map(
            lambda job: self._encode_level(*job, levels[job[0]], analysis.classes), jobs
        )
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
            raise FormatError(f"expected {self.num_levels} levels, found {stream.info.num_levels}")
        wanted = stream.levels_available if levels is None else levels
        if not 1 <= wanted <= self.num_levels:
            raise FormatError(f"expected 1 to {self.num_levels} levels to decode, found {wanted}")
        cache = output_cache(stream.info, out, dtype)
        classes = self._decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
        groups = range(len(self._transforms))
        coded = parallel_map(lambda g: self._decode_levels(stream, g, wanted, classes), groups)
        sinks = []
        if self._num_sinks(chunk):
            sinks = [self._decode_sinks(stream.section(0, g, KIND_SINKS), g, chunk) for g in groups]
        self._assemble(chunk, coded, sinks, cache)
        return cache

    def simulate(self, chunk: Chunk, cache: KVCache, levels: int) -> KVCache:
        """What the first `levels` levels of this cache's stream decode to, without coding it: for
        calibration, which has no tables yet."""
        analysis = self.analyse(chunk, cache)
        finest = [self._round(exact, g) for g, exact in enumerate(analysis.exact)]
        component_levels = min(levels, self.num_levels - 1)
        error = None
        if levels == self.num_levels:
            error = self.correction(chunk, analysis, finest).round_()
            error *= torch.from_numpy(self.profile.tensors["fix.step"])
            error *= torch.from_numpy(_step_sizes(analysis.classes, 1.0))[:, None]
        coded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for index, group in enumerate(self.profile.groups):
            values = symbols.split_levels(finest[index], self.num_levels - 1)[component_levels - 1]
            part = self._dequantise(values, index, component_levels, analysis.classes)
            coded.append((part, None if error is None else error[:, group.columns]))
        sinks = [
            self._restore_sinks(self._sink_values(analysis.columns, g, chunk), g)
            for g in range(len(finest) if self._num_sinks(chunk) else 0)
        ]
        out = KVCache(torch.empty_like(cache.keys), torch.empty_like(cache.values), cache.start)
        self._assemble(chunk, coded, sinks, out)
        return out

    def _assemble(
        self,
        chunk: Chunk,
        coded: list[tuple[torch.Tensor, torch.Tensor | None]],
        sinks: list[torch.Tensor],
        cache: KVCache,
    ) -> None:
        """Puts prediction, components, correction and sinks of all groups into a cache."""
        columns = self._predict(chunk)
        for index, (components, error) in enumerate(coded):
            transform = self._transforms[index]
            part = columns[:, transform.group.columns]
            part += transform.synthesise(components)
            if error is not None:
                part += error
            if sinks:
                part[: len(sinks[index])] = sinks[index]
            from_columns(part, self.spec, transform.group, cache)
        for layer, position in enumerate(cache.valid_from):
            cache.keys[layer, : position - cache.start] = 0
            cache.values[layer, : position - cache.start] = 0

    def _step_classes(self, columns: torch.Tensor) -> npt.NDArray[np.uint8]:
        """How finely each token is quantised: by how much its errors are expected to matter."""
        weight = torch.from_numpy(self.profile.tensors["importance"])
        log_importance = columns @ weight + float(self.profile.meta["importance_bias"])
        middle = NUM_CLASSES // 2
        halvings = torch.round(log_importance / np.log(2.0)).clamp(-middle, middle)
        classes: npt.NDArray[np.uint8] = (halvings + middle).to(torch.uint8).numpy()
        return classes

    def analyse(self, chunk: Chunk, cache: KVCache) -> Analysis:
        """What is to be coded, before rounding."""
        check_input(self.spec, chunk, cache)
        columns = to_columns(cache, self.spec, self.profile.layer_ranges)
        if not bool(torch.isfinite(columns).all()):
            raise UnsupportedError(
                "klt codes finite values only; found NaN or infinity in the cache"
            )
        classes = self._step_classes(columns)
        steps = torch.from_numpy(_step_sizes(classes, self.profile.finest_step))
        residual = columns - self._predict(chunk)
        self._clear_uncoded(residual, cache.valid_from, chunk)
        exact = []
        for transform in self._transforms:
            found = residual[:, transform.group.columns] @ transform.analysis
            exact.append((found / steps[:, None]).T.contiguous().numpy())
        return Analysis(classes, columns, residual, exact, cache.valid_from)

    def correction(self, chunk: Chunk, analysis: Analysis, finest: list[Ints]) -> torch.Tensor:
        """What all components together leave of the values, in the last level's steps,
        [tokens, columns]."""
        error = analysis.residual.clone()
        for index, transform in enumerate(self._transforms):
            components = self._dequantise(
                finest[index], index, self.num_levels - 1, analysis.classes
            )
            error[:, transform.group.columns] -= transform.synthesise(components)
        self._clear_uncoded(error, analysis.valid_from, chunk)
        error /= torch.from_numpy(self.profile.tensors["fix.step"])
        error /= torch.from_numpy(_step_sizes(analysis.classes, 1.0))[:, None]
        return error

    def _round(self, exact: Floats, index: int) -> Ints:
        """To whole finest steps, as far as an escape reaches. A component that a coarse level does
        not code is limited to what rounds to zero there. The correction sees to the rest."""
        last = self.num_levels - 2
        finest = np.rint(np.clip(exact, -symbols.MAX_BASE, symbols.MAX_BASE)).astype(np.int32)
        for level in range(last, -1, -1):
            largest = (3 ** (last - level) - 1) // 2
            tail = finest[self.profile.levels[level].num_components[index] :]
            np.clip(tail, -largest, largest, out=tail)
        return finest

    def level_model(self, level: int, index: int, classes: npt.NDArray[np.uint8]) -> Model:
        """What selects the tables of one level of one group."""
        parts, group = self.profile.levels[level], self.profile.groups[index]
        if level == self.num_levels - 1:
            # Errors of a rounding are as large as its step, whatever the token's class.
            scales = self.profile.tensors["fix.scale"][group.columns]
            return Model(
                scales, np.zeros(len(classes), np.int8), parts.thresholds[index], parts.cdf
            )
        shifts = (2 * (classes.astype(np.int8) - NUM_CLASSES // 2)).astype(np.int8)
        scales = group.scale[: parts.num_components[index]]
        return Model(scales, shifts, parts.thresholds[index], parts.cdf)

    def _num_sinks(self, chunk: Chunk) -> int:
        return min(self.profile.num_sinks, chunk.num_tokens) if chunk.start == 0 else 0

    def _clear_uncoded(
        self, residual: torch.Tensor, valid_from: tuple[int, ...], chunk: Chunk
    ) -> None:
        """Sinks are coded apart; what a layer lacks is coded as if it were as predicted."""
        residual[: self._num_sinks(chunk)] = 0
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
        refines = 0 < level < self.num_levels - 1
        coarse = levels[level - 1][:count] if refines else None
        data = symbols_numba.encode(model, levels[level][:count], coarse)
        return Section(level, self._kind(level), index, data)

    def _kind(self, level: int) -> int:
        return KIND_CORRECTION if level == self.num_levels - 1 else KIND_COMPONENTS

    def _decode_levels(
        self, stream: Bitstream, index: int, levels: int, classes: npt.NDArray[np.uint8]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the first levels say of a group: its components [components, tokens], and the
        correction [tokens, columns] if the last level is among them."""
        values: Ints | None = None
        component_levels = min(levels, self.num_levels - 1)
        for level in range(component_levels):
            model = self.level_model(level, index, classes)
            if values is not None and len(values) < model.shape[0]:
                grown = np.zeros(model.shape, dtype=np.int32)
                grown[: len(values)] = values
                values = grown
            data = stream.section(level, index, KIND_COMPONENTS)
            values = symbols_numba.decode(model, data, values)
        assert values is not None
        components = self._dequantise(values, index, component_levels, classes)
        if levels < self.num_levels:
            return components, None
        model = self.level_model(levels - 1, index, classes)
        data = stream.section(levels - 1, index, KIND_CORRECTION)
        error = torch.from_numpy(symbols_numba.decode(model, data, None)).T
        step = torch.from_numpy(
            self.profile.tensors["fix.step"][self.profile.groups[index].columns]
        )
        return components, error * step * torch.from_numpy(_step_sizes(classes, 1.0))[:, None]

    def _dequantise(
        self, values: Ints, index: int, levels: int, classes: npt.NDArray[np.uint8]
    ) -> torch.Tensor:
        """The components that integers of the first `levels` levels stand for."""
        model = self.level_model(levels - 1, index, classes)
        step = self.profile.finest_step * 3 ** (self.num_levels - 1 - levels)
        out = np.empty(model.shape, dtype=np.float32)
        dequantise(
            values[: len(out)], model.scales, model.shifts,
            self.profile.levels[levels - 1].centroids, _step_sizes(classes, step), out,
        )  # fmt: skip
        return torch.from_numpy(out)

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

    def _sink_values(self, columns: torch.Tensor, index: int, chunk: Chunk) -> Ints:
        t, part = self.profile.tensors, self.profile.groups[index].columns
        count = self._num_sinks(chunk)
        mean = torch.from_numpy(t["sink.mean"][:count, part]).float()
        return _whole((columns[:count, part] - mean) / torch.from_numpy(t["sink.step"][part]))

    def _restore_sinks(self, values: Ints, index: int) -> torch.Tensor:
        t, part = self.profile.tensors, self.profile.groups[index].columns
        mean = torch.from_numpy(t["sink.mean"][: values.shape[1], part]).float()
        return mean + torch.from_numpy(values).T * torch.from_numpy(t["sink.step"][part])

    def _encode_sinks(self, columns: torch.Tensor, chunk: Chunk) -> list[Section]:
        sections = []
        for index in range(len(self._transforms)):
            values = self._sink_values(columns, index, chunk)
            data = symbols_numba.encode(self._sink_model(index, values.shape[1]), values, None)
            sections.append(Section(0, KIND_SINKS, index, data))
        return sections

    def _decode_sinks(self, data: memoryview, index: int, chunk: Chunk) -> torch.Tensor:
        model = self._sink_model(index, self._num_sinks(chunk))
        return self._restore_sinks(symbols_numba.decode(model, data, None), index)


def _whole(steps: torch.Tensor) -> Ints:
    """[columns, tokens] in whole steps."""
    if float(steps.abs().max()) > symbols.MAX_BASE:
        raise UnsupportedError("values too far from all that the profile was calibrated on")
    return steps.round().T.to(torch.int32).contiguous().numpy()


def _step_sizes(classes: npt.NDArray[np.uint8], step: float) -> Floats:
    """Each token's step."""
    halvings = classes.astype(np.float32) - NUM_CLASSES // 2
    sizes: Floats = (step * np.exp2(-halvings / 2)).astype(np.float32)
    return sizes


def _token_steps(num_tokens: int) -> tuple[Ints, Ints]:
    """Tables and widths of the steps that code the step classes: one lane, one table."""
    return np.zeros(num_tokens, dtype=np.int32), np.ones(num_tokens, dtype=np.int32)
