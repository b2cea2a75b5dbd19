"""Integers of the groups of a chunk as sections of a stream, level by level, and back.

codec.py lists the sections. Encoder and decoder must agree to the last bit on the tables of a
section and on the meaning of its integers, so both use the code in this file.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kdn.codec import rans, rans_numba
from kdn.codec.format import Bitstream, Section
from kdn.codec.klt import runs
from kdn.codec.klt.columns import Floats, Ints
from kdn.codec.klt.kinds import KIND_CORRECTION, KIND_DIGITS, KIND_ENTERING
from kdn.codec.klt.profile import NUM_CLASSES, Profile
from kdn.codec.klt.symbols import Model
from kdn.codec.klt.transform import PackedComponents, pack


class LevelCoder:
    """Codes levels with the tables of a profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.num_levels = profile.num_levels
        self._token_tables = rans.Tables.from_freqs(profile.tensors["token.freqs"])

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
        """The model that selects the tables of one section."""
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

    def encode_part(
        self, level: int, kind: int, index: int, values: list[Ints],
        classes: npt.NDArray[np.uint8],
    ) -> Section:  # fmt: skip
        """One section, given the group's integers at every level."""
        model = self.model(level, kind, index, classes)
        first = self._coded(level - 1, index) if kind == KIND_ENTERING else 0
        own = values[level][first : first + len(model.scales)]
        coarse = values[level - 1][: len(own)] if kind == KIND_DIGITS else None
        data = runs.encode(model, own, coarse, self.profile.run_rows)
        return Section(level, kind, index, data)

    def decode(
        self, stream: Bitstream, index: int, levels: int, classes: npt.NDArray[np.uint8]
    ) -> tuple[PackedComponents, Ints | None]:
        """What the first levels say of a group: its components, and the correction
        [columns, tokens] if the last level is among them."""
        values, error = np.zeros((0, len(classes)), dtype=np.int32), None
        run_rows = self.profile.run_rows
        for level, kind, _ in self.parts(index):
            if level >= levels:
                break
            model, data = (
                self.model(level, kind, index, classes),
                stream.section(level, index, kind),
            )
            if kind == KIND_DIGITS:
                values = runs.decode(model, data, values, run_rows)
            elif kind == KIND_ENTERING:
                values = np.concatenate([values, runs.decode(model, data, None, run_rows)])
            else:
                error = runs.decode(model, data, None, run_rows)
        return self.pack(values, index, min(levels, self.num_levels - 1), classes), error

    def pack(
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
            self.profile.levels[levels - 1].centroids, step_sizes(classes, step),
            group.basis_scale, packed.large, packed.codes, packed.token_scale,
        )  # fmt: skip
        return packed

    def encode_classes(self, classes: npt.NDArray[np.uint8]) -> bytes:
        return rans_numba.encode(classes, self._token_tables, *_token_steps(len(classes)))

    def decode_classes(self, data: memoryview, num_tokens: int) -> npt.NDArray[np.uint8]:
        return rans_numba.decode(data, self._token_tables, *_token_steps(num_tokens))


def step_sizes(classes: npt.NDArray[np.uint8], step: float) -> Floats:
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
