"""A chunk's values, restored from the components in its stream and predictions from token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import clear_absent
from kdn.codec.klt.columns import (
    BAND_COLUMNS,
    Band,
    Floats,
    Ints,
    Restored,
    RopeTables,
    Scaled,
    bands,
    share_of,
    write_band,
)
from kdn.codec.klt.level_coding import step_sizes
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.transform import (
    GroupTransform,
    Latent,
    PackedComponents,
    Predictor,
    transpose,
)
from kdn.codec.threads import parallel_map


@dataclass(frozen=True)
class FromTokens:
    """The part of a chunk that follows from its token ids and positions."""

    latent: Latent
    turns: RopeTables


@dataclass(frozen=True)
class GroupFromStream:
    """Of one group: its components, the correction [columns, tokens] if the last level is there,
    and what the means of other components add to each column, if the stream has means."""

    packed: PackedComponents
    error: Ints | None = None
    shift: Floats | None = None


@dataclass(frozen=True)
class FromStream:
    """The part of a chunk that its stream holds: the step class of each token, and for each group
    its components and its sinks (only in the first chunk of a context)."""

    classes: npt.NDArray[np.uint8]
    groups: Sequence[GroupFromStream]
    sinks: Sequence[torch.Tensor]


class Restorer:
    """Restores chunks on CPU cores, for the model that the profile was calibrated for."""

    def __init__(
        self,
        spec: ModelSpec,
        profile: Profile,
        predict: Predictor,
        transforms: Sequence[GroupTransform],
    ) -> None:
        self._spec, self._profile = spec, profile
        self._predict, self._transforms = predict, transforms

    def known(self, chunk: Chunk, at: int | None = None) -> FromTokens:
        """With keys' turns for positions from `at` on (None: where the chunk was learned)."""
        start = chunk.start if at is None else at
        turns = RopeTables.of(self._spec, start, chunk.num_tokens, forward=True)
        return FromTokens(self._predict(chunk), turns)

    def restore(
        self,
        chunk: Chunk,
        known: FromTokens,
        coded: FromStream,
        cache: KVCache,
        heads: range | None = None,
    ) -> None:
        """Puts prediction, components, correction and sinks of all groups, or of the first that
        were coded, into a cache, which may be one of some heads only. The scales of `known` and
        `coded` are changed."""
        error_scale = step_sizes(coded.classes, 1.0)
        scales = (
            known.latent.unit,
            error_scale,
            *(one.packed.token_scale for one in coded.groups),
        )
        # Sinks are not predicted: they are coded as they are.
        for scale in scales:
            scale[: self._profile.num_sinks_of(chunk)] = 0

        transforms = self._transforms[: len(coded.groups)]
        both = zip(transforms, coded.groups, strict=True)
        coarse = [transform.coarse(group.packed) for transform, group in both]

        def restore(job: tuple[int, Band]) -> None:
            index, band = job
            parts = self._parts(index, band, known, coded, coarse[index], error_scale, heads)
            for part, restored in parts:
                write_band(part, restored, known.turns, cache)

        jobs = [
            (index, band)
            for index, transform in enumerate(transforms)
            for band in self._bands(transform)
        ]
        parallel_map(restore, jobs)
        clear_absent(cache)

    def _bands(self, transform: GroupTransform) -> list[Band]:
        at_once = transform.at_once[0]
        most = min(BAND_COLUMNS, at_once.stop - at_once.start)
        return bands(self._spec, transform.group.layers, most)

    def _parts(
        self,
        index: int,
        band: Band,
        known: FromTokens,
        coded: FromStream,
        coarse: Callable[[slice], Scaled],
        error_scale: Floats,
        heads: range | None,
    ) -> Iterator[tuple[Band, Restored]]:
        """What is to be written of a group's band, which these heads share."""
        latent, transform = known.latent, self._transforms[index]
        group, error = coded.groups[index], coded.groups[index].error
        bias = transform.bias if group.shift is None else transform.bias + group.shift
        # Of whole layers, whatever the heads: a product of fewer columns may round otherwise.
        large = transform.sum_large(latent, group.packed.large, band.columns).numpy()
        for part in share_of(band, self._spec, heads):
            own, first = part.columns, band.columns.start
            base = np.ascontiguousarray(large[:, own.start - first : own.stop - first])
            if coded.sinks:
                known_first = coded.sinks[index][:, own].numpy()
                base[: len(known_first)] = known_first - bias[own]
            predicted = transform.sum_latent(latent, own).numpy()
            yield (
                part,
                Restored(
                    base,
                    bias[own],
                    Scaled(predicted, latent.unit, transform.latent_scale[own]),
                    coarse(own),
                    None if error is None else self._scaled_error(error, error_scale, index, own),
                ),
            )

    def _scaled_error(self, error: Ints, token_scale: Floats, index: int, columns: slice) -> Scaled:
        whole = np.empty((error.shape[1], columns.stop - columns.start), np.int32)
        transpose(error[columns], whole)
        step = self._profile.tensors["fix.step"][self._profile.groups[index].columns]
        return Scaled(whole, token_scale, step[columns])
