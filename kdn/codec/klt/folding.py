"""A repair folded into a profile: what it adds is decoded along, and costs nothing.

Decoded values of a token, without rotation, are sums of rows: `x = bias + latents @ prediction +
components @ basis`. A repair adds `x @ down @ up + b`, which is linear in every row:

    x + x @ down @ up + b = bias' + latents @ prediction' + components @ basis'
    row' = row + row @ down @ up        bias' = bias + bias @ down @ up + b

So a profile with other rows decodes the same streams to repaired values, on cores and on GPUs, by
the same steps. Basis rows are those of weighted values: the weight is taken off before and put on
again after. Rows are rounded as the profile's own are, to 8 bits or 16, which makes values err by
1 to 1.5 % of their deviation (SmolLM2; the repair changes them by 22 %). Sinks are no sums of these
rows: they are repaired when they are decoded. Nor is what the last level corrects: see
`repaired.py`.

In a group of two stages (`stages.py`) a layer's repair changes the rows of that layer. A map from
one layer to another has no place there: such a repair is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.codec.klt.profile import Group, Profile
from kdn.codec.repair import LayerMap, Repair
from kdn.codec.threads import parallel_map
from kdn.errors import MismatchError, UnsupportedError

Array = npt.NDArray[Any]
MAX_RATIO = 30_000
"""Of fine rows' entries over others' scales: on a GPU both are 16-bit floats in units of these."""


@dataclass(frozen=True)
class GroupMap:
    """The maps of a group's layers, each with where keys and values of these layers are among the
    group's columns."""

    maps: Sequence[tuple[tuple[slice, slice], LayerMap]]

    def add_to_rows(self, rows: torch.Tensor) -> None:
        """In place, to rows [n, columns] that others are sums of."""
        self._add(rows, constant=False)

    def add_to_values(self, values: torch.Tensor) -> None:
        """In place, to values [tokens, columns]."""
        self._add(values, constant=True)

    def of_layer(self, columns: slice, width: int) -> GroupMap:
        """What it does to one layer alone, whose keys are there, in a row of that layer's keys and
        values."""
        own = (slice(0, width), slice(width, 2 * width))
        return GroupMap([(own, one) for (keys, _), one in self.maps if keys == columns])

    def _add(self, rows: torch.Tensor, *, constant: bool) -> None:
        for columns, one in self.maps:
            sides = [rows[:, own] for own in columns]
            half = len(one.down) // 2
            small = torch.addmm(sides[0] @ one.down[:half], sides[1], one.down[half:])
            for side, own in zip(sides, (slice(0, half), slice(half, None)), strict=True):
                side.addmm_(small, one.up[:, own])
                if constant:
                    side += one.bias[own]


def group_maps(profile: Profile, repair: Repair) -> list[GroupMap]:
    """What a repair does to each group; UnsupportedError where a map reaches beyond one."""
    width = int(profile.meta["num_kv_heads"]) * int(profile.meta["head_dim"])
    found: list[list[tuple[tuple[slice, slice], LayerMap]]] = [[] for _ in profile.groups]
    for one in repair.blocks:
        index, group = _group_of(profile, one.layers)
        if group.rows is not None and one.layers[1] - one.layers[0] > 1:
            raise UnsupportedError(
                f"a repair across layers [{one.layers[0]}, {one.layers[1]}) cannot be folded into "
                f"the two stages of layers {group.layers}: fit seams layer by layer"
            )
        columns = _columns(group, one.layers, width)
        _check_map(one, 2 * (one.layers[1] - one.layers[0]) * width)
        found[index].append((columns, one))
    return [GroupMap(maps) for maps in found]


def folded(profile: Profile, maps: Sequence[GroupMap]) -> Profile:
    """The profile under whose id streams were encoded, with other rows."""
    tensors = dict(profile.tensors)
    jobs = list(zip(profile.groups, maps, strict=True))
    for index, basis in enumerate(parallel_map(lambda job: _basis(*job), jobs)):
        tensors |= {f"g{index}.{name}": t for name, t in basis.items()}
    predicted = [_prediction(profile, *job) for job in jobs]
    for name in predicted[0]:
        tensors[name] = np.concatenate([part[name] for part in predicted], axis=-1)
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise UnsupportedError(f"a repair too large to be folded into the profile's {name}")
    return replace(profile, tensors=tensors)


def _group_of(profile: Profile, layers: tuple[int, int]) -> tuple[int, Group]:
    first, last = layers
    for index, group in enumerate(profile.groups):
        if group.layers[0] <= first < last <= group.layers[1]:
            return index, group
    known = ", ".join(f"[{a}, {b})" for a, b in (group.layers for group in profile.groups))
    raise UnsupportedError(
        f"a repair of layers [{first}, {last}) does not lie within one of the profile's groups "
        f"of layers {known}"
    )


def _columns(group: Group, layers: tuple[int, int], width: int) -> tuple[slice, slice]:
    """Where keys, and values, of some layers are among a group's columns."""
    begin, height = group.layers[0], (group.layers[1] - group.layers[0]) * width
    first, last = ((layer - begin) * width for layer in layers)
    return slice(first, last), slice(height + first, height + last)


