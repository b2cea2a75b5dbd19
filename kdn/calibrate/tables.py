"""Pass two: everything that is counted rather than fitted.

Chunks are quantised by the codec itself, with a draft profile whose tables are still empty; then
activity thresholds are cut at quantiles, and probability tables counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.klt import symbols, symbols_numba
from kdn.codec.klt.analysis import Analysis
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.kinds import KIND_CORRECTION, KIND_ENTERING
from kdn.codec.klt.means import in_rows
from kdn.codec.klt.profile import MEAN_LANES, NUM_CLASSES, VERSION_OF_MEANS, Profile
from kdn.codec.klt.runs import runs_of
from kdn.codec.klt.symbols import Ints, Model
from kdn.codec.rans import normalise
from kdn.codec.threads import parallel_map

RARE = 0.12
"""A level leaves out the last components if they are non-zero less often than this: such small ones
cost as much as they gain, and take time."""
PRIOR = 8.0
"""Each table starts with this many symbols, distributed as in neighbouring tables."""

OUTWARDS = 0.3
"""What is rounded to a size is some percent of a step nearer to zero, on average. Restored there,
values err least one by one, but they all shrink, and that adds up in the model. So they are
restored in the middle, and in coarse levels beyond it, by this part of how far their mean lies
within: a seventh less divergence for the same bytes (docs/decisions/0013-smaller.md)."""

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quantised:
    """One chunk as the codec quantises it: per group the exact size in finest steps and levels."""

    chunk: Chunk
    analysis: Analysis
    levels: list[list[Ints]]

    @property
    def classes(self) -> npt.NDArray[np.uint8]:
        return self.analysis.classes


def quantise(codec: KltCodec, chunk: Chunk, cache: KVCache) -> Quantised:
    analysis = codec.analyser.analyse(chunk, cache)
    rounded = [codec.analyser.round(part.exact) for part in analysis.groups]
    levels = [symbols.split_levels(part, codec.num_levels - 1) for part in rounded]
    return Quantised(chunk, analysis, levels)


def with_correction(codec: KltCodec, sample: Quantised) -> Quantised:
    """The same chunk with its last level."""
    levels = [
        [*levels, codec.analyser.correction(index, group, levels[-1], sample.classes)]
        for index, (levels, group) in enumerate(
            zip(sample.levels, sample.analysis.groups, strict=True)
        )
    ]
    return replace(sample, levels=levels)


def components_per_level(samples: Sequence[Quantised]) -> list[list[int]]:
    """How many of each group's components a level codes: whole blocks, up to the last that is not
    rare. One at least: of a model whose values are told by its tokens alone, all are rare, and
    every level must code something."""
    counted, num_levels = [], len(samples[0].levels[0])
    for level in range(num_levels):
        row = []
        for group in range(len(samples[0].levels)):
            used = np.mean([(s.levels[group][level] != 0).mean(axis=1) for s in samples], axis=0)
            starts = np.arange(0, len(used), symbols.BLOCK)
            often = np.add.reduceat(used, starts) / np.diff(starts, append=len(used))
            last = int(np.flatnonzero(often > RARE).max(initial=0)) + 1
            row.append(min(last * symbols.BLOCK, len(used)))
        counted.append(row)
    return [[max(row[g] for row in counted[: k + 1]) for g in range(len(counted[0]))]
            for k in range(num_levels)]  # fmt: skip


def count_tables(
    codec: KltCodec, samples: Sequence[Quantised], num_components: list[list[int]]
) -> dict[str, npt.NDArray[Any]]:
    """The `level*` and `token` tensors of a profile, for the levels the samples have."""
    tensors: dict[str, npt.NDArray[Any]] = {"token.freqs": _token_freqs(samples)}
    num_levels = codec.num_levels
    for level in range(len(samples[0].levels[0])):
        before = (
            num_components[level - 1]
            if 0 < level < num_levels - 1
            else [0] * len(num_components[0])
        )
        tensors |= _count_part(codec, samples, level, before, num_components[level], digits=False)
        if 0 < level < num_levels - 1:
            nothing = [0] * len(before)
            tensors |= _count_part(codec, samples, level, nothing, before, digits=True)
        is_coarse = level < num_levels - 2
        tensors[f"level{level}.centroids"] = (
            _restored(codec, samples, level, num_components) if is_coarse else _middles()
        )
    return tensors


def _count_part(
    codec: KltCodec, samples: Sequence[Quantised], level: int, first: list[int], last: list[int],
    *, digits: bool,
) -> dict[str, npt.NDArray[Any]]:  # fmt: skip
    """Tables of one kind of section: components [first, last) of each group at a level."""
    key, tensors = f"level{level}.digits" if digits else f"level{level}", {}
    counts = np.zeros(_table_shape(digits))
    kind = KIND_CORRECTION if level == codec.num_levels - 1 else KIND_ENTERING
    for group, (begin, end) in enumerate(zip(first, last, strict=True)):
        cuts = []
        for run in runs_of(end - begin, codec.profile.run_rows):
            rows = slice(begin + run.start, begin + run.stop)
            values = [s.levels[group][level][rows] for s in samples]
            coarse = [s.levels[group][level - 1][rows] for s in samples] if digits else None
            cuts.append(thresholds(values))
            models = [
                replace(codec.coder.table_model(kind, group, rows, s.classes), thresholds=cuts[-1])
                for s in samples
            ]
            counts += count_symbols(models, values, coarse)
        tensors[f"{key}.g{group}.thresholds"] = np.concatenate(cuts)
    return tensors | {f"{key}.freqs": frequencies(counts)}


def _token_freqs(samples: Sequence[Quantised]) -> npt.NDArray[np.uint16]:
    counts = np.bincount(np.concatenate([s.classes for s in samples]), minlength=NUM_CLASSES)
    return normalise(counts[None] + 1)


def thresholds(values: Sequence[Ints]) -> npt.NDArray[np.int32]:
    """Quantiles of the activity on entering each block, over all chunks."""
    sums = np.concatenate(parallel_map(symbols_numba.activity_sums, values), axis=1)
    ranks = np.arange(1, symbols.NUM_ACTIVITIES) / symbols.NUM_ACTIVITIES
    cuts = np.quantile(sums, ranks, axis=1).T if len(sums) else np.zeros((0, len(ranks)))
    return np.ascontiguousarray(np.maximum(np.ceil(cuts), 1).astype(np.int32))


def count_symbols(
    models: Sequence[Model], values: Sequence[Ints], coarse: Sequence[Ints] | None
) -> Counts:
    """How often each symbol is coded with each table, [tables, alphabet], over all chunks."""
    is_digit = coarse is not None
    num_tables = symbols.DIGIT_TABLES if is_digit else symbols.BASE_TABLES
    alphabet = symbols.DIGIT_ALPHABET if is_digit else symbols.BASE_ALPHABET

    def one(index: int) -> npt.NDArray[np.int64]:
        given = coarse[index] if coarse is not None else None
        used, found = symbols_numba.contexts(models[index], values[index], given)
        flat = used.astype(np.int64).ravel() * alphabet + found.ravel()
        return np.bincount(flat, minlength=num_tables * alphabet)

    total: Counts = np.sum(parallel_map(one, range(len(values))), axis=0, dtype=np.float64)
    return total.reshape(num_tables, alphabet)


def _table_shape(digits: bool) -> tuple[int, int]:
    if digits:
        return symbols.DIGIT_TABLES, symbols.DIGIT_ALPHABET
    return symbols.BASE_TABLES, symbols.BASE_ALPHABET


def count_means(codec: KltCodec, samples: Sequence[Quantised]) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a profile that code means of components left out."""
    tensors, counts, means = {}, np.zeros(_table_shape(digits=False)), codec.means
    for level, group in means.parts():
        exact = [
            means.exact(level, group, s.analysis.groups[group].exact, s.classes) for s in samples
        ]
        rows = np.stack([in_rows(one) for one in exact])
        filled = in_rows(np.ones_like(exact[0])).sum(axis=1)
        deviation = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=0).sum(axis=1) / filled)
        scales = scale_class(torch.from_numpy(deviation), 1.0)
        values = [in_rows(means.round(one)) for one in exact]
        model = means.model(scales)
        counts += count_symbols([model] * len(values), values, None)
        tensors[f"level{level}.g{group}.means.scale"] = scales
    return tensors | {"mean.freqs": frequencies(counts)[:: symbols.NUM_ACTIVITIES]}


