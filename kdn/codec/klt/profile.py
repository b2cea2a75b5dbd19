"""What is calibrated once for a model and shared by every writer and reader of its bitstreams.

A profile is a safetensors file and is named by the digest of its bytes. It comes from outside, like
any stream: everything is checked on reading, so that the codec may trust shapes and ranges.

Values of a token are ordered group by group, and within a group: keys of its layers, then values of
its layers, each `[layer, head, channel]`. That flat order is called `columns` below.

| tensor | shape | meaning |
|---|---|---|
| embed.codes | int8 [vocab, E] | token embeddings, normalised and quantised |
| predict.mix, .mix_scale | int8 [3 E, R], f32 [R] | of a token and the two before it, to latents |
| predict.fine | f16 [m, columns] | from the m largest latents to the predicted values |
| predict.out, .out_scale | int8 [R - m, columns], f32 [columns] | and from the others, quantised |
| predict.bias | f32 [columns] | mean of the predicted values |
| sink.mean, .step, .scale | f16 [S, columns], f32, u8 [columns] | first tokens of a context |
| fix.step, fix.scale | f32, u8 [columns] | the last level: see codec.py |
| importance | f32 [columns] | how much a token's errors matter: log of it, linear in its values |
| g.weight, g.metric, g.gain | f32 [c], f16 [c, M], f32 [M] | error metric of group g |
| g.fine | f16 [m, c] | basis of the weighted values: rows of the m largest components |
| g.basis, g.basis_scale | int8 [n - m, c], f32 [n - m] | and those of the others, quantised |
| g.rows, g.rows_scale | int8 [K, c / L], f32 [K] | of all L layers of a group in two stages |
| g.scale | u8 [n] | scale class of each component |
| level.freqs, level.g.thresholds | u16, i32 | tables of entering components (symbols.py) |
| level.digits.freqs, level.digits.g.thresholds | u16, i32 | and of refined ones |
| level.centroids | f32 [scale classes, 3] | what to add to a size of 1, 2, or more, in steps |
| mean.freqs, level.g.means.scale | u16 [scale classes, 16], u8 | version 7: see means.py |

Version 4 differs from version 3 in one thing: its groups may have two stages (`stages.py`). The
meta data's `leading` says of each group how many components each of its layers has, K in all, that
the matrix across layers leads to; an empty list is a group of one stage. In a group of two stages,
`g.basis` is [n - m, K], and `g.rows` leads from a layer's components to its columns, keys before
values, layer after layer. Calibration once wrote a profile without such groups as version 3.

Version 5 is version 4 for a model with sliding windows. Its layers are numbered as streams have
them, those with a window last (`kdn/codec/windowed.py`), and the meta data's `windowed_from` is the
first group that holds such layers; no group holds both kinds.

Version 6 is version 4 or 5 with long sections in runs (`runs.py`): the meta data's `run_rows` says
how many rows a run has, a multiple of a block's. `windowed_from` is null without windows.

Version 7 is version 6 with the means of components that a level leaves out (`means.py`). `run_rows`
is null where each section is one run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from kdn.cache.keys import Chunk
from kdn.cache.spec import FINGERPRINT_BYTES, ModelSpec
from kdn.cache.windows import num_unbounded
from kdn.codec.klt import symbols
from kdn.codec.rans import PROB_TOTAL
from kdn.errors import FormatError, MismatchError
from kdn.protocol.limits import MAX_PROFILE_BYTES

FORMAT = "kdn klt profile"
VERSION = 3
"""Of profiles whose groups all have one stage."""
VERSION_OF_STAGES = 4
VERSION_OF_WINDOWS = 5
VERSION_OF_RUNS = 6
VERSION_OF_MEANS = 7
PROFILE_ID_BYTES = 16
CONTEXT_TOKENS = 3
"""The predictor sees a token and the two before it."""
NUM_CLASSES = 5
"""Step classes of a token: class c divides the step by 2 ** ((c - 2) / 2)."""
MEAN_LANES = 8
"""Means that share a row, and a scale class (`means.py`)."""
MAX_LEVELS = 8
LEAST_STEP = 1e-20
"""Below it, steps of float32 may be zero."""

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Group:
    """Layers that are transformed together, and how. Only a group of two stages has `rows`, of each
    layer as many as `leading` says."""

    layers: tuple[int, int]
    columns: slice
    weight: npt.NDArray[np.float32]
    metric: npt.NDArray[np.float16]
    gain: npt.NDArray[np.float32]
    fine: npt.NDArray[np.float16]
    basis: npt.NDArray[np.int8]
    basis_scale: npt.NDArray[np.float32]
    scale: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int8] | None = None
    rows_scale: npt.NDArray[np.float32] | None = None
    leading: tuple[int, ...] = ()

    @property
    def rows_of_layers(self) -> list[slice]:
        """Where each layer's rows are among all."""
        ends = list(accumulate(self.leading, initial=0))
        return [slice(first, last) for first, last in pairwise(ends)]

    @property
    def basis_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """What components add to the weighted values, under the names that the profile has."""
        found = {name: getattr(self, name) for name in BASIS_TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class LevelTables:
    """Activity thresholds of each group, and cumulative frequencies (see symbols.py)."""

    thresholds: tuple[npt.NDArray[np.int32], ...]
    cdf: npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Level:
    """How one level is coded. `num_components[g]` of group g are coded (at the last level: all its
    columns): those of the level before as digits, the others as they enter. `centroids`
    [scale class, size 1 / 2 / more] is what to add to a size, in steps."""

    num_components: tuple[int, ...]
    entering: LevelTables
    digits: LevelTables | None
    centroids: npt.NDArray[np.float32]
    expected: Mapping[str, float]

    def tables(self, are_digits: bool) -> LevelTables:
        found = self.digits if are_digits else self.entering
        assert found is not None
        return found


@dataclass(frozen=True)
class Profile:
    """A read and checked profile."""

    meta: Mapping[str, Any]
    tensors: Tensors = field(repr=False)
    profile_id: bytes = b""

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_PROFILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise FormatError(f"{path}: expected a {FORMAT}: {error}") from error
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        if len(data) > MAX_PROFILE_BYTES:
            raise FormatError(
                f"expected a profile of at most {MAX_PROFILE_BYTES} bytes, found {len(data)}"
            )
        try:
            tensors = load_tensors(data)
            size = int.from_bytes(data[:8], "little")
            meta = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["kdn"])
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"expected a {FORMAT}: {error}") from None
        profile = cls(meta, tensors, blake2b(data, digest_size=PROFILE_ID_BYTES).digest())
        _check(profile)
        return profile

    @classmethod
    def build(cls, meta: Mapping[str, Any], tensors: Tensors) -> Profile:
        """From freshly calibrated parts: written and read again, so that it is what readers get."""
        return cls.from_bytes(to_bytes(meta, tensors))

    def to_bytes(self) -> bytes:
        return to_bytes(self.meta, self.tensors)

    @property
    def num_levels(self) -> int:
        return int(self.meta["levels"])

    @property
    def finest_step(self) -> float:
        return float(self.meta["finest_step"])

    @property
    def num_sinks(self) -> int:
        return len(self.tensors["sink.mean"])

    def num_sinks_of(self, chunk: Chunk) -> int:
        """How many of a chunk's tokens are the first of a context."""
        return min(self.num_sinks, chunk.num_tokens) if chunk.start == 0 else 0

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        width = 2 * int(self.meta["num_kv_heads"]) * int(self.meta["head_dim"])
        found = []
        for index, (first, last) in enumerate(self.meta["groups"]):
            names = _GROUP_TENSORS + (_STAGE_TENSORS if leading_of(self.meta, index) else ())
            part = {k: self.tensors[f"g{index}.{k}"] for k in names}
            columns = slice(first * width, last * width)
            leading = leading_of(self.meta, index)
            found.append(Group((first, last), columns, **part, leading=leading))
        return tuple(found)

    @property
    def windowed_from(self) -> int | None:
        """The first group of layers with a window; None: streams are in one part."""
        has_it = self.meta["version"] >= VERSION_OF_WINDOWS
        return self.meta["windowed_from"] if has_it else None

    @property
    def run_rows(self) -> int | None:
        """Rows of a run; None: each section is one."""
        return self.meta["run_rows"] if self.meta["version"] >= VERSION_OF_RUNS else None

    @property
    def has_means(self) -> bool:
        """Whether levels have the means of components that they leave out."""
        return bool(self.meta["version"] == VERSION_OF_MEANS)

    @cached_property
    def num_uncoded(self) -> tuple[int, ...]:
        """Of each group: components that no level codes. They have means at most."""
        coded = self.meta["num_components"][self.num_levels - 2]
        return tuple(len(g.scale) - n for g, n in zip(self.groups, coded, strict=True))

    def num_means(self, level: int, group: int) -> int:
        """How many a level has: of the group's components that it leaves out."""
        if not self.has_means or level == self.num_levels - 1:
            return 0
        return len(self.groups[group].scale) - self.levels[level].num_components[group]

    @cached_property
    def has_two_stages(self) -> bool:
        """Whether any group has."""
        return any(group.rows is not None for group in self.groups)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        return tuple(self._level(index) for index in range(self.num_levels))

    def _level(self, index: int) -> Level:
        has_digits = 0 < index < self.num_levels - 1
        return Level(
            tuple(self.meta["num_components"][index]),
            self._tables(f"level{index}"),
            self._tables(f"level{index}.digits") if has_digits else None,
            self.tensors[f"level{index}.centroids"],
            self.meta["expected"][index],
        )

    def _tables(self, key: str) -> LevelTables:
        groups = range(len(self.meta["groups"]))
        thresholds = tuple(self.tensors[f"{key}.g{g}.thresholds"] for g in groups)
        return LevelTables(thresholds, _cumulative(self.tensors[f"{key}.freqs"]))

    @cached_property
    def sink_cdf(self) -> npt.NDArray[np.uint16]:
        return _cumulative(self.tensors["sink.freqs"])

    @cached_property
    def mean_cdf(self) -> npt.NDArray[np.uint16]:
        """As other tables are: the same for every activity, since means have none."""
        freqs = self.tensors["mean.freqs"]
        return _cumulative(np.repeat(freqs, symbols.NUM_ACTIVITIES, axis=0))

    def check_for(self, spec: ModelSpec) -> None:
        """That this profile was made for this model."""
        for name in ("num_layers", "num_kv_heads", "head_dim", "vocab_size"):
            expected, found = getattr(spec, name), self.meta[name]
            if expected != found:
                raise MismatchError(
                    f"the profile is for another model: {name} expected {expected}, found {found}"
                )
        if bytes.fromhex(self.meta["model"]) != spec.fingerprint:
            raise MismatchError(
                f"the profile is for another model: fingerprint expected "
                f"{spec.fingerprint.hex()}, found {self.meta['model']}"
            )
        border = self.windowed_from
        if border is not None and self.meta["groups"][border][0] != num_unbounded(spec):
            raise MismatchError("the profile is for another model: other layers have windows")