def _check_map(one: LayerMap, count: int) -> None:
    rank = one.down.shape[-1]
    expected = ((count, rank), (rank, count), (count,))
    found = tuple(tuple(t.shape) for t in (one.down, one.up, one.bias))
    if found != expected:
        raise MismatchError(f"a repair of layers {one.layers}: expected {expected}, found {found}")


def _basis(group: Group, own: GroupMap) -> dict[str, Array]:
    """The weight only says what basis rows are divided by, where nothing is encoded. So it is one
    that suits their rounding: entries of all columns are about as large, and 8 bits cost a column
    less than a hundredth of what these rows tell of it. The encoder's weight follows what matters
    to the model, and it alone can make up for what rounding takes."""
    if group.rows is not None:
        return _basis_of_stages(group, own)
    num_fine = len(group.fine)
    rows = torch.from_numpy(np.concatenate([group.fine.astype(np.float32), group.basis]))
    rows[num_fine:] *= torch.from_numpy(group.basis_scale)[:, None]
    rows /= torch.from_numpy(group.weight)
    own.add_to_rows(rows)
    weight = _even_weight(rows[num_fine:], _sizes(group.scale[num_fine:]))
    rows *= weight
    codes, scale = _rounded(rows[num_fine:], 1)
    _check_ratio(group, rows[:num_fine], scale)
    return {
        "fine": _halves(rows[:num_fine]), "basis": codes, "basis_scale": scale,
        "weight": weight.numpy(),
    }  # fmt: skip


def _basis_of_stages(group: Group, own: GroupMap) -> dict[str, Array]:
    """Fine rows are folded as those of one stage, the others where layers' rows are."""
    assert group.rows is not None
    assert group.rows_scale is not None
    count, width = len(group.leading), group.rows.shape[1] // 2
    inner = torch.from_numpy(group.basis * group.basis_scale[:, None])
    sizes = (_sizes(group.scale[len(group.fine) :]).square() @ inner.square()).sqrt()
    weight, codes, scales = torch.empty(2, count, width), [], []
    old_weight = torch.from_numpy(group.weight).view(2, count, width)
    for layer, places in enumerate(group.rows_of_layers):
        rows = torch.from_numpy(group.rows[places] * group.rows_scale[places][:, None])
        rows /= old_weight[:, layer].reshape(-1)
        own.of_layer(slice(layer * width, (layer + 1) * width), width).add_to_rows(rows)
        even = _even_weight(rows, sizes[places])
        weight[:, layer] = even.view(2, width)
        rounded, scale = _rounded(rows * even, 1)
        codes.append(rounded)
        scales.append(scale)
    fine = torch.from_numpy(group.fine.astype(np.float32) / group.weight)
    own.add_to_rows(fine)
    fine *= weight.view(-1)
    _check_ratio(group, fine, group.basis_scale)
    return {
        "fine": _halves(fine), "weight": weight.view(-1).numpy(),
        "rows": np.concatenate(codes), "rows_scale": np.concatenate(scales),
    }  # fmt: skip


def _check_ratio(group: Group, fine: torch.Tensor, scale: Array) -> None:
    largest = float(fine.abs().max()) if len(fine) else 0.0
    if len(scale) and not largest < MAX_RATIO * float(np.median(scale)):
        raise UnsupportedError(f"a repair too large for the basis of layers {group.layers}")


def _sizes(scales: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Of components, up to a factor: classes are quarter octaves."""
    return torch.from_numpy(np.exp2(scales.astype(np.float32) / 4))


def _even_weight(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """One over the size that components of these rows give each column, so that rows of any
    length keep about the length they have."""
    of_column = (sizes.square() @ rows.square() / sizes.square().sum()).sqrt()
    most = float(of_column.max()) if len(rows) else 0.0
    if not 0 < most < float("inf"):
        return torch.ones(rows.shape[1])
    weight: torch.Tensor = 1 / (of_column.clamp(min=most * 1e-4) * rows.shape[1] ** 0.5)
    return weight


def _prediction(profile: Profile, group: Group, own: GroupMap) -> dict[str, Array]:
    def own_columns(name: str) -> torch.Tensor:
        whole = np.atleast_2d(profile.tensors[f"predict.{name}"])
        return torch.from_numpy(whole[:, group.columns].astype(np.float32))

    fine, out, scale, bias = map(own_columns, ("fine", "out", "out_scale", "bias"))
    out *= scale
    for rows in (fine, out):
        own.add_to_rows(rows)
    own.add_to_values(bias)
    codes, scales = _rounded(out, 0)
    return {
        "predict.fine": _halves(fine),
        "predict.out": codes,
        "predict.out_scale": scales,
        "predict.bias": bias[0].numpy(),
    }


def _halves(rows: torch.Tensor) -> Array:
    return rows.half().numpy()


def _rounded(rows: torch.Tensor, dim: int) -> tuple[Array, Array]:
    """To 8 bits, with one scale for each row (`dim` 1) or column (0)."""
    if not len(rows):
        return rows.to(torch.int8).numpy(), torch.ones(rows.shape[1 - dim]).numpy()
    scale = rows.abs().amax(dim=dim, keepdim=True).clamp_(min=1e-30) / 127
    return (rows / scale).round_().to(torch.int8).numpy(), scale.flatten().numpy()