def frequencies(counts: Counts) -> npt.NDArray[np.uint16]:
    """Symmetric in sign where the data are; rare tables lean on the tables beside them."""
    if counts.shape[1] == symbols.BASE_ALPHABET:
        pairs = (counts[:, 1:15:2] + counts[:, 2:15:2]) / 2
        counts = counts.copy()
        counts[:, 1:15:2] = counts[:, 2:15:2] = pairs
        grids = [counts.reshape(symbols.NUM_SCALES, symbols.NUM_ACTIVITIES, -1)]
    else:
        zero = counts[: symbols.ZERO_TABLES].copy()
        zero[:, 1] = zero[:, 2] = zero[:, 1:].mean(axis=1)
        grids = [
            zero.reshape(symbols.NUM_SCALES, -1, symbols.DIGIT_ALPHABET),
            counts[symbols.ZERO_TABLES :].reshape(symbols.NUM_SCALES, -1, symbols.DIGIT_ALPHABET),
        ]
    smooth = [_lean(grid).reshape(-1, counts.shape[1]) for grid in grids]
    # Integers large enough to keep what is rare; every symbol stays possible.
    scaled = np.concatenate(smooth)
    scaled = scaled / scaled.sum(axis=1, keepdims=True) * 2**40
    return normalise(scaled.astype(np.int64) + 1)


