"""The means of components that a level leaves out.

A level codes the components that are often not zero at its step, and leaves out the others: each
of them is small, token by token. But the mean of one over a chunk is not: what a document is about
shifts many of them for all of its tokens, and an error that is the same in all tokens harms the
model more than one that changes its sign. So a level also holds, for each component that it leaves
out, the mean over the chunk's tokens, and what it restores is moved by all of these. (A profile may
have components that no level codes. These have their means alone.) Their step is the level's over
the root of the number of tokens: a mean is the first coefficient of an orthonormal transform along
the tokens, and all coefficients share one step.

A later level that codes a component codes all of it, so the means of levels before are not needed
any more; nor does the last level use any, which corrects what components leave. The first tokens
of a context, which are coded as they are, count as zero, and nothing moves them.

A section is coded as one of first tokens is (`sinks.py`): rows of MEAN_LANES components that share
a scale class, one after the other. It has no runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.codec.klt import symbols, symbols_numba
from kdn.codec.klt.columns import Floats, Ints
from kdn.codec.klt.level_coding import step_sizes
from kdn.codec.klt.profile import MEAN_LANES, Profile
from kdn.codec.klt.symbols import Model


class MeanCoder:
    """Means of one profile, found, coded and read."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._last = profile.num_levels - 2  # the finest that codes components

    def parts(self) -> Iterator[tuple[int, int]]:
        """Level and group of every section."""
        for level in range(self._profile.num_levels):
            for group in range(len(self._profile.groups)):
                if self.count(level, group):
                    yield level, group

    def count(self, level: int, group: int) -> int:
        return self._profile.num_means(level, group)

    def exact(
        self, level: int, group: int, components: Floats, classes: npt.NDArray[np.uint8]
    ) -> Floats:
        """What a level would code of a group's components [component, token], given in finest
        steps, before rounding."""
        own = self._profile.levels[level].num_components[group]
        left = components[own : own + self.count(level, group)]
        sizes = step_sizes(classes, 3.0 ** (level - self._last)) / np.float32(len(classes) ** 0.5)
        # Not by BLAS, whose threads took 11 ms to wake for 0.2 ms of work.
        found: Floats = np.einsum("ct,t->c", left, sizes)
        return found

    def round(self, exact: Floats) -> Ints:
        """As far as an escape reaches."""
        limit = np.float32(symbols.MAX_BASE)
        whole: Ints = np.rint(np.clip(exact, -limit, limit)).astype(np.int32)
        return whole

    def restore(self, level: int, whole: Ints, num_tokens: int) -> Floats:
        """In the unit of components."""
        step = self._profile.finest_step * 3 ** (self._last - level) / num_tokens**0.5
        sizes: Floats = whole.astype(np.float32) * np.float32(step)
        return sizes

    def encode(self, level: int, group: int, whole: Ints) -> bytes:
        return symbols_numba.encode(self._own_model(level, group), in_rows(whole), None)

    def decode(self, level: int, group: int, data: memoryview) -> Ints:
        rows = symbols_numba.decode(self._own_model(level, group), data, None)
        found: Ints = rows.ravel()[: self.count(level, group)]
        return found

    def model(self, scales: npt.NDArray[np.uint8]) -> Model:
        """Of rows with these scale classes."""
        lanes = np.zeros(MEAN_LANES, np.int8)
        return Model(scales, lanes, symbols.no_activity(len(scales)), self._profile.mean_cdf)

    def _own_model(self, level: int, group: int) -> Model:
        return self.model(self._profile.tensors[f"level{level}.g{group}.means.scale"])


def in_rows(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One after the other, MEAN_LANES a row, the last row filled with zeros."""
    num_rows = -(-len(values) // MEAN_LANES)
    rows = np.zeros((num_rows, MEAN_LANES), values.dtype)
    rows.ravel()[: len(values)] = values
    return rows