def _cumulative(freqs: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    cdf = np.zeros((freqs.shape[0], freqs.shape[1] + 1), dtype=np.uint16)
    np.cumsum(freqs, axis=1, out=cdf[:, 1:])
    return cdf


def to_bytes(meta: Mapping[str, Any], tensors: Tensors) -> bytes:
    """Deterministic: equal parts give equal bytes."""
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    ordered = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    return save_tensors(ordered, metadata={"kdn": text})


_STAGE_TENSORS = ("rows", "rows_scale")
_ONE_STAGE = ("fine", "basis", "basis_scale")
BASIS_TENSORS = _ONE_STAGE + _STAGE_TENSORS
_GROUP_TENSORS = ("weight", "metric", "gain", *_ONE_STAGE, "scale")


def leading_of(meta: Mapping[str, Any], group: int) -> tuple[int, ...]:
    """How many components each layer of a group of two stages has; none in a group of one."""
    return tuple(meta["leading"][group]) if meta["version"] != VERSION else ()


def _check(profile: Profile) -> None:
    """Everything the codec relies on; a profile that passes can at worst decode to nonsense."""
    try:
        _check_meta(profile.meta)
        for name, (shape, dtype) in _layout(profile).items():
            tensor = profile.tensors[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise FormatError(
                    f"profile tensor {name}: expected {dtype} {shape}, "
                    f"found {tensor.dtype} {tensor.shape}"
                )
            if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                raise FormatError(f"profile tensor {name}: expected finite numbers")
            if name.endswith("freqs"):
                _check_freqs(name, tensor)
            is_class = name.endswith(".scale") and tensor.dtype == np.uint8
            if is_class and (tensor >= symbols.NUM_SCALES).any():
                raise FormatError(f"profile tensor {name}: scale class out of range")
            if name.endswith((".weight", ".step")) and not (tensor > 0).all():
                raise FormatError(f"profile tensor {name}: expected positive numbers")
            if name.endswith(".gain") and not (tensor > -1).all():
                raise FormatError(f"profile tensor {name}: expected gains above -1")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"profile: missing or malformed {error}") from None


def _check_freqs(name: str, freqs: npt.NDArray[Any]) -> None:
    sums = freqs.astype(np.int64).sum(axis=1)
    if (freqs == 0).any() or (sums != PROB_TOTAL).any():
        raise FormatError(f"profile tensor {name}: expected rows of {PROB_TOTAL}, none of them 0")


def _check_meta(meta: Mapping[str, Any]) -> None:
    known, version = range(VERSION, VERSION_OF_MEANS + 1), meta["version"]
    if meta["format"] != FORMAT or type(version) is not int or version not in known:
        raise FormatError(
            f"expected a {FORMAT} of version {', '.join(map(str, known))}, "
            f"found {meta['format']!r} of version {version!r}"
        )
    if len(bytes.fromhex(meta["model"])) != FINGERPRINT_BYTES:
        raise FormatError(f"expected a model fingerprint of {FINGERPRINT_BYTES} bytes")
    _check_numbers(meta)
    if not 2 <= meta["levels"] <= MAX_LEVELS or len(meta["expected"]) != meta["levels"]:
        raise FormatError(f"expected 2 to {MAX_LEVELS} levels, found {meta['levels']}")
    if not LEAST_STEP < meta["finest_step"] < 1e9:
        raise FormatError(f"expected a positive step, found {meta['finest_step']}")
    if not np.isfinite(float(meta["importance_bias"])):
        raise FormatError("expected a finite importance bias")
    ends = [0, *(last for _, last in meta["groups"])]
    if [first for first, _ in meta["groups"]] != ends[:-1] or ends[-1] != meta["num_layers"]:
        raise FormatError(f"expected groups that cover all layers, found {meta['groups']}")
    if any(first >= last for first, last in meta["groups"]):
        raise FormatError(f"expected groups of at least one layer, found {meta['groups']}")
    if version != VERSION:
        _check_leading(meta)
    if version == VERSION_OF_RUNS or (version > VERSION_OF_RUNS and meta["run_rows"] is not None):
        _check_runs(meta)
    is_told = version >= VERSION_OF_RUNS and meta["windowed_from"] is not None
    if version == VERSION_OF_WINDOWS or is_told:
        border, count = meta["windowed_from"], len(meta["groups"])
        if type(border) is not int or not 0 <= border < count:
            raise FormatError(f"expected a first group with windows below {count}, found {border}")


def _check_runs(meta: Mapping[str, Any]) -> None:
    rows, widest = meta["run_rows"], max(last - first for first, last in meta["groups"])
    most = widest * 2 * meta["num_kv_heads"] * meta["head_dim"]
    if type(rows) is not int or rows <= 0 or rows % symbols.BLOCK or rows * symbols.MAX_RUNS < most:
        raise FormatError(
            f"expected at most {symbols.MAX_RUNS} runs of whole blocks in {most} rows, "
            f"found runs of {rows!r}"
        )


def _check_numbers(meta: Mapping[str, Any]) -> None:
    """What slices and loops are made of: 15.0 equals 15, but is no index."""
    names = ("levels", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
    every = [meta[name] for name in names]
    every += [one for part in (*meta["groups"], *meta["num_components"]) for one in part]
    if not all(type(one) is int and one >= 0 for one in every) or not all(every[: len(names)]):
        raise FormatError("expected whole numbers of layers, heads, tokens and components")
    told = [one["kld"] for one in meta["expected"] if "kld" in one]
    if not all(type(one) in (int, float) and 0 <= one < float("inf") for one in told):
        raise FormatError(f"expected divergences, found {told}")


def _check_leading(meta: Mapping[str, Any]) -> None:
    most = 2 * meta["num_kv_heads"] * meta["head_dim"]
    layers = [last - first for first, last in meta["groups"]]
    found = meta["leading"]
    right = type(found) is list and len(found) == len(layers)
    right = right and all(type(own) is list for own in found)
    right = right and all(len(own) in (0, n) for own, n in zip(found, layers, strict=True))
    if not right or any(type(k) is not int or not 0 < k <= most for own in found for k in own):
        raise FormatError(
            f"expected numbers of leading components, 1 to {most}, of {layers} layers or of none, "
            f"found {str(found)[:200]}"
        )


def _layout(profile: Profile) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype every tensor must have, given the sizes that are free."""
    meta, tensors = profile.meta, profile.tensors
    per_layer = 2 * meta["num_kv_heads"] * meta["head_dim"]
    columns = per_layer * meta["num_layers"]
    embed, rank = tensors["embed.codes"].shape[1], tensors["predict.mix"].shape[1]
    fine, sinks = len(tensors["predict.fine"]), len(tensors["sink.mean"])
    f16, f32, u8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint8)
    i8, u16 = np.dtype(np.int8), np.dtype(np.uint16)
    layout: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "embed.codes": ((meta["vocab_size"], embed), i8),
        "predict.mix": ((CONTEXT_TOKENS * embed, rank), i8),
        "predict.mix_scale": ((rank,), f32),
        "predict.fine": ((fine, columns), f16),
        "predict.out": ((rank - fine, columns), i8),
        "predict.out_scale": ((columns,), f32),
        "predict.bias": ((columns,), f32),
        "sink.mean": ((sinks, columns), f16),
        "sink.step": ((columns,), f32),
        "sink.scale": ((columns,), u8),
        "fix.step": ((columns,), f32),
        "fix.scale": ((columns,), u8),
        "sink.freqs": ((symbols.BASE_TABLES, symbols.BASE_ALPHABET), u16),
        "token.freqs": ((1, NUM_CLASSES), u16),
        "importance": ((columns,), f32),
    }
    for index, (first, last) in enumerate(meta["groups"]):
        width, key = (last - first) * per_layer, f"g{index}."
        fine, coarse = len(tensors[key + "fine"]), len(tensors[key + "basis"])
        count, rank = fine + coarse, tensors[key + "metric"].shape[1]
        if count > width or count * width > MAX_PROFILE_BYTES:  # dense rows: two stages are less
            raise FormatError(f"group {index}: expected at most {width} components, found {count}")
        leading, inner = leading_of(meta, index), width
        if leading:
            inner = sum(leading)
            if coarse > inner:
                raise FormatError(f"group {index}: expected at most {inner} rows, found {coarse}")
            layout |= {
                key + "rows": ((inner, per_layer), i8),
                key + "rows_scale": ((inner,), f32),
            }
        layout |= {
            key + "weight": ((width,), f32),
            key + "metric": ((width, rank), f16),
            key + "gain": ((rank,), f32),
            key + "fine": ((fine, width), f16),
            key + "basis": ((coarse, inner), i8),
            key + "basis_scale": ((coarse,), f32),
            key + "scale": ((count,), u8),
        }
        layout |= _threshold_layout(meta, index, count, width)
        if meta["version"] == VERSION_OF_MEANS:
            layout |= _means_layout(meta, index, count)
    if meta["version"] == VERSION_OF_MEANS:
        layout["mean.freqs"] = ((symbols.NUM_SCALES, symbols.BASE_ALPHABET), u16)
    for level in range(meta["levels"]):
        layout[f"level{level}.freqs"] = ((symbols.BASE_TABLES, symbols.BASE_ALPHABET), u16)
        if 0 < level < meta["levels"] - 1:
            shape = (symbols.DIGIT_TABLES, symbols.DIGIT_ALPHABET)
            layout[f"level{level}.digits.freqs"] = (shape, u16)
        layout[f"level{level}.centroids"] = ((symbols.NUM_SCALES, 3), f32)
    return layout


def _means_layout(
    meta: Mapping[str, Any], group: int, count: int
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Of a group with `count` components."""
    coded = [row[group] for row in meta["num_components"][:-1]]
    return {
        f"level{level}.g{group}.means.scale": ((-(-(count - own) // MEAN_LANES),), np.dtype("u1"))
        for level, own in enumerate(coded)
        if own < count
    }


def _threshold_layout(
    meta: Mapping[str, Any], group: int, count: int, width: int
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Of a group with `count` components and `width` columns. Each level codes at least what the
    level before does."""
    layout: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    before, last = 0, meta["levels"] - 1
    for level in range(meta["levels"]):
        coded = meta["num_components"][level][group]
        if level == last:
            before, count = 0, width
        if not before <= coded <= count or (level == last and coded != width):
            raise FormatError(f"level {level}: expected {before} to {count} components")
        parts = {f"level{level}": coded - before}
        if 0 < level < last:
            parts[f"level{level}.digits"] = before
        for name, size in parts.items():
            shape = (-(-size // symbols.BLOCK), symbols.NUM_ACTIVITIES - 1)
            layout[f"{name}.g{group}.thresholds"] = (shape, np.dtype(np.int32))
        before = coded
    return layout
