"""The rows that analysis multiplies a residual by: the dual of each group's basis.

They follow from the profile, but they take 6 seconds of a core to work out (two groups of 2,200
components of 5,760 columns): more than the encoding of 40 chunks. So the first process that encodes
keeps them in a file beside the profile, and later ones read them in 50 ms. The file begins with a
digest of the rest under the profile's id: one that was damaged, or made of another profile, is made
again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy.typing as npt
import safetensors.torch
import torch

from kdn.cache.folder import write_private
from kdn.codec.klt.profile import Group, Profile
from kdn.codec.threads import parallel_map
from kdn.errors import FormatError

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
_PERSON = b"kdn-duals-1"  # another one for every change of what is kept, or of how it is worked out


@dataclass(frozen=True)
class Dual:
    """`large` [components, columns] gives the large components of a residual; `codes` (int8) times
    `scale` [components] gives the others of a weighted one."""

    large: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, group: Group) -> Dual:
        rows = dual_rows(group, torch.device("cpu"))
        large = rows[: len(group.fine)] * torch.from_numpy(group.weight)
        rest = rows[len(group.fine) :]
        scale = rest.abs().amax(dim=1).clamp_(min=1e-30) / 127
        return cls(large, (rest / scale[:, None]).round_().to(torch.int8), scale)


def dense_rows(
    stored: Mapping[str, npt.NDArray[Any]], device: torch.device, leading: Sequence[int] = ()
) -> torch.Tensor:
    """What all components add to the weighted values [components, columns], in float32, from a
    group's tensors; `leading`: of each layer, in two stages."""
    fine, scale = (torch.from_numpy(stored[n]).to(device).float() for n in ("fine", "basis_scale"))
    return torch.cat([fine, coarse_rows(stored, device, leading) * scale[:, None]])


def coarse_rows(
    stored: Mapping[str, npt.NDArray[Any]], device: torch.device, leading: Sequence[int] = ()
) -> torch.Tensor:
    """Those of the components that are not fine, in units of `basis_scale`; both stages as one
    matrix, where a group has two."""
    coarse = torch.from_numpy(stored["basis"]).to(device).float()
    if not leading:
        return coarse
    rows, scale = (torch.from_numpy(stored[n]).to(device).float() for n in ("rows", "rows_scale"))
    rows *= scale[:, None]
    sides = coarse.new_empty((len(coarse), 2, len(leading), rows.shape[1] // 2))
    each = list(leading)
    parts = zip(torch.split(coarse, each, dim=1), torch.split(rows, each), strict=True)
    for layer, (inner, own) in enumerate(parts):
        sides[:, :, layer] = (inner @ own).view(len(coarse), 2, sides.shape[-1])
    return sides.flatten(1)


def dual_rows(group: Group, device: torch.device) -> torch.Tensor:
    """Rows that give all components of a weighted residual.

    The stored basis is rounded: dividing by its Gram matrix makes analysis and synthesis inverses
    on its span.
    """
    basis = dense_rows(group.basis_tensors, device, group.leading)
    directions, gain = (torch.from_numpy(t).to(device).float() for t in (group.metric, group.gain))
    measured = torch.addmm(basis, (basis @ directions) * gain, directions.T)
    try:
        dual = torch.linalg.solve((measured @ measured.T).double(), measured.double()).float()
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise FormatError(f"the basis of layers {group.layers} is none: {error}") from error
    return torch.addmm(dual, (dual @ directions) * gain, directions.T)


class Duals:
    """Those of all groups of a profile, when they are first asked for."""

    def __init__(self, profile: Profile, file: Path | None = None) -> None:
        """Without a file they are kept by this object alone."""
        self._profile, self._file = profile, file
        self._found: list[Dual] | None = None

    def all(self) -> Sequence[Dual]:
        # No lock: to hold one while waiting for the pool, whose threads may want it, never ends.
        # Two callers at once find the same, twice.
        if self._found is None:
            self._found = self._read() or self._make()
        return self._found

    def _make(self) -> list[Dual]:
        made = parallel_map(Dual.of, self._profile.groups)
        if self._file is not None:
            named = {f"{i}.{key}": t for i, one in enumerate(made) for key, t in vars(one).items()}
            data = safetensors.torch.save(named)
            try:
                write_private(self._file, self._digest(data) + data)
            except OSError as error:
                logger.info("%s is not written, later starts take longer: %s", self._file, error)
        return made

    def _read(self) -> list[Dual] | None:
        try:
            whole = memoryview(self._file.read_bytes() if self._file is not None else b"")
        except OSError:
            return None
        if whole[:DIGEST_BYTES] != self._digest(whole[DIGEST_BYTES:]):
            return None
        named = safetensors.torch.load(bytes(whole[DIGEST_BYTES:]))
        keys = Dual.__dataclass_fields__
        return [
            Dual(**{key: named[f"{i}.{key}"] for key in keys})
            for i in range(len(self._profile.groups))
        ]

    def _digest(self, data: bytes | memoryview) -> bytes:
        own = blake2b(digest_size=DIGEST_BYTES, key=self._profile.profile_id, person=_PERSON)
        own.update(data)
        return own.digest()
