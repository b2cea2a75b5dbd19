"""A klt profile for a model that never ran: random but sound, small, and fast to make."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.cache.spec import ModelSpec
from kdn.cache.windows import num_unbounded
from kdn.calibrate.tables import flat_means, flat_tables, laplace_tables
from kdn.codec.klt import Profile, symbols
from kdn.codec.klt.profile import (
    FORMAT,
    VERSION,
    VERSION_OF_MEANS,
    VERSION_OF_RUNS,
    VERSION_OF_STAGES,
    VERSION_OF_WINDOWS,
)
from kdn.codec.rans import normalise

LEVELS = 4


def parts(
    spec: ModelSpec, seed: int = 0, leading: int = 0, in_parts: bool = False, run_rows: int = 0,
    means: bool = False, beyond: int = 0,
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:  # fmt: skip
    """Meta data and tensors, to be built into a profile or to be spoilt first. `leading`: of the
    first layer of each group in two stages; every other layer has one fewer than that before.
    `in_parts`: layers with a window are in groups of their own. `run_rows`: of each run. `means`:
    levels hold those of what they leave out. `beyond`: of so many components there are means
    alone."""
    rng = np.random.default_rng(seed)
    per_layer = 2 * spec.num_kv_heads * spec.head_dim
    columns, half = per_layer * spec.num_layers, spec.num_layers // 2
    cut = (num_unbounded(spec) if in_parts else 0) or half
    groups = [[0, cut], [cut, spec.num_layers]] if cut else [[0, 1]]
    embed, rank, sinks = 6, 4, 4
    tensors: dict[str, npt.NDArray[Any]] = {
        "embed.codes": rng.integers(-127, 128, (spec.vocab_size, embed)).astype(np.int8),
        "predict.mix": rng.integers(-127, 128, (3 * embed, rank)).astype(np.int8),
        "predict.mix_scale": np.full(rank, 1e-4, np.float32),
        "predict.fine": rng.normal(size=(1, columns)).astype(np.float16),
        "predict.out": rng.integers(-127, 128, (rank - 1, columns)).astype(np.int8),
        "predict.out_scale": np.full(columns, 0.01, np.float32),
        "predict.bias": rng.normal(size=columns).astype(np.float32),
        "sink.mean": rng.normal(size=(sinks, columns)).astype(np.float16),
        "sink.step": np.full(columns, 0.02, np.float32),
        "sink.scale": np.full(columns, 60, np.uint8),
        "sink.freqs": laplace_tables(),
        "fix.step": np.full(columns, 0.01, np.float32),
        "fix.scale": np.full(columns, 45, np.uint8),
        "importance": rng.normal(size=columns).astype(np.float32) / columns,
    }
    counts = []
    for index, (first, last) in enumerate(groups):
        width = (last - first) * per_layer
        count = 3 * width // 4
        basis = np.linalg.qr(rng.normal(size=(width, width)))[0][:count]
        fine, basis = basis[:4], basis[4:]
        scale = np.abs(basis).max(axis=1) / 127
        directions = np.linalg.qr(rng.normal(size=(width, 2)))[0]
        tensors |= {
            f"g{index}.weight": rng.uniform(0.5, 2, width).astype(np.float32),
            f"g{index}.metric": directions.astype(np.float16),
            f"g{index}.gain": np.array([1.5, 0.5], np.float32),
            f"g{index}.fine": fine.astype(np.float16),
            f"g{index}.basis": np.rint(basis / scale[:, None]).astype(np.int8),
            f"g{index}.basis_scale": scale.astype(np.float32),
            f"g{index}.scale": np.linspace(50, 30, count).astype(np.uint8),
        }
        counts.append([count // 2, count // 2 + 8, count - beyond, width])
    num_components = [list(row) for row in zip(*counts, strict=True)]
    flat = flat_tables(LEVELS, num_components)
    for name in flat:
        if name.endswith("freqs"):
            # Uneven, so that a wrong table shows.
            flat[name] = normalise(rng.integers(1, 1000, flat[name].shape))
        if name.endswith("thresholds"):
            shape = flat[name].shape
            flat[name] = np.sort(rng.integers(0, 200, shape), axis=1).astype(np.int32)
        if name.endswith("centroids"):
            flat[name] = rng.uniform(-0.2, 0.1, (symbols.NUM_SCALES, 3)).astype(np.float32)
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "model": spec.fingerprint.hex(),
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "groups": groups,
        "levels": LEVELS,
        "finest_step": 0.05,
        "importance_bias": 0.0,
        "num_components": num_components,
        "expected": [{} for _ in range(LEVELS)],
    }
    if leading:
        counts = [[leading - i for i in range(last - first)] for first, last in groups]
        meta |= {"version": VERSION_OF_STAGES, "leading": counts}
        for index, own in enumerate(counts):
            tensors |= _stages(tensors, f"g{index}.", spec, own, rng)
    if in_parts:
        told = meta.get("leading", [[] for _ in groups])
        meta |= {
            "version": VERSION_OF_WINDOWS,
            "windowed_from": int(num_unbounded(spec) > 0),
            "leading": told,
        }
    if run_rows:
        told = meta.get("leading", [[] for _ in groups])
        border = meta.get("windowed_from")
        meta |= {"version": VERSION_OF_RUNS, "run_rows": run_rows, "leading": told}
        meta["windowed_from"] = border
    if means:
        told = {"leading": [[] for _ in groups], "windowed_from": None, "run_rows": None}
        meta = told | meta | {"version": VERSION_OF_MEANS}
        flat |= _means(meta, [row + beyond for row in num_components[-2]], rng)
    return meta, tensors | flat


def _means(
    meta: dict[str, Any], sizes: list[int], rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """Uneven, as other tables are."""
    tensors = flat_means(meta, sizes)
    for name, one in tensors.items():
        is_table = name.endswith("freqs")
        tensors[name] = (
            normalise(rng.integers(1, 1000, one.shape))
            if is_table
            else rng.integers(30, 60, one.shape).astype(np.uint8)
        )
    return tensors


def _stages(
    tensors: dict[str, npt.NDArray[Any]], key: str, spec: ModelSpec, leading: list[int], rng: Any
) -> dict[str, npt.NDArray[Any]]:
    """In place of a group's rows of one stage; as many components."""
    per_layer = 2 * spec.num_kv_heads * spec.head_dim
    rows = [np.linalg.qr(rng.normal(size=(per_layer, k)))[0].T for k in leading]
    inner = np.linalg.qr(rng.normal(size=(sum(leading), len(tensors[key + "basis"]))))[0].T
    found = {}
    for name, matrix in (("rows", np.concatenate(rows)), ("basis", inner)):
        scale = np.abs(matrix).max(axis=-1) / 127
        found[key + name] = np.rint(matrix / scale[..., None]).astype(np.int8)
        found[f"{key}{name}_scale"] = scale.astype(np.float32)
    return found


def without_coarse(
    meta: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """As calibration trims what no level codes, where the precise components alone are left."""
    fine = [len(tensors[f"g{index}.fine"]) for index in range(len(meta["groups"]))]
    kept = {name: one for name, one in tensors.items() if not name.startswith("level")}
    for index, count in enumerate(fine):
        lengths = {"basis": 0, "basis_scale": 0, "scale": count}
        for name, length in lengths.items():
            kept[f"g{index}.{name}"] = kept[f"g{index}.{name}"][:length]
    counts = [fine] * (LEVELS - 1) + meta["num_components"][-1:]
    return meta | {"num_components": counts}, kept | flat_tables(LEVELS, counts)


def make_profile(
    spec: ModelSpec, seed: int = 0, leading: int = 0, in_parts: bool = False, run_rows: int = 0,
    means: bool = False, beyond: int = 0,
) -> Profile:  # fmt: skip
    return Profile.build(*parts(spec, seed, leading, in_parts, run_rows, means, beyond))
