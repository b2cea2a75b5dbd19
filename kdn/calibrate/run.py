"""Calibration from end to end: windows of text to a profile.

1. Read every window with the model and sum up (`moments.py`, `first_pass.py`); resumable.
2. Fit predictor, metric and basis (`fit.py`).
3. Read some windows again: fit token importance; then find the finest step and count tables
   (`steps.py`).
4. Measure what each level costs and does to the model, on windows kept out of all of the above.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.tensors import KVCache
from kdn.cache.windows import layer_order, num_unbounded
from kdn.calibrate import fit, importance, moments, two_stage
from kdn.calibrate.first_pass import FirstPass, until
from kdn.calibrate.sizes import free_memory, layer_groups
from kdn.calibrate.steps import Progress, Steps, counted_chunks, table_stride
from kdn.codec.klt.duals import dense_rows
from kdn.codec.klt.profile import (
    BASIS_TENSORS,
    CONTEXT_TOKENS,
    FORMAT,
    VERSION_OF_MEANS,
    Profile,
)
from kdn.engines.quality import QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

PROBE_WINDOWS = 4
SUMS_VERSION = 3
"""Version of the sums: sums of another version are not resumed."""
SUMMED_BY = ("context", "embedding_dims", "gradient_windows", "seed")
"""Options that change the sums, besides the groups. Others may differ when reading is resumed."""
LEAST_WINDOWS = 4
"""Windows to read, besides the probes."""
READING_SHARE, WEIGHING_SHARE = 0.55, 0.75
"""The shares of the requested time after which reading, and then weighing, must end: the steps that
follow take about the same time, however much was read."""
MEMORY_SHARE = 0.25
"""The share of free memory for the values that importance is fitted on."""


@dataclass(frozen=True)
class CalibrationOptions:
    """What may be traded: quality against profile size, codec speed and calibration time.
    `sizes.py` chooses what depends on the model; a group has at most `group_layers`."""

    context: int = 3072
    group_layers: int = 15
    levels: int = 4
    embedding_dims: int = 448
    predictor_rank: int = 256
    metric_rank: int = 384
    components: int = 2200
    fine_components: int = 64
    mean_components: int = 0
    """Beyond those: no level codes them, but all have their means."""
    leading: int = 0
    """Components that a layer has on average between the two stages; 0: one stage."""
    run_rows: int = 0
    """Of runs that long sections are cut into, for GPUs; 0: none."""
    middle_kld: float = 0.0105
    """At all levels but the last two. There the divergence is far above what a basis lacks, and
    contexts differ by a few percent; at finer levels a few tokens decide, and they by factors."""
    finest_kld: float = 0.0002
    sink_fineness: float = 1.0
    gradient_windows: int = 48
    """For the error metric, of all windows; each takes as long as reading another one."""
    second_pass_windows: int = 40
    table_windows: int = 40
    seed: int = 0

    @property
    def window(self) -> int:
        return self.context + moments.PASSAGE_TOKENS

    @property
    def middle_levels(self) -> int:
        """How many levels `middle_kld` is asked of."""
        return max(1, self.levels - 2)


def calibrate(
    model: Any,
    windows: Sequence[npt.NDArray[np.integer]],
    options: CalibrationOptions,
    *,
    progress: Progress = lambda *_: None,
    checkpoint: Path | None = None,
    source: dict[str, Any] | None = None,
    time_s: float | None = None,
) -> Profile:
    """A profile for `model` from token windows of `options.window` tokens each; the last few are
    kept for measuring. Deterministic for the same machine, windows and options, unless memory is
    short or `time_s` ends its reading: the profile then says how many windows were read."""
    least = PROBE_WINDOWS + LEAST_WINDOWS
    if len(windows) < least:
        raise UnsupportedError(
            f"calibration needs at least {least} windows of {options.window} tokens, found "
            f"{len(windows)}: give at least {least * options.window:,} tokens of text"
        )
    made = _Calibration(model, windows, options, progress, checkpoint, source or {}, time_s)
    return made.run()


class _Calibration:
    def __init__(
        self,
        model: Any,
        windows: Sequence[npt.NDArray[np.integer]],
        options: CalibrationOptions,
        progress: Progress,
        checkpoint: Path | None,
        source: dict[str, Any],
        time_s: float | None,
    ) -> None:
        self.enough_read, self.enough_weighed = (
            until(time_s and time_s * share, LEAST_WINDOWS)
            for share in (READING_SHARE, WEIGHING_SHARE)
        )
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.model, self.options, self.progress = model.eval(), options, progress
        self.checkpoint, self.source = checkpoint, source
        self.spec = spec_of(model)
        num_layers, border = self.spec.num_layers, num_unbounded(self.spec)
        groups = layer_groups(num_layers, options.group_layers, num_layers - border)
        order = layer_order(self.spec) if self.spec.has_windows else None
        self.columns = moments.Columns(self.spec, groups, order)
        self.slices = self.columns.slices()
        ids = [torch.as_tensor(np.asarray(w, dtype=np.int64), device=model.device) for w in windows]
        self.probe_windows, self.windows = ids[-PROBE_WINDOWS:], ids[:-PROBE_WINDOWS]
        self.codes, self.scale = moments.embedding_table(model, options.embedding_dims)
        self.features = moments.Features(self.codes, self.scale)

    def run(self) -> Profile:
        sums = self._read_all()
        metrics, tensors = self._fit(sums)
        tensors |= self._importance(metrics, tensors)
        meta = self._meta(tensors)
        probes = [
            QualityProbe(self.model, w.cpu().numpy(), self.options.context)
            for w in self.probe_windows
        ]
        steps = Steps(self.spec, self.options, self.progress, self.deviations, fit.fit_sinks(sums))
        meta["finest_step"] = steps.find_step(meta, tensors, probes[:2])
        # From the end: windows the second pass has not fitted importance on, where there are any.
        chosen = self.windows[-self.options.table_windows :]
        stride = table_stride(steps, len(chosen))
        parts = counted_chunks(
            self.model, self.spec, chosen, self.options.context, self.progress, stride
        )
        meta, tensors = steps.count(meta, tensors, parts)
        meta, tensors = steps.add_correction(meta, tensors, probes[:2])
        profile = Profile.build(meta | {"expected": [{}] * self.options.levels}, tensors)
        expected = steps.measure(profile, probes)
        if self.checkpoint is not None:
            self.checkpoint.unlink(missing_ok=True)
        return Profile.build(meta | {"expected": expected}, tensors)

    def _read_all(self) -> moments.Moments:
        sums = moments.Moments.zeros(self.features.count, self.slices, self.model.device)
        FirstPass(
            self._add, len(self.windows), self._digest(), self.checkpoint, self.progress,
            self.enough_read,
        ).run(sums)  # fmt: skip
        self.windows = self.windows[: sums.num_windows]
        return sums

    def _add(self, sums: moments.Moments, index: int) -> None:
        window = self.windows[index]
        ids = window[: self.options.context]
        cache = moments.read(self.model, ids)
        sums.add_values(self.features(ids), self.columns.of(cache), self.slices)
        # The first ones: their order is random, and reading may end before the last.
        wanted, there = self.options.gradient_windows, len(self.windows)
        if index < wanted:
            for again in range(min(2, max(1, wanted // there))):  # with other labels
                seed = index + again * there
                sums.add_fisher(self._gradient(cache, window, seed), self.slices)

    def _gradient(self, cache: KVCache, window: torch.Tensor, index: int) -> torch.Tensor:
        generator = torch.Generator(self.model.device).manual_seed(self.options.seed + index)
        return moments.gradient_of(self.model, cache, window, self.columns, generator)

    def _digest(self) -> bytes:
        """What the sums depend on: a checkpoint of anything else is not resumed."""
        digest = blake2b(self.spec.fingerprint, digest_size=16)
        digest.update(f"{SUMS_VERSION} {self.model.dtype} {self.model.device.type}".encode())
        asked = asdict(self.options)
        digest.update(json.dumps([asked[name] for name in SUMMED_BY]).encode())
        digest.update(f"{self.columns.order} {self.columns.groups}".encode())
        for window in self.windows:
            digest.update(window.cpu().numpy().tobytes())
        return digest.digest()

    def _fit(self, sums: moments.Moments) -> tuple[list[fit.Metric], dict[str, npt.NDArray[Any]]]:
        self.progress("fitting", 0, 1 + len(self.slices))
        options = self.options
        metrics = [fit.fit_metric(f, sums.num_gradients, options.metric_rank) for f in sums.fisher]
        scale = self.scale.double().repeat(CONTEXT_TOKENS)
        regression = fit.fit_regression(sums, metrics, self.slices, options.predictor_rank, scale)
        tensors: dict[str, npt.NDArray[Any]] = {
            "embed.codes": self.codes.cpu().numpy(),
            **fit.predictor_tensors(regression),
        }
        self.deviations, self.leading = [], []
        for index, (metric, part) in enumerate(zip(metrics, self.slices, strict=True)):
            self.progress("fitting", 1 + index, 1 + len(self.slices))
            covariance = fit.residual_covariance(sums, regression, index, part)
            first, last = self.columns.groups[index]
            basis = two_stage.fit_stages(
                covariance,
                metric,
                num_layers=last - first,
                leading=options.leading,
                components=options.components + options.mean_components,
                fine_components=options.fine_components,
            )
            key = f"g{index}."
            tensors |= {
                key + "weight": _f32(metric.weight),
                key + "metric": _f16(metric.directions),
                key + "gain": _f32(metric.gain),
                **{key + name: tensor for name, tensor in basis.tensors.items()},
            }
            self.deviations.append(basis.deviation)
            self.leading.append(list(basis.leading))
        self.progress("fitting", 1 + len(self.slices), 1 + len(self.slices))
        return metrics, tensors

    def _importance(
        self, metrics: list[fit.Metric], tensors: dict[str, npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        """How errors of unit components of a token move the model, and its prediction."""
        device, synthesis = self.model.device, []
        for index, metric in enumerate(metrics):
            stored = {name: tensors.get(f"g{index}.{name}") for name in BASIS_TENSORS}
            found_rows = {name: t for name, t in stored.items() if t is not None}
            basis = dense_rows(found_rows, device, self.leading[index])
            # Only components coarse enough to be coded take part.
            coded = min(self.options.components, len(basis))
            synthesis.append((basis[: coded // 2] / metric.weight).float())
        chosen = self.windows[: self.options.second_pass_windows]
        every = self._weighed_tokens(len(chosen))
        found: list[torch.Tensor] = []
        for index, window in enumerate(chosen):
            if self.enough_weighed(index):
                break
            self.progress("weighing", index, len(chosen))
            cache = moments.read(self.model, window[: self.options.context])
            total = torch.zeros(self.options.context, device=device)
            gradient = self._gradient(cache, window, 1_000_000 + index)
            for part, matrix in zip(self.slices, synthesis, strict=True):
                total += (gradient[:, part] @ matrix.T).square().sum(dim=1)
            found.append(total[moments.NUM_SINKS :])
            rows = self.columns.of(cache)[moments.NUM_SINKS :: every.stride]
            every.rows[index * len(rows) : (index + 1) * len(rows)] = rows
        measured = importance.relative(torch.stack(found))[:, :: every.stride].flatten()
        fitted = importance.fit_importance(every.rows[: len(measured)], measured)
        self.progress("weighing", len(found), len(found))
        self.importance_bias, self.importance_gain = fitted.bias, fitted.gain
        return {"importance": _f32(fitted.weight)}

    def _weighed_tokens(self, num_windows: int) -> _Weighed:
        """Values of as many tokens of each window as there is memory for, every so many."""
        columns = self.slices[-1].stop
        most = MEMORY_SHARE * free_memory(self.model.device) / (2 * columns)
        tokens = self.options.context - moments.NUM_SINKS
        stride = max(1, int(np.ceil(num_windows * tokens / max(most, num_windows))))
        count = num_windows * -(-tokens // stride)
        return _Weighed(
            torch.empty(count, columns, dtype=torch.float16, device=self.model.device), stride
        )

    def _meta(self, tensors: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self._version(),
            "model": self.spec.fingerprint.hex(),
            "num_layers": self.spec.num_layers,
            "num_kv_heads": self.spec.num_kv_heads,
            "head_dim": self.spec.head_dim,
            "vocab_size": len(tensors["embed.codes"]),
            "groups": [list(group) for group in self.columns.groups],
            "levels": self.options.levels,
            "importance_bias": self.importance_bias,
            "calibration": asdict(self.options)
            | {
                "windows": len(self.windows),
                "tokens": len(self.windows) * self.options.context,
                "importance_gain": self.importance_gain,
            }
            | self.source,
        }

    def _version(self) -> dict[str, Any]:
        """Of the profile, with what that version says."""
        border = None
        if self.spec.has_windows:
            firsts = [first for first, _ in self.columns.groups]
            border = firsts.index(num_unbounded(self.spec))
        return {
            "version": VERSION_OF_MEANS,
            "leading": self.leading,
            "windowed_from": border,
            "run_rows": self.options.run_rows or None,
        }


@dataclass(frozen=True)
class _Weighed:
    """Values [tokens, columns] that importance is fitted on: every `stride`th of a window."""

    rows: torch.Tensor
    stride: int


def _f32(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.float().cpu().numpy()


def _f16(tensor: torch.Tensor) -> npt.NDArray[np.float16]:
    return tensor.half().cpu().numpy()
