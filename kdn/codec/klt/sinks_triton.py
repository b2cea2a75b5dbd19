"""The first tokens of a context on a GPU: `sinks.py` over the kernels of `symbols_triton.py`."""

from __future__ import annotations

import numpy as np
import torch

from kdn.codec.klt.gpu_input import Slab
from kdn.codec.klt.gpu_tables import MAX_SINKS, Tensor, base_bounds, base_intervals, put
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.runs import runs_of
from kdn.codec.klt.symbols_triton import decode_plain


class Sinks:
    """The first tokens of a context: `sinks.py` on the device."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        t, groups = profile.tensors, profile.groups
        widths = [group.columns.stop - group.columns.start for group in groups]
        scales = np.zeros((len(groups), max(widths)), np.uint8)
        for index, group in enumerate(groups):
            scales[index, : widths[index]] = t["sink.scale"][group.columns]
        self._widths, self._scales = widths, put(scales, device)
        self._num_runs = len(runs_of(max(widths), profile.run_rows))
        self._run_rows = profile.run_rows or 0
        self._rows_of = torch.tensor([[0, w] for w in widths], dtype=torch.int32, device=device)
        self._bounds = put(base_bounds(profile.sink_cdf), device)
        self._intervals = put(base_intervals(profile.sink_cdf), device)
        bias = put(t["predict.bias"], device)
        self._base = put(t["sink.mean"], device).float() - bias
        self._step = put(t["sink.step"], device)

    def decode(self, slab: Slab, source: Tensor, status: Tensor) -> Tensor:
        """What to add to the bias of B's columns, [16, columns]."""
        rows, count = self._scales.shape[1], slab.num_sinks
        shape = (len(self._widths), rows, 32)
        found = torch.empty(shape, dtype=torch.int32, device=status.device)
        decode_plain[(len(self._widths), self._num_runs, 1)](
            slab.words, slab.sink_places, self._rows_of, self._scales, self._bounds,
            self._intervals, found, status, count, rows, KEPT=32, ASM=status.is_cuda,
            RUN_ROWS=self._run_rows, num_warps=1,
        )  # fmt: skip
        both = found[:, :, :count]
        whole = torch.cat([both[g, :width] for g, width in enumerate(self._widths)]).T
        values = self._base[:count] + whole * self._step
        out = torch.zeros((MAX_SINKS, len(source)), device=status.device)
        out[:count] = torch.where(source >= 0, values[:, source.clamp(min=0)], 0.0)
        return out
