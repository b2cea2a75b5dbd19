"""From a chunk's values to the integers that are coded: prediction, transform, rounding.

Encoding and calibration share these steps. Calibration stops before entropy coding, because it has
no tables yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import check_input
from kdn.codec.klt import symbols, symbols_numba
from kdn.codec.klt.columns import Floats, Ints, RopeTables, read_columns
from kdn.codec.klt.duals import Duals
from kdn.codec.klt.level_coding import LevelCoder, step_sizes
from kdn.codec.klt.profile import NUM_CLASSES, Group
from kdn.codec.klt.sinks import SinkCoder
from kdn.codec.klt.transform import GroupTransform, Predictor, leftover
from kdn.codec.threads import parallel_call, parallel_map
from kdn.errors import UnsupportedError


@dataclass(frozen=True)
class GroupAnalysis:
    """A group of a chunk before rounding: its components in finest steps (`exact`) and in units of
    the basis, and the residual [tokens, columns] after the large components are subtracted."""

    exact: Floats
    components: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class Analysis:
    """A chunk before rounding: the step class of each token, and for each group its sinks (only in
    the first chunk of a context) and its components."""

    classes: npt.NDArray[np.uint8]
    sinks: list[Ints]
    groups: list[GroupAnalysis]


class Analyser:
    """Analyses chunks on CPU cores, for the model that the profile was calibrated for."""

    def __init__(
        self,
        spec: ModelSpec,
        coder: LevelCoder,
        predict: Predictor,
        transforms: Sequence[GroupTransform],
        sinks: Sequence[SinkCoder],
        duals: Duals,
    ) -> None:
        """`transforms` and `sinks` have one entry for each group."""
        self._spec, self._profile, self._num_levels = spec, coder.profile, coder.num_levels
        self._coder, self._predict = coder, predict
        self._transforms, self._sinks, self._duals = transforms, sinks, duals

    def analyse(self, chunk: Chunk, cache: KVCache) -> Analysis:
        """The chunk's components, before rounding."""
        check_input(self._spec, chunk, cache)
        if cache.ready is not None:
            cache.ready.synchronize()
        duals = self._duals.all()
        tables = RopeTables.of(self._spec, chunk.start, chunk.num_tokens, forward=False)
        weight = torch.from_numpy(self._profile.tensors["importance"])

        def read(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
            columns = read_columns(cache, self._spec, group.layers, tables)
            if not torch.isfinite(torch.stack(torch.aminmax(columns))).all():
                raise UnsupportedError(
                    "klt codes finite values only; found NaN or infinity in the cache"
                )
            return columns, columns @ weight[group.columns]

        latent, found = parallel_call(
            lambda: self._predict(chunk), *(partial(read, group) for group in self._profile.groups)
        )
        columns, log_importance = zip(*found, strict=True)
        classes = self._step_classes(sum(log_importance) + self._profile.meta["importance_bias"])
        steps = torch.from_numpy(step_sizes(classes, self._profile.finest_step))

        def analyse_group(index: int) -> GroupAnalysis:
            transform = self._transforms[index]
            residual = columns[index] - transform.predict(latent)
            self._clear_uncoded(residual, cache.valid_from, chunk, transform.group)
            components, rest = transform.analyse(residual, duals[index])
            return GroupAnalysis((components / steps).numpy(), components, rest)

        groups = parallel_map(analyse_group, range(len(self._transforms)))
        sinks = []
        if count := self._profile.num_sinks_of(chunk):
            sinks = [self._sinks[g].quantise(part[:count]) for g, part in enumerate(columns)]
        return Analysis(classes, sinks, groups)

    def _step_classes(self, log_importance: torch.Tensor) -> npt.NDArray[np.uint8]:
        """How finely each token is quantised: by how much its errors are expected to matter."""
        middle = NUM_CLASSES // 2
        halvings = torch.round(log_importance / np.log(2.0)).clamp(-middle, middle)
        classes: npt.NDArray[np.uint8] = (halvings + middle).to(torch.uint8).numpy()
        return classes

    def _clear_uncoded(
        self, residual: torch.Tensor, valid_from: tuple[int, ...], chunk: Chunk, group: Group
    ) -> None:
        """Sinks are coded apart; what a layer lacks is coded as if it were as predicted."""
        residual[: self._profile.num_sinks_of(chunk)] = 0
        first, last = group.layers
        view = residual.view(chunk.num_tokens, 2, last - first, -1)
        for layer in range(first, last):
            view[: valid_from[layer] - chunk.start, :, layer - first] = 0

    def quantise(self, index: int, analysis: Analysis) -> list[Ints]:
        """A group's integers at every level, the correction last."""
        group = analysis.groups[index]
        finest = self.round(group.exact)
        error = self.correction(index, group, finest, analysis.classes)
        return [*symbols_numba.split_levels(finest, self._num_levels - 1), error]

    def correction(
        self, index: int, group: GroupAnalysis, finest: Ints, classes: npt.NDArray[np.uint8]
    ) -> Ints:
        """What all components together leave of a group's values, in whole steps of the last
        level, [columns, tokens]."""
        transform = self._transforms[index]
        packed = self._coder.pack(finest, index, self._num_levels - 1, classes)
        large = group.components[: transform.num_large].clone()  # not all of them may be coded
        large[: len(packed.large)] -= torch.from_numpy(packed.large)
        missed = transform.sum_missed(large)
        error = np.empty(tuple(group.rest.T.shape), dtype=np.int32)
        steps, coarse = step_sizes(classes, 1.0), transform.coarse(packed)
        fix_step = self._profile.tensors["fix.step"][transform.group.columns]
        for own in transform.at_once:
            rest, others = (
                np.ascontiguousarray(part.numpy()[:, own]) for part in (group.rest, missed)
            )
            summed = coarse(own)
            largest = leftover(
                rest, others, summed.whole, summed.token_scale, summed.column_scale,
                steps, fix_step[own], error[own],
            )  # fmt: skip
            if not largest <= symbols.MAX_BASE:
                raise UnsupportedError("values too far from all that the profile was calibrated on")
        return error

    def round(self, exact: Floats) -> Ints:
        """To whole finest steps, as far as an escape reaches. The correction sees to the rest."""
        if not np.isfinite(exact).all():  # kernels index by what comes of it
            raise UnsupportedError("this profile gives components that are not finite")
        limit = np.float32(symbols.MAX_BASE)
        rounded: Ints = np.rint(np.clip(exact, -limit, limit)).astype(np.int32)
        return rounded
