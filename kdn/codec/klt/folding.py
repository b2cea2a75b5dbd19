"""A repair folded into a profile: what it adds is decoded along, and costs nothing.

Decoded values of a token, without rotation, are sums of rows: `x = bias + latents @ prediction +
components @ basis`. A repair adds `x @ down @ up + b`, which is linear in every row:

    x + x @ down @ up + b = bias' + latents @ prediction' + components @ basis'
    row' = row + row @ down @ up        bias' = bias + bias @ down @ up + b

So a profile with other rows decodes the same streams to repaired values, on cores and on GPUs, by
the same steps. Basis rows are those of weighted values: the weight is taken off before and put on
again after. Rows are rounded as the profile's own are, to 8 bits or 16, which makes values err by
1 to 1.5 % of their deviation (SmolLM2; the repair changes them by 22 %). Sinks are no sums of these
rows: they are repaired when they are decoded. What the last level corrects is none either: see
`repaired.py`.
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
from kdn.errors import MismatchError, UnsupportedError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GroupMap:
    """The maps of a group's layers, each with the columns that it changes."""

    maps: Sequence[tuple[torch.Tensor, LayerMap]]

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, columns] that others are sums of."""
        return self._mapped(rows, 0.0)

    def values(self, values: torch.Tensor) -> torch.Tensor:
        """Values [tokens, columns]."""
        return self._mapped(values, 1.0)

    def _mapped(self, rows: torch.Tensor, constant: float) -> torch.Tensor:
        found = rows.float().clone()
        for columns, one in self.maps:
            own = found[:, columns]
            found[:, columns] = own + own @ one.down @ one.up + constant * one.bias
        return found


def group_maps(profile: Profile, repair: Repair) -> list[GroupMap]:
    """What a repair does to each group; UnsupportedError where a map reaches beyond one."""
    width = int(profile.meta["num_kv_heads"]) * int(profile.meta["head_dim"])
    found: list[list[tuple[torch.Tensor, LayerMap]]] = [[] for _ in profile.groups]
    for one in repair.blocks:
        index, group = _group_of(profile, one.layers)
        columns = _columns(group, one.layers, width)
        _check_map(one, len(columns))
        found[index].append((columns, one))
    return [GroupMap(maps) for maps in found]


def folded(profile: Profile, maps: Sequence[GroupMap]) -> Profile:
    """The profile under whose id streams were encoded, with other rows."""
    tensors = dict(profile.tensors)
    predicted = []
    for index, (group, own) in enumerate(zip(profile.groups, maps, strict=True)):
        tensors |= {f"g{index}.{name}": t for name, t in _basis(group, own).items()}
        predicted.append(_prediction(profile, group, own))
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


def _columns(group: Group, layers: tuple[int, int], width: int) -> torch.Tensor:
    """Where keys, then values, of some layers are among a group's columns."""
    begin, height = group.layers[0], (group.layers[1] - group.layers[0]) * width
    own = torch.arange((layers[0] - begin) * width, (layers[1] - begin) * width)
    return torch.cat([own, own + height])


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
    coarse = torch.from_numpy(group.basis).float()
    coarse *= torch.from_numpy(group.basis_scale)[:, None]
    rows = torch.cat([torch.from_numpy(group.fine).float(), coarse])
    rows = own.rows(rows / torch.from_numpy(group.weight))
    weight = _even_weight(rows[len(group.fine) :], group.scale[len(group.fine) :])
    rows *= weight
    codes, scale = _rounded(rows[len(group.fine) :], 1)
    return {
        "fine": _halves(rows[: len(group.fine)]), "basis": codes, "basis_scale": scale,
        "weight": weight.numpy(),
    }  # fmt: skip


def _even_weight(rows: torch.Tensor, scales: npt.NDArray[np.uint8]) -> torch.Tensor:
    """One over the size that components of these rows give each column, so that rows of any
    length keep about the length they have."""
    sizes = torch.from_numpy(np.exp2(scales.astype(np.float32) / 4))  # classes: quarter octaves
    of_column = ((rows * sizes[:, None]).square().sum(0) / sizes.square().sum()).sqrt()
    most = float(of_column.max()) if len(rows) else 0.0
    if not 0 < most < float("inf"):
        return torch.ones(rows.shape[1])
    return 1 / (of_column.clamp(min=most * 1e-4) * rows.shape[1] ** 0.5)


def _prediction(profile: Profile, group: Group, own: GroupMap) -> dict[str, Array]:
    fine, out, scale, bias = (
        torch.from_numpy(profile.tensors[f"predict.{name}"][..., group.columns]).float()
        for name in ("fine", "out", "out_scale", "bias")
    )
    codes, scales = _rounded(own.rows(out * scale), 0)
    return {
        "predict.fine": _halves(own.rows(fine)),
        "predict.out": codes,
        "predict.out_scale": scales,
        "predict.bias": own.values(bias[None])[0].numpy(),
    }


def _halves(rows: torch.Tensor) -> Array:
    return rows.half().numpy()


def _rounded(rows: torch.Tensor, dim: int) -> tuple[Array, Array]:
    """To 8 bits, with one scale for each row (`dim` 1) or column (0)."""
    if not len(rows):
        return rows.to(torch.int8).numpy(), torch.ones(rows.shape[1 - dim]).numpy()
    scale = rows.abs().amax(dim=dim, keepdim=True).clamp_(min=1e-30) / 127
    return (rows / scale).round_().to(torch.int8).numpy(), scale.flatten().numpy()
