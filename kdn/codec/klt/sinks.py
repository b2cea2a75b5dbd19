"""The first tokens of a context, which all others attend to: coded as they are, not predicted."""

from __future__ import annotations

import numpy as np
import torch

from kdn.codec.klt import runs, symbols
from kdn.codec.klt.columns import Ints
from kdn.codec.klt.profile import Group, Profile
from kdn.codec.klt.symbols import Model
from kdn.errors import UnsupportedError


class SinkCoder:
    """Of one group. Integers are [columns, sinks], values [sinks, columns]."""

    def __init__(self, group: Group, profile: Profile) -> None:
        t = profile.tensors
        self._mean = torch.from_numpy(t["sink.mean"][:, group.columns]).float()
        self._step = torch.from_numpy(t["sink.step"][group.columns])
        self._scales = t["sink.scale"][group.columns]
        self._cdf, self._run_rows = profile.sink_cdf, profile.run_rows

    def quantise(self, values: torch.Tensor) -> Ints:
        steps = ((values - self._mean[: len(values)]) / self._step).T
        if steps.numel() and not float(steps.abs().max()) <= symbols.MAX_BASE:
            raise UnsupportedError("values too far from all that the profile was calibrated on")
        return np.ascontiguousarray(steps.round().to(torch.int32).numpy())

    def restore(self, whole: Ints) -> torch.Tensor:
        return self._mean[: whole.shape[1]] + torch.from_numpy(whole.T) * self._step

    def encode(self, whole: Ints) -> bytes:
        return runs.encode(self._model(whole.shape[1]), whole, None, self._run_rows)

    def decode(self, data: memoryview, num_sinks: int) -> torch.Tensor:
        return self.restore(runs.decode(self._model(num_sinks), data, None, self._run_rows))

    def _model(self, num_sinks: int) -> Model:
        limits = symbols.no_activity(len(self._scales))
        return Model(self._scales, np.zeros(num_sinks, np.int8), limits, self._cdf)
