"""Calibration from end to end: windows of text to a profile.

1. Read every window with the model and sum up (`moments.py`); resumable.
2. Fit predictor, metric and basis (`fit.py`).
3. Read some windows again: fit token importance, find the finest step, count tables.
4. Measure what each level costs and does to the model, on windows kept out of all of the above.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from kdn.cache.keys import Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.calibrate import fit, importance, moments, tables, two_stage
from kdn.codec.format import Bitstream
from kdn.codec.klt import symbols
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.duals import dense_rows
from kdn.codec.klt.profile import (
    BASIS_TENSORS,
    CONTEXT_TOKENS,
    FORMAT,
    VERSION,
    VERSION_OF_STAGES,
    Profile,
)
from kdn.engines.quality import Quality, QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""

CHECKPOINT_S = 120.0
PROBE_WINDOWS = 4
STEP_ATTEMPTS = 4
TABLE_STRIDE = 3
"""Every third chunk of a window is counted."""


@dataclass(frozen=True)
class CalibrationOptions:
    """What may be traded: quality against profile size, codec speed and calibration time."""

    context: int = 3072
    group_layers: int = 15
    levels: int = 4
    embedding_dims: int = 448
    predictor_rank: int = 256
    metric_rank: int = 384
    components: int = 2200
    fine_components: int = 64
    leading: int = 0
    """Components of each layer that a second stage across layers sees; 0: one stage."""
    fine_kld: float = 0.003
    finest_kld: float = 0.0002
    sink_fineness: float = 1.0
    second_pass_windows: int = 160
    table_windows: int = 40
    seed: int = 0

    @property
    def window(self) -> int:
        return self.context + moments.PASSAGE_TOKENS


def calibrate(
    model: Any,
    windows: Sequence[npt.NDArray[np.integer]],
    options: CalibrationOptions,
    *,
    progress: Progress = lambda *_: None,
    checkpoint: Path | None = None,
    source: dict[str, Any] | None = None,
) -> Profile:
    """A profile for `model` from token windows of `options.window` tokens each; the last few are
    kept for measuring. Deterministic for the same machine, windows and options."""
    if len(windows) < PROBE_WINDOWS + 4:
        raise UnsupportedError(
            f"calibration needs at least {PROBE_WINDOWS + 4} windows of {options.window} tokens, "
            f"found {len(windows)}: give more text or a smaller context"
        )
    return _Calibration(model, windows, options, progress, checkpoint, source or {}).run()


class _Calibration:
    def __init__(
        self,
        model: Any,
        windows: Sequence[npt.NDArray[np.integer]],
        options: CalibrationOptions,
        progress: Progress,
        checkpoint: Path | None,
        source: dict[str, Any],
    ) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.model, self.options, self.progress = model.eval(), options, progress
        self.checkpoint, self.source = checkpoint, source
        self.spec = spec_of(model)
        step = min(options.group_layers, self.spec.num_layers)
        starts = range(0, self.spec.num_layers, step)
        self.columns = moments.Columns(
            self.spec, tuple((a, min(a + step, self.spec.num_layers)) for a in starts)
        )
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
        meta["finest_step"] = self._find_step(meta, tensors, sums, probes[:2])
        meta, tensors = self._count(meta, tensors, sums)
        meta, tensors = self._add_correction(meta, tensors, probes[:1])
        profile = Profile.build(meta | {"expected": [{}] * self.options.levels}, tensors)
        expected = self._measure(profile, probes)
        if self.checkpoint is not None:
            self.checkpoint.unlink(missing_ok=True)
        return Profile.build(meta | {"expected": expected}, tensors)

    def _read_all(self) -> moments.Moments:
        device = self.model.device
        sums = moments.Moments.zeros(self.features.count, self.slices, device)
        digest = self._digest()
        if self.checkpoint is not None and self.checkpoint.exists():
            saved = load_file(self.checkpoint, device=str(device))
            if bytes(saved.pop("digest").cpu().tolist()) == digest:
                sums.restore(saved)
        saved_at = time.monotonic()
        for index in range(sums.num_windows, len(self.windows)):
            self.progress("reading", index, len(self.windows))
            window = self.windows[index]
            ids = window[: self.options.context]
            cache = moments.read(self.model, ids)
            sums.add_values(self.features(ids), self.columns.of(cache), self.slices)
            sums.add_fisher(self._gradients(cache, window, index), self.slices)
            if self.checkpoint is not None and time.monotonic() - saved_at > CHECKPOINT_S:
                named = {k: t.contiguous() for k, t in sums.tensors().items()}
                aside = self.checkpoint.with_suffix(".writing")
                save_file(named | {"digest": torch.tensor(list(digest))}, aside)
                aside.replace(self.checkpoint)
                saved_at = time.monotonic()
        self.progress("reading", len(self.windows), len(self.windows))
        return sums

    def _gradients(self, cache: KVCache, window: torch.Tensor, index: int) -> list[torch.Tensor]:
        generator = torch.Generator(self.model.device).manual_seed(self.options.seed + index)
        return moments.gradients(self.model, cache, window, self.columns, generator)

    def _digest(self) -> bytes:
        """What the sums depend on: a checkpoint of anything else is not resumed."""
        digest = blake2b(self.spec.fingerprint, digest_size=16)
        digest.update(json.dumps(asdict(self.options), sort_keys=True).encode())
        for window in self.windows:
            digest.update(window.cpu().numpy().tobytes())
        return digest.digest()

    def _fit(self, sums: moments.Moments) -> tuple[list[fit.Metric], dict[str, npt.NDArray[Any]]]:
        self.progress("fitting", 0, 1 + len(self.slices))
        options = self.options
        metrics = [fit.fit_metric(f, sums.num_tokens, options.metric_rank) for f in sums.fisher]
        scale = self.scale.double().repeat(CONTEXT_TOKENS)
        regression = fit.fit_regression(sums, metrics, self.slices, options.predictor_rank, scale)
        tensors: dict[str, npt.NDArray[Any]] = {
            "embed.codes": self.codes.cpu().numpy(),
            **fit.predictor_tensors(regression),
        }
        self.deviations = []
        for index, (metric, part) in enumerate(zip(metrics, self.slices, strict=True)):
            self.progress("fitting", 1 + index, 1 + len(self.slices))
            covariance = fit.residual_covariance(sums, regression, index, part)
            first, last = self.columns.groups[index]
            basis = two_stage.fit_stages(
                covariance,
                metric,
                num_layers=last - first,
                leading=options.leading,
                components=options.components,
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
        self.progress("fitting", 1 + len(self.slices), 1 + len(self.slices))
        return metrics, tensors

    def _importance(
        self, metrics: list[fit.Metric], tensors: dict[str, npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        """How errors of unit components of a token move the model, and its prediction."""
        device, rows, found = self.model.device, [], []
        synthesis = []
        for index, metric in enumerate(metrics):
            stored = {name: tensors.get(f"g{index}.{name}") for name in BASIS_TENSORS}
            basis = dense_rows({n: t for n, t in stored.items() if t is not None}, device)
            # Only components coarse enough to be coded take part.
            synthesis.append((basis[: len(basis) // 2] / metric.weight).float())
        chosen = self.windows[: self.options.second_pass_windows]
        for index, window in enumerate(chosen):
            self.progress("weighing", index, len(chosen))
            cache = moments.read(self.model, window[: self.options.context])
            total = torch.zeros(self.options.context, device=device)
            for gradient in self._gradients(cache, window, 1_000_000 + index):
                for part, matrix in zip(self.slices, synthesis, strict=True):
                    total += (gradient[:, part] @ matrix.T).square().sum(dim=1)
            found.append(total[moments.NUM_SINKS :])
            rows.append(self.columns.of(cache)[moments.NUM_SINKS :].half())
        measured = importance.relative(torch.stack(found))
        fitted = importance.fit_importance(torch.cat(rows), measured.flatten())
        self.progress("weighing", len(chosen), len(chosen))
        self.importance_bias, self.importance_gain = fitted.bias, fitted.gain
        return {"importance": _f32(fitted.weight)}

    def _meta(self, tensors: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION_OF_STAGES if self.options.leading else VERSION,
            "model": self.spec.fingerprint.hex(),
            "num_layers": self.spec.num_layers,
            "num_kv_heads": self.spec.num_kv_heads,
            "head_dim": self.spec.head_dim,
            "vocab_size": len(tensors["embed.codes"]),
            "groups": [list(group) for group in self.columns.groups],
            **(
                {"leading": [self.options.leading] * len(self.slices)}
                if self.options.leading
                else {}
            ),
            "levels": self.options.levels,
            "importance_bias": self.importance_bias,
            "calibration": asdict(self.options)
            | {"windows": len(self.windows), "importance_gain": self.importance_gain}
            | self.source,
        }

    def _with_step(
        self, meta: dict[str, Any], tensors: dict[str, npt.NDArray[Any]],
        sums: moments.Moments, step: float,
    ) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:  # fmt: skip
        """What depends on the finest step: scale classes, and how sinks are quantised."""
        coarsest = step * 3 ** (self.options.levels - 1)
        named: dict[str, npt.NDArray[Any]] = {
            f"g{i}.scale": tables.scale_class(d, coarsest) for i, d in enumerate(self.deviations)
        }
        mean, deviation = fit.fit_sinks(sums)
        weight = torch.cat(
            [torch.from_numpy(tensors[f"g{i}.weight"]) for i in range(len(self.slices))]
        )
        # Never finer than 8 bits for what is usual: a context's first tokens vary little.
        usual = deviation.cpu() + 1e-3 * deviation.cpu().mean() + 1e-6
        sink_step = (step * self.options.sink_fineness / weight).maximum(usual / 128).float()
        named |= {
            "sink.mean": _f16(mean),
            "sink.step": sink_step.numpy(),
            "sink.scale": tables.scale_class((deviation.cpu() / sink_step).double(), 1.0),
            "sink.freqs": tables.laplace_tables(),
        }
        named.setdefault("fix.step", (1.0 / weight).float().numpy())
        named.setdefault("fix.scale", np.full(len(weight), tables.SCALE_ORIGIN, np.uint8))
        return meta | {"finest_step": step}, tensors | named

    def _find_step(
        self, meta: dict[str, Any], tensors: dict[str, npt.NDArray[Any]],
        sums: moments.Moments, probes: list[QualityProbe],
    ) -> float:  # fmt: skip
        """The step at which all components come to the divergence asked for."""
        # In this metric the divergence of errors uniform over one step would be
        # context * components * step^2 / 24, were it quadratic; a guess to start from.
        noisy = sum(len(d) for d in self.deviations) * self.options.context
        step = float(np.sqrt(24 * self.options.fine_kld / moments.CONTINUATION_KLD / noisy))
        last_step, last_kld = step, np.inf
        for attempt in range(STEP_ATTEMPTS):
            self.progress("finding the step", attempt, STEP_ATTEMPTS)
            draft = tables.draft_profile(*self._with_step(meta, tensors, sums, step))
            codec = KltCodec(self.spec, draft)
            kld = _simulated_kld(codec, probes, levels=self.options.levels - 1)
            if abs(np.log(kld / self.options.fine_kld)) < 0.1:
                break
            if step < 0.6 * last_step and kld > 0.9 * last_kld:
                step = last_step  # finer steps do not help: the basis lacks what is missing
                break
            last_step, last_kld = step, kld
            step *= float(np.clip((self.options.fine_kld / kld) ** 0.6, 0.1, 10))
        self.progress("finding the step", STEP_ATTEMPTS, STEP_ATTEMPTS)
        return step

    def _count(
        self, meta: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], sums: moments.Moments
    ) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Tables of all levels but the last."""
        meta, tensors = self._with_step(meta, tensors, sums, meta["finest_step"])
        codec = KltCodec(self.spec, tables.draft_profile(meta, tensors))
        self.samples = []
        # From the end: windows the second pass has not fitted importance on, where there are any.
        chosen = self.windows[-self.options.table_windows :]
        for index, window in enumerate(chosen):
            self.progress("counting", index, len(chosen))
            ids = window[: self.options.context]
            cache = _on_cpu(moments.read(self.model, ids))
            chunks = cut(ids.cpu().numpy(), Namespace(self.spec.fingerprint, codec.profile_id))
            for chunk in chunks[index % TABLE_STRIDE :: TABLE_STRIDE]:
                part = cache.slice(chunk.start, chunk.end)
                self.samples.append(tables.quantise(codec, chunk, part))
        self.progress("counting", len(chosen), len(chosen))
        counts = tables.components_per_level(self.samples)
        tensors = tensors | tables.count_tables(codec, self.samples, counts)
        for group, count in enumerate(counts[-1]):
            fine = min(count, len(tensors[f"g{group}.fine"]))
            lengths = {"fine": fine, "basis": count - fine, "basis_scale": count - fine}
            for name, kept in (lengths | {"scale": count}).items():
                tensors[f"g{group}.{name}"] = tensors[f"g{group}.{name}"][:kept]
        return meta | {"num_components": counts}, tensors

    def _add_correction(
        self, meta: dict[str, Any], tensors: dict[str, npt.NDArray[Any]],
        probes: list[QualityProbe],
    ) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:  # fmt: skip
        """The last level: steps inverse to the columns' weights, sized for the divergence asked
        for; then its tables."""
        self.progress("correcting", 0, 2)
        weight = np.concatenate([tensors[f"g{i}.weight"] for i in range(len(self.slices))])
        step = 1.5 * meta["finest_step"]
        for _ in range(STEP_ATTEMPTS):
            tensors["fix.step"] = (step / weight).astype(np.float32)
            codec = KltCodec(self.spec, tables.draft_profile(meta, tensors))
            last = _simulated_kld(codec, probes, levels=self.options.levels)
            if abs(np.log(last / self.options.finest_kld)) < 0.25:
                break
            step *= float(np.clip((0.85 * self.options.finest_kld / last) ** 0.5, 0.1, 10))
        self.progress("correcting", 1, 2)
        samples = [tables.with_correction(codec, sample) for sample in self.samples]
        tensors["fix.scale"] = tables.correction_scales(samples)
        codec = KltCodec(self.spec, tables.draft_profile(meta, tensors))
        meta = meta | {"num_components": codec.profile.meta["num_components"]}
        tensors |= tables.count_tables(codec, samples, meta["num_components"])
        tensors[f"level{self.options.levels - 1}.centroids"] = np.zeros(
            (symbols.NUM_SCALES, 3), np.float32
        )
        self.progress("correcting", 2, 2)
        return meta, tensors

    def _measure(self, profile: Profile, probes: list[QualityProbe]) -> list[dict[str, float]]:
        self.progress("measuring", 0, 1)
        levels = list(range(1, profile.num_levels + 1))
        measured = decoded_quality(KltCodec(self.spec, profile), probes, levels=levels)
        self.progress("measuring", 1, 1)
        values = len(probes) * self.options.context * self.spec.values_per_token
        return [
            {
                "bits": 8 * m.size_bytes / values,
                "kld": m.quality.kld,
                "recall_kld": m.quality.recall_kld,
                "top1": m.quality.top1,
            }
            for m in measured
        ]


