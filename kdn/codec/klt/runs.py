"""The rows of a section in runs that decode side by side.

A section is one chain of steps: a GPU does one of each group and chunk at a time, and where groups
are wide, chains are long and few. So a profile may say how many rows make a run (`run_rows`). A
section with more rows begins with the number of 16-bit words of each of its runs, as u32. Then come
the runs, each coded as a section of its own: with its own states, and no activity before its first
row. A section with fewer rows is as without runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kdn.codec.format import Buffer
from kdn.codec.klt import symbols_numba
from kdn.codec.klt.symbols import BLOCK, Ints, Model
from kdn.errors import FormatError


def runs_of(num_rows: int, run_rows: int | None) -> list[slice]:
    """Rows of each run; one at least."""
    if run_rows is None or num_rows <= run_rows:
        return [slice(0, num_rows)]
    return [slice(at, min(at + run_rows, num_rows)) for at in range(0, num_rows, run_rows)]


def encode(model: Model, values: Ints, coarse: Ints | None, run_rows: int | None) -> bytes:
    """One section: see `symbols.encode`."""
    runs = runs_of(len(model.scales), run_rows)
    if len(runs) == 1:
        return symbols_numba.encode(model, values, coarse)
    coded = []
    for run in runs:
        before = None if coarse is None else coarse[run]
        coded.append(symbols_numba.encode(_part(model, run), values[run], before))
    sizes = np.array([len(one) // 2 for one in coded], "<u4")
    return b"".join([sizes.tobytes(), *coded])


def decode(model: Model, data: Buffer, coarse: Ints | None, run_rows: int | None) -> Ints:
    """The inverse of `encode`."""
    runs = runs_of(len(model.scales), run_rows)
    if len(runs) == 1:
        return symbols_numba.decode(model, data, coarse)
    view, begin = memoryview(data), 4 * len(runs)
    sizes = np.frombuffer(view[:begin], "<u4") if len(view) >= begin else np.zeros(0, "<u4")
    ends = begin + 2 * np.cumsum(sizes, dtype=np.int64)
    if not len(ends) or ends[-1] != len(view):
        raise FormatError(f"expected {len(runs)} runs that fill a section of {len(view)} bytes")
    values = np.empty(model.shape, np.int32)
    for run, size, end in zip(runs, 2 * sizes.astype(np.int64), ends, strict=True):
        before = None if coarse is None else coarse[run]
        values[run] = symbols_numba.decode(_part(model, run), view[end - size : end], before)
    return values


def _part(model: Model, run: slice) -> Model:
    blocks = slice(run.start // BLOCK, -(-run.stop // BLOCK))
    return replace(model, scales=model.scales[run], thresholds=model.thresholds[blocks])
