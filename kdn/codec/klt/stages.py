"""A group's basis in two stages: one matrix across its layers, then one of each layer.

Coding many layers together gains more than anything else (decision 0001). But each row of one
matrix is as long as all columns of a group, so the operations per value grow with the number of
layers. Two stages write that matrix as a product:

    z = components' inner        [tokens, K]: the leading components of all layers
    columns of layer l = z[of l] rows_l / weight

Layers have as many leading components as they need, some few, others many.

The large components keep rows of their own, as long as the group's columns, in float32: they are
few, and 8 bits are not enough for them in either stage. All others go through both stages in
integers. Between the stages a token's leading components of a layer are rounded to 8 bits, with a
unit of their own. Calibration turns each layer's components so that they are about as large as each
other: the rounding then costs little beside that of the components (decision 0009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kdn.codec.klt.columns import Floats, Scaled
from kdn.codec.klt.profile import Group, Profile
from kdn.codec.klt.transform import GroupTransform, PackedComponents, add_rows, int8_product
from kdn.codec.threads import parallel_map


def transforms_of(profile: Profile) -> list[GroupTransform]:
    """The transform of each group, with one stage or two."""
    return [
        GroupTransform(group, profile) if group.rows is None else TwoStageTransform(group, profile)
        for group in profile.groups
    ]


@dataclass(frozen=True)
class Leading:
    """A layer's leading components: codes [tokens, k], in units of their token's."""

    codes: torch.Tensor
    unit: Floats


class TwoStageTransform(GroupTransform):
    """The transform of a group with two stages."""

    def __init__(self, group: Group, profile: Profile) -> None:
        super().__init__(group, profile)
        assert group.rows is not None
        assert group.rows_scale is not None
        self._width = group.rows.shape[1] // 2
        # What one product takes lies together.
        places, halves = group.rows_of_layers, (slice(self._width), slice(self._width, None))
        self._inner = [_bytes(group.basis[:, own]) for own in places]
        self._rows = [[_bytes(group.rows[own, half]) for own in places] for half in halves]
        self._scales = [group.rows_scale[own] for own in places]

    @property
    def at_once(self) -> Sequence[slice]:
        width = self._width
        return [
            slice(first, first + width) for first in range(0, 2 * len(self._inner) * width, width)
        ]

    def coarse(self, packed: PackedComponents) -> Callable[[slice], Scaled]:
        found = parallel_map(lambda layer: self.leading(packed, layer), range(len(self._inner)))

        def of(columns: slice) -> Scaled:
            place, first = divmod(columns.start, self._width)
            side, layer = divmod(place, len(self._inner))
            own = slice(first, first + columns.stop - columns.start)
            whole = int8_product(found[layer].codes, self._rows[side][layer][:, own])
            return Scaled(whole.numpy(), found[layer].unit, self.column_scale[columns])

        return of

    def _add_coarse(self, components: Floats, begin: int, out: Floats) -> None:
        """Nothing is rounded between the stages: this is one row, not one for each token."""
        group = self.group
        assert group.rows is not None
        leading = np.zeros(group.basis.shape[1], np.float32)
        super()._add_coarse(components, begin, leading)
        sides = out.reshape(2, len(self._inner), self._width)
        for layer, places in enumerate(group.rows_of_layers):
            own = np.zeros(2 * self._width, np.float32)
            add_rows(leading[places] * self._scales[layer], group.rows[places], own)
            sides[:, layer] += own.reshape(2, -1)

    def leading(self, packed: PackedComponents, layer: int) -> Leading:
        """The first stage of one layer, its rows' scales included."""
        num_tokens, inner = packed.codes.shape[1], self._inner[layer]
        if not len(packed.codes):
            nothing = torch.zeros((num_tokens, inner.shape[1]), dtype=torch.int8)
            return Leading(nothing, np.zeros(num_tokens, np.float32))
        whole = int8_product(torch.from_numpy(packed.codes).T, inner[: len(packed.codes)])
        codes = np.empty(tuple(whole.shape), np.int8)
        unit = np.empty(num_tokens, np.float32)
        _narrow(whole.numpy(), self._scales[layer], packed.token_scale, codes, unit)
        return Leading(torch.from_numpy(codes), unit)


def _bytes(matrix: npt.NDArray[np.int8]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix))


@njit(nogil=True, cache=True)
def _narrow(whole, scales, token_scale, codes, unit):  # type: ignore[no-untyped-def]
    """Sums [tokens, k], times their scales, to 8 bits with one unit per token."""
    own = np.empty(whole.shape[1], np.float32)
    for t in range(len(whole)):
        most = np.float32(1e-30)
        for c in range(len(own)):
            own[c] = np.float32(whole[t, c]) * scales[c]
        for c in range(len(own)):
            most = max(most, abs(own[c]))
        inverse = np.float32(127) / most
        for c in range(len(own)):
            codes[t, c] = np.int8(np.rint(own[c] * inverse))
        unit[t] = most / np.float32(127) * token_scale[t]
