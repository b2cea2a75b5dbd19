"""A profile for a fine-tuned model, from that of its base: `kdn calibrate MODEL --from PROFILE`.

Predictor, metric, basis and importance are the base's; a new calibration of them would read the
text with gradients and solve large eigenproblems. What depends on the fine-tune's own values is
measured anew on a few windows: how large components are, sinks, the finest step, tables, the last
level, and what each level costs and does. All of that is right for the fine-tune, however far it
moved from its base: what may be lost is size. So the renewal ends with a verdict on the transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.calibrate import moments, tables
from kdn.calibrate.base_profile import (
    Point,
    bits_at_equal_kld,
    expected_of,
    kept_parts,
    points_of,
)
from kdn.calibrate.fit import Metric
from kdn.calibrate.run import PROBE_WINDOWS, CalibrationOptions
from kdn.calibrate.steps import (
    Parts,
    Progress,
    Steps,
    counted_chunks,
    order_of,
    ordered_codec,
    table_stride,
)
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.profile import Profile
from kdn.engines.quality import QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

MIN_WINDOWS = PROBE_WINDOWS + 4
MAX_CONTEXT = 1 << 17
OTHER_TEXT_LIMIT = 1.25
"""Times the base's bits at equal divergence, where the base was measured on other text: one kind of
text takes up to a quarter more than another, for the same model and profile."""
SAME_TEXT_LIMIT = 1.1
"""And where it was measured on the same windows."""
LEFT_OUT_LIMIT = 0.02
"""Part of the residuals' variance, in the metric, that a basis may leave out. SmolLM2's leaves out
less than 0.1 %, also of a model that its adapter spoiled."""


@dataclass(frozen=True)
class TransformVerdict:
    """Whether the base's transform serves the fine-tuned model. `bits` is how many times the base's
    bits the same divergence takes, None if no divergence is reached by both; `left_out` the part of
    the residuals' variance, in the metric, that no component holds; `reason` a sentence."""

    good: bool
    bits: float | None
    left_out: float
    reason: str


@dataclass(frozen=True)
class Renewed:
    profile: Profile
    verdict: TransformVerdict


def options_for(base: Profile, context: int | None = None) -> CalibrationOptions:
    """The base's context unless another is given, and its divergences as those to reach: so levels
    can be compared."""
    expected = expected_of(base)
    told = base.meta.get("calibration")
    if context is None and isinstance(told, dict):
        context = told.get("context")
    if type(context) is not int or not 2 * moments.PASSAGE_TOKENS <= context <= MAX_CONTEXT:
        context = CalibrationOptions().context
    options = CalibrationOptions(
        context=context, levels=base.num_levels, finest_kld=expected[-1].kld,
        components=max(base.levels[-2].num_components),
    )  # fmt: skip
    return replace(options, middle_kld=expected[options.middle_levels - 1].kld)


def renew(
    model: Any,
    base: Profile,
    windows: Sequence[npt.NDArray[np.integer]],
    *,
    context: int | None = None,
    reference: Sequence[Point] | None = None,
    progress: Progress = lambda *_: None,
    source: dict[str, Any] | None = None,
) -> Renewed:
    """`base` for `model`, from windows of `options_for(base, context).window` tokens; the last few
    are kept for measuring. `reference`: what the levels of `base` reach on its own model there
    (`measure_base`), in place of what the profile expects of them on other text."""
    options = options_for(base, context)
    if len(windows) < MIN_WINDOWS:
        raise UnsupportedError(
            f"renewing a profile needs at least {MIN_WINDOWS} windows of {options.window} tokens, "
            f"found {len(windows)}: give more text"
        )
    return _Renewal(model, base, windows, options, progress).run(reference, source or {})