@dataclass(frozen=True)
class Measured:
    """What some first levels of all chunks cost and do."""

    size_bytes: int
    quality: Quality


def decoded_quality(
    codec: KltCodec, probes: Sequence[QualityProbe], *, levels: Sequence[int]
) -> list[Measured]:
    """Each number of levels over all probes, through real streams."""
    parts: dict[int, list[Quality]] = {level: [] for level in levels}
    sizes = dict.fromkeys(levels, 0)
    for probe in probes:
        cache = _on_cpu(probe.cache)
        namespace = Namespace(codec.spec.fingerprint, codec.profile_id)
        chunks = cut(probe.tokens[: probe.context].numpy(), namespace)
        streams = [Bitstream.parse(codec.encode(c, cache.slice(c.start, c.end))) for c in chunks]
        for level in levels:
            decoded = KVCache(torch.empty_like(cache.keys), torch.empty_like(cache.values))
            for chunk, stream in zip(chunks, streams, strict=True):
                out = decoded.slice(chunk.start, chunk.end)
                codec.decode(stream, chunk, levels=level, out=out)
                sizes[level] += stream.level_end(level - 1)
            parts[level].append(probe.measure(decoded))
    return [Measured(sizes[level], Quality.pooled(parts[level])) for level in levels]


def _simulated_kld(codec: KltCodec, probes: Sequence[QualityProbe], levels: int) -> float:
    """Divergence at a number of levels, before there are tables to code them with."""
    found = []
    for probe in probes:
        cache = _on_cpu(probe.cache)
        namespace = Namespace(codec.spec.fingerprint, codec.profile_id)
        lossy = KVCache(torch.empty_like(cache.keys), torch.empty_like(cache.values))
        for chunk in cut(probe.tokens[: probe.context].numpy(), namespace):
            part = codec.simulate(chunk, cache.slice(chunk.start, chunk.end), levels)
            lossy.slice(chunk.start, chunk.end).keys.copy_(part.keys)
            lossy.slice(chunk.start, chunk.end).values.copy_(part.values)
        found.append(probe.measure(lossy))
    return Quality.pooled(found).kld


def _on_cpu(cache: KVCache) -> KVCache:
    return KVCache(
        cache.keys.cpu().float(), cache.values.cpu().float(), cache.start, cache.valid_from
    )


def _f32(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.float().cpu().numpy()


def _f16(tensor: torch.Tensor) -> npt.NDArray[np.float16]:
    return tensor.half().cpu().numpy()