def _lean(grid: Counts) -> Counts:
    """Adds PRIOR symbols spread as in the same scale class, itself spread as in classes nearby."""
    per_scale = grid.sum(axis=1)
    classes = np.arange(len(per_scale))
    nearness = 2.0 ** (-6.0 * np.abs(classes[:, None] - classes))
    near = nearness @ per_scale + 1e-3 * np.eye(grid.shape[2])[0] + 1e-4
    spread = near / near.sum(axis=1, keepdims=True)
    leaning: Counts = grid + PRIOR * spread[:, None, :]
    return leaning


def _restored(
    codec: KltCodec, samples: Sequence[Quantised], level: int, num_components: list[list[int]]
) -> npt.NDArray[np.float32]:
    """What to add to a size, in steps of this level, by scale class and size 1, 2, more: the
    opposite of `OUTWARDS` times how far the values lie from it on average."""
    scale = 3 ** (codec.num_levels - 2 - level)
    total = np.zeros(symbols.NUM_SCALES * 3)
    count = np.zeros(symbols.NUM_SCALES * 3)
    for group, used in enumerate(num_components[level]):
        classes = codec.profile.groups[group].scale[:used].astype(np.int64)
        for sample in samples:
            q = sample.levels[group][level][:used]
            shift = 2 * (sample.classes.astype(np.int64) - NUM_CLASSES // 2)
            c, t = np.nonzero(q)
            size = np.abs(q[c, t])
            cell = np.clip(classes[c] + shift[t], 0, symbols.NUM_SCALES - 1) * 3
            cell += np.minimum(size, 3) - 1
            miss = np.sign(q[c, t]) * sample.analysis.groups[group].exact[c, t] / scale - size
            total += np.bincount(cell, weights=miss, minlength=len(total))
            count += np.bincount(cell, minlength=len(count))
    # A few hundred sightings count as much as no shift at all.
    within = np.clip(-total / (count + 200), 0, 0.5)
    shifts = OUTWARDS * within
    return np.ascontiguousarray(shifts.reshape(-1, 3).astype(np.float32))


def _middles() -> npt.NDArray[np.float32]:
    return np.zeros((symbols.NUM_SCALES, 3), np.float32)


def flat_tables(num_levels: int, num_components: list[list[int]]) -> dict[str, npt.NDArray[Any]]:
    """Tables that say nothing: for a draft profile."""
    tensors: dict[str, npt.NDArray[Any]] = {"token.freqs": _flat((1, NUM_CLASSES))}
    for level in range(num_levels):
        tensors[f"level{level}.centroids"] = _middles()
        is_refined = 0 < level < num_levels - 1
        parts = {f"level{level}": False} | ({f"level{level}.digits": True} if is_refined else {})
        for key, digits in parts.items():
            tensors[f"{key}.freqs"] = _flat(_table_shape(digits))
            for group, coded in enumerate(num_components[level]):
                before = num_components[level - 1][group] if is_refined else 0
                blocks = -(-(before if digits else coded - before) // symbols.BLOCK)
                empty = np.ones((blocks, symbols.NUM_ACTIVITIES - 1), np.int32)
                tensors[f"{key}.g{group}.thresholds"] = empty
    return tensors


def flat_means(meta: dict[str, Any], sizes: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """Of means, the same, for groups of so many components; none of versions without them."""
    if meta["version"] != VERSION_OF_MEANS:
        return {}
    tensors = {"mean.freqs": _flat((symbols.NUM_SCALES, symbols.BASE_ALPHABET))}
    for level, coded in enumerate(meta["num_components"][:-1]):
        for group, (own, size) in enumerate(zip(coded, sizes, strict=True)):
            if own < size:
                rows = -(-(size - own) // MEAN_LANES)
                tensors[f"level{level}.g{group}.means.scale"] = np.full(
                    rows, SCALE_ORIGIN, np.uint8
                )
    return tensors


def laplace_tables() -> npt.NDArray[np.uint16]:
    """One table per scale class and (equal) activity for the first tokens: two-sided geometric."""
    sizes = np.arange(1, symbols.LARGEST_PLAIN + 1)
    rows = []
    for scale in range(symbols.NUM_SCALES):
        decay = np.exp(-np.sqrt(2.0) / scale_of_class(scale))
        each = (1 - decay) / (1 + decay) * decay**sizes
        row = np.empty(symbols.BASE_ALPHABET)
        row[0] = (1 - decay) / (1 + decay)
        row[1:15:2] = row[2:15:2] = each
        row[symbols.ESCAPE] = max(1 - row[:15].sum(), 0)
        rows.append(
            np.repeat((row * 2**40).astype(np.int64)[None] + 2**24, symbols.NUM_ACTIVITIES, 0)
        )
    return normalise(np.concatenate(rows))


def scale_class(deviation: torch.Tensor, step: float) -> npt.NDArray[np.uint8]:
    """Quarter octaves of deviation over step."""
    ratio = (deviation / step).clamp(min=1e-9).log2() * 4 + SCALE_ORIGIN
    return ratio.round().clamp(0, symbols.NUM_SCALES - 1).to(torch.uint8).cpu().numpy()


def scale_of_class(scale: int) -> float:
    return float(2.0 ** ((scale - SCALE_ORIGIN) / 4))


SCALE_ORIGIN = 40


def correction_scales(samples: Sequence[Quantised]) -> npt.NDArray[np.uint8]:
    """Scale class of each column's errors, in steps of the last level."""
    squares = [
        np.concatenate([(levels[-1].astype(np.float64) ** 2).mean(axis=1) for levels in s.levels])
        for s in samples
    ]
    return scale_class(torch.from_numpy(np.mean(squares, axis=0)).sqrt(), 1.0)


def _flat(shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """All rows are alike."""
    return np.tile(normalise(np.ones(shape[-1], int)), (*shape[:-1], 1))


def draft_profile(meta: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Profile:
    """A profile that can quantise; tables not counted yet say nothing."""
    width = 2 * meta["num_kv_heads"] * meta["head_dim"]
    counts = meta.get("num_components") or [
        [len(tensors[f"g{g}.scale"]) for g in range(len(meta["groups"]))]
    ] * (meta["levels"] - 1)
    counts = [*counts, [(last - first) * width for first, last in meta["groups"]]]
    draft = meta | {"num_components": counts, "expected": [{} for _ in range(meta["levels"])]}
    sizes = [len(tensors[f"g{g}.scale"]) for g in range(len(meta["groups"]))]
    flat = flat_tables(meta["levels"], counts) | flat_means(draft, sizes)
    return Profile.build(draft, flat | tensors)