class _Renewal:
    def __init__(
        self,
        model: Any,
        base: Profile,
        windows: Sequence[npt.NDArray[np.integer]],
        options: CalibrationOptions,
        progress: Progress,
    ) -> None:
        self.model, self.base, self.options, self.progress = model.eval(), base, options, progress
        self.spec = spec_of(model)
        self.parts = kept_parts(base, self.spec, moments.normalised_embeddings(model))
        ids = [torch.as_tensor(np.asarray(w, dtype=np.int64), device=model.device) for w in windows]
        self.windows, self.kept_out = ids[:-PROBE_WINDOWS], ids[-PROBE_WINDOWS:]

    def run(self, reference: Sequence[Point] | None, source: dict[str, Any]) -> Renewed:
        probes = [_probe(self.model, w, self.options) for w in self.kept_out]
        unknown = [torch.ones(len(group.scale)) for group in self.base.groups]
        steps = Steps(self.spec, self.options, self.progress, unknown, self._sinks())
        read = counted_chunks(
            self.model, self.spec, self.windows, self.options.context, self.progress,
            table_stride(steps, len(self.windows)),
        )  # fmt: skip
        # They are needed twice. As views they would keep whole windows in memory.
        chunks = [(chunk, _copied(part)) for chunk, part in read]
        try:
            parts, expected, left_out = self._remeasure(steps, chunks, probes)
        except UnsupportedError as error:  # what it cannot code well it might not code at all
            raise UnsupportedError(
                f"this model is too far from the one the profile is of ({error}): calibrate it "
                "anew, without --from"
            ) from error
        verdict = judge_transform(
            bits_at_equal_kld(points_of(expected), reference or expected_of(self.base)),
            SAME_TEXT_LIMIT if reference else OTHER_TEXT_LIMIT,
            left_out,
        )
        told = {"expected": expected, "calibration": self._origin(verdict) | source}
        return Renewed(Profile.build(parts[0] | told, parts[1]), verdict)

    def _remeasure(
        self,
        steps: Steps,
        chunks: Sequence[tuple[Chunk, KVCache]],
        probes: Sequence[QualityProbe],
    ) -> tuple[Parts, list[dict[str, float]], float]:
        """The new profile's parts, what its levels cost and do, and how much variance the basis
        leaves out."""
        meta, tensors = self.parts
        draft = tables.draft_profile(*steps.with_step(meta, tensors, self.base.finest_step))
        order = order_of(self.spec, draft)
        moved = [(chunk, part.of_layers(order)) for chunk, part in chunks]
        spread = _spread(ordered_codec(self.spec, draft), moved)
        steps.deviations = spread.deviations
        meta["finest_step"] = steps.find_step(meta, tensors, probes[:2], self.base.finest_step)
        meta, tensors = steps.count(meta, tensors, chunks)
        meta, tensors = steps.add_correction(meta, tensors, probes[:2])
        profile = Profile.build(meta | {"expected": [{}] * self.options.levels}, tensors)
        return (meta, tensors), steps.measure(profile, probes), spread.left_out

    def _sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of the first tokens. What comes after them does not change them."""
        groups = tuple(g.layers for g in self.base.groups)
        columns = moments.Columns(self.spec, groups, tuple(order_of(self.spec, self.base)))
        caches = (moments.read(self.model, w[: moments.NUM_SINKS]) for w in self.windows)
        rows = torch.stack([columns.of(cache).cpu().double() for cache in caches])
        mean = rows.mean(dim=0).half().double()
        return mean, (rows - mean).square().mean(dim=(0, 1)).sqrt()

    def _origin(self, verdict: TransformVerdict) -> dict[str, Any]:
        told = self.base.meta.get("calibration")
        before = {k: v for k, v in told.items() if k != "base"} if isinstance(told, dict) else {}
        return {
            "context": self.options.context,
            "windows": len(self.windows),
            "tokens": len(self.windows) * self.options.context,
            "renewed_from": self.base.profile_id.hex(),
            "base_model": self.base.meta["model"],
            "base": before,
            "verdict": asdict(verdict),
        }


def measure_base(
    model: Any,
    base: Profile,
    windows: Sequence[npt.NDArray[np.integer]],
    *,
    context: int | None = None,
) -> list[Point] | None:
    """What the levels of a base model's profile reach on that model, on the windows that `renew`
    keeps out. None if these have tokens that the base does not know."""
    options = options_for(base, context)
    chosen = windows[-PROBE_WINDOWS:]
    if max(int(w.max()) for w in chosen) >= base.meta["vocab_size"]:
        return None
    spec = spec_of(model)
    probes = [_probe(model, torch.as_tensor(np.asarray(w, np.int64)), options) for w in chosen]
    nothing = Steps(spec, options, lambda *_: None, [], (torch.zeros(0), torch.zeros(0)))
    return points_of(nothing.measure(base, probes))


@dataclass(frozen=True)
class Spread:
    """Residuals of the fine-tuned model in the base's metric: the standard deviation of each
    group's components, and the part of the variance that no component holds."""

    deviations: list[torch.Tensor]
    left_out: float


def _spread(codec: KltCodec, chunks: Sequence[tuple[Chunk, KVCache]]) -> Spread:
    groups = codec.profile.groups
    metrics = [
        Metric(*(torch.from_numpy(t).float() for t in (g.weight, g.metric, g.gain))) for g in groups
    ]
    squares = [torch.zeros(len(group.scale), dtype=torch.float64) for group in groups]
    total, count = 0.0, 0
    for chunk, cache in chunks:
        count += chunk.num_tokens - codec.profile.num_sinks_of(chunk)
        for index, part in enumerate(codec.analyser.analyse(chunk, cache).groups):
            squares[index] += part.components.double().square().sum(dim=1)
            rows = torch.from_numpy(groups[index].fine).float() / metrics[index].weight
            residual = part.rest + part.components[: len(rows)].T @ rows
            total += float(metrics[index].apply(residual).double().square().sum())
    held = sum(float(one.sum()) for one in squares)
    left_out = max(0.0, 1 - held / max(total, 1e-30))
    return Spread([(one / count).sqrt() for one in squares], left_out)


def judge_transform(bits: float | None, limit: float, left_out: float) -> TransformVerdict:
    """From what `TransformVerdict` says; `limit` is of the bits."""
    outside = f"the basis leaves out {left_out:.1%} of the variance (limit {LEFT_OUT_LIMIT:.0%})"
    if bits is None:
        size = "no level comes to a divergence that the base reaches too"
    else:
        size = f"{bits:.2f} times the base's bits at equal divergence (limit {limit:.2f})"
    good = bits is not None and bits <= limit and left_out <= LEFT_OUT_LIMIT
    words = "good enough" if good else "calibrate anew"
    return TransformVerdict(good, bits, left_out, f"{words}: {size}; {outside}")


def _probe(model: Any, window: torch.Tensor, options: CalibrationOptions) -> QualityProbe:
    return QualityProbe(model, window.cpu().numpy(), options.context)


def _copied(part: KVCache) -> KVCache:
    return KVCache(part.keys.clone(), part.values.clone(), part.start, part.valid_from)
