"""What follows once a transform is fitted: the finest step, tables, the last level, measurements.

Calibration (`run.py`) and the renewal of a profile for a fine-tuned model (`renewing.py`) both end
with these steps. Each takes a profile's `meta` and `tensors` as they are so far and returns more of
them; nothing here changes predictor, metric or basis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.cache.windows import layer_order, ordered
from kdn.calibrate import moments, tables
from kdn.calibrate.sizes import free_memory
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.profile import Profile
from kdn.codec.profiles import codec_with
from kdn.engines.quality import Quality, QualityProbe

if TYPE_CHECKING:
    from kdn.calibrate.run import CalibrationOptions

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""

Tensors = dict[str, npt.NDArray[Any]]
Parts = tuple[dict[str, Any], Tensors]
"""`meta` and `tensors` of a profile in the making."""

REACHABLE, LACKING = 0.9, 1.5
"""The step aims at the requested divergence if the basis alone, without rounding, causes less than
`REACHABLE` of it. Otherwise it aims at `LACKING` times what the basis causes: a finer step would
cost bits and gain little."""
STEP_ATTEMPTS = 6
LEAST_KLD = 1e-12
"""Stands for a divergence of zero: steps are found from ratios of divergences."""
TABLE_STRIDE = 3
"""Every third chunk of a window is counted, fewer where memory is short."""
MOST_TABLE_BYTES = 5_000_000_000
"""Limit for the chunks that are counted, which are all in memory at once."""
MEMORY_FOR_TABLES = 0.25
"""The share of free memory for them."""


@dataclass
class Steps:
    """The steps of one model with one transform."""

    spec: ModelSpec
    options: CalibrationOptions
    progress: Progress
    deviations: Sequence[torch.Tensor]
    """Standard deviation of each group's components."""
    sinks: tuple[torch.Tensor, torch.Tensor]
    """Mean [sinks, columns] and standard deviation [columns] of the first tokens' values."""
    _samples: list[tables.Quantised] = field(default_factory=list)

    def with_step(self, meta: dict[str, Any], tensors: Tensors, step: float) -> Parts:
        """What depends on the finest step: scale classes, and how sinks are quantised."""
        coarsest = step * 3 ** (self.options.levels - 1)
        named: Tensors = {
            f"g{i}.scale": tables.scale_class(d, coarsest) for i, d in enumerate(self.deviations)
        }
        mean, deviation = self.sinks[0].cpu(), self.sinks[1].cpu()
        weight = torch.from_numpy(self._weight(tensors))
        # Never finer than 8 bits for what is usual: a context's first tokens vary little.
        usual = deviation + 1e-3 * deviation.mean() + 1e-6
        sink_step = (step * self.options.sink_fineness / weight).maximum(usual / 128).float()
        named |= {
            "sink.mean": mean.half().numpy(),
            "sink.step": sink_step.numpy(),
            "sink.scale": tables.scale_class((deviation / sink_step).double(), 1.0),
            "sink.freqs": tables.laplace_tables(),
            "fix.step": (1.0 / weight).float().numpy(),
            "fix.scale": np.full(len(weight), tables.SCALE_ORIGIN, np.uint8),
        }
        return meta | {"finest_step": step}, tensors | named

    def find_step(
        self,
        meta: dict[str, Any],
        tensors: Tensors,
        probes: Sequence[QualityProbe],
        first: float | None = None,
    ) -> float:
        """The step at which the middle levels come to the divergence asked for, or somewhat above
        what the basis lacks at any step. `first`: a guess."""
        # In this metric the divergence of errors uniform over one step would be
        # context * components * step^2 / 24, were it quadratic; a guess to start from. The step of
        # the middle is three times the finest.
        noisy = sum(len(d) for d in self.deviations) * self.options.context
        wanted = self.options.middle_kld
        step = first or float(np.sqrt(24 * wanted / moments.CONTINUATION_KLD / noisy)) / 3
        tried: list[tuple[float, float]] = []
        for attempt in range(STEP_ATTEMPTS):
            self.progress("finding the step", attempt, STEP_ATTEMPTS)
            counted = meta | {"num_components": self._most_coded()}
            draft = tables.draft_profile(*self.with_step(counted, tensors, step))
            kld = simulated_kld(self.spec, draft, probes, levels=self.options.middle_levels)
            tried.append((step, kld))
            aim, factor = next_step(tried, wanted)
            if factor is None:
                break
            step *= factor
        self.progress("finding the step", STEP_ATTEMPTS, STEP_ATTEMPTS)
        return min(tried, key=lambda one: abs(np.log(one[1] / aim)))[0]

    def count(
        self, meta: dict[str, Any], tensors: Tensors, parts: Iterable[tuple[Chunk, KVCache]]
    ) -> Parts:
        """Tables of all levels but the last, from chunks of text and their caches."""
        meta, tensors = self.with_step(meta, tensors, meta["finest_step"])
        draft = tables.draft_profile(meta, tensors)
        codec, order = ordered_codec(self.spec, draft), order_of(self.spec, draft)
        self._samples = [
            tables.quantise(codec, chunk, part.of_layers(order)) for chunk, part in parts
        ]
        often = tables.components_per_level(self._samples)
        most = self._most_coded()
        counts = [list(map(min, *both)) for both in zip(often, most, strict=True)]
        tensors = tensors | tables.count_tables(codec, self._samples, counts)
        for group, count in enumerate(often[-1]):
            fine = min(count, len(tensors[f"g{group}.fine"]))
            lengths = {"fine": fine, "basis": count - fine, "basis_scale": count - fine}
            for name, kept in (lengths | {"scale": count}).items():
                tensors[f"g{group}.{name}"] = tensors[f"g{group}.{name}"][:kept]
        meta = meta | {"num_components": counts}
        trimmed = ordered_codec(self.spec, tables.draft_profile(meta, tensors))
        if trimmed.profile.has_means:
            tensors |= tables.count_means(trimmed, self._samples)
        return meta, tensors

    def add_correction(
        self, meta: dict[str, Any], tensors: Tensors, probes: Sequence[QualityProbe]
    ) -> Parts:
        """The last level: steps inverse to the columns' weights, sized for the divergence asked
        for; then its tables. `count` comes first."""
        self.progress("correcting", 0, 2)
        weight = self._weight(tensors)
        step = self._correction_step(meta, tensors, probes, 1.5 * meta["finest_step"])
        tensors["fix.step"] = (step / weight).astype(np.float32)
        codec = ordered_codec(self.spec, tables.draft_profile(meta, tensors))
        self.progress("correcting", 1, 2)
        samples = [tables.with_correction(codec, sample) for sample in self._samples]
        tensors["fix.scale"] = tables.correction_scales(samples)
        codec = ordered_codec(self.spec, tables.draft_profile(meta, tensors))
        meta = meta | {"num_components": codec.profile.meta["num_components"]}
        tensors |= tables.count_tables(codec, samples, meta["num_components"])
        self.progress("correcting", 2, 2)
        return meta, tensors

    def _correction_step(
        self, meta: dict[str, Any], tensors: Tensors, probes: Sequence[QualityProbe], step: float
    ) -> float:
        weight, tried = self._weight(tensors), []
        for _ in range(STEP_ATTEMPTS):
            fixed = tensors | {"fix.step": (step / weight).astype(np.float32)}
            draft = tables.draft_profile(meta, fixed)
            last = simulated_kld(self.spec, draft, probes, levels=self.options.levels)
            tried.append((step, last))
            if is_rounding(tried):
                return tried[-3][0]
            if abs(np.log(last / self.options.finest_kld)) < 0.25:
                break
            step *= float(np.clip((0.85 * self.options.finest_kld / last) ** 0.5, 0.1, 10))
        return tried[-1][0]

    def measure(self, profile: Profile, probes: Sequence[QualityProbe]) -> list[dict[str, float]]:
        """What each level costs and does: the profile's `expected`."""
        self.progress("measuring", 0, 1)
        levels = list(range(1, profile.num_levels + 1))
        measured = decoded_quality(codec_with(self.spec, profile), probes, levels=levels)
        self.progress("measuring", 1, 1)
        values = len(probes) * self.options.context * self.spec.values_per_token
        return [
            {
                "bits": 8 * m.size_bytes / values,
                "kld": max(m.quality.kld, LEAST_KLD),
                "recall_kld": m.quality.recall_kld,
                "top1": m.quality.top1,
            }
            for m in measured
        ]

    def _most_coded(self) -> list[list[int]]:
        """Of each level but the last: how many components of each group it may code."""
        row = [min(self.options.components, len(one)) for one in self.deviations]
        return [row] * (self.options.levels - 1)

    def _weight(self, tensors: Tensors) -> npt.NDArray[np.float32]:
        """Weights of all columns in the error metric."""
        return np.concatenate([tensors[f"g{i}.weight"] for i in range(len(self.deviations))])


def next_step(tried: Sequence[tuple[float, float]], wanted: float) -> tuple[float, float | None]:
    """Of steps and divergences: the divergence to aim at, and by what to multiply the last step to
    come to it; None if that is near enough."""
    kld, floor = tried[-1][1], lacking(tried)
    aim = wanted if floor < REACHABLE * wanted else LACKING * floor
    if len(tried) < 2:
        # The second one tells what the basis lacks, if it is not too near.
        factor = (aim / kld) ** 0.6
        return aim, float(np.clip(factor, 0.1, 10)) if abs(np.log(factor)) > np.log(3) else 3.0
    if abs(np.log(kld / aim)) < 0.1:
        return aim, None
    return aim, float(np.clip(np.sqrt((aim - floor) / max(kld - floor, 1e-3 * floor)), 0.1, 10))


def lacking(tried: Sequence[tuple[float, float]]) -> float:
    """The divergence that no step undoes, from the finest and the coarsest, as if the rest fell
    with the square of the step."""
    (fine, kld), (coarse, coarse_kld) = min(tried), max(tried)
    if fine == coarse:
        return 0.0
    ratio = (fine / coarse) ** 2
    return min(max(0.0, (kld - ratio * coarse_kld) / (1 - ratio)), kld, coarse_kld)


def is_rounding(tried: Sequence[tuple[float, float]]) -> bool:
    """Of steps and divergences: whether the last two, each finer, did not help any more. (The
    divergence falls with the square of the step.) What is left then is the rounding of a model in
    16 bits, which no step can undo. One of them may not help because steps are still too coarse to
    correct anything."""
    if len(tried) < 3 or not tried[-3][0] > tried[-2][0] > tried[-1][0]:
        return False
    (before, kld_before), _, (step, kld) = tried[-3:]
    return kld > kld_before * float(np.sqrt(step / before))


def table_stride(steps: Steps, num_windows: int) -> int:
    """Every how many chunks are counted: of each, integers of all levels and two float32 of each
    component, the rest and the correction of each column are held."""
    options, num_components = steps.options, sum(len(d) for d in steps.deviations)
    values = num_components * (options.levels + 2) + 2 * steps.spec.values_per_token
    free = MEMORY_FOR_TABLES * free_memory(torch.device("cpu"))
    most = max(1.0, min(MOST_TABLE_BYTES, free) / (4 * CHUNK_TOKENS * values))
    num_chunks = -(-options.context // CHUNK_TOKENS)
    return min(num_chunks, max(TABLE_STRIDE, int(np.ceil(num_windows * num_chunks / most))))


def counted_chunks(
    model: Any, spec: ModelSpec, windows: Sequence[torch.Tensor], context: int, progress: Progress,
    stride: int = TABLE_STRIDE,
) -> Iterator[tuple[Chunk, KVCache]]:  # fmt: skip
    """Some chunks of every window's context, and what the model reads there."""
    for index, window in enumerate(windows):
        progress("counting", index, len(windows))
        ids = window[:context]
        cache = on_cpu(moments.read(model, ids))
        # What a draft's chunks are called does not matter: nothing is stored under their names.
        chunks = cut(ids.cpu().numpy(), Namespace(spec.fingerprint, b""))
        for chunk in chunks[index % stride :: stride]:
            yield chunk, cache.slice(chunk.start, chunk.end)
    progress("counting", len(windows), len(windows))


@dataclass(frozen=True)
class Measured:
    """What some first levels of all chunks cost and do."""

    size_bytes: int
    quality: Quality


def decoded_quality(
    codec: Codec, probes: Sequence[QualityProbe], *, levels: Sequence[int]
) -> list[Measured]:
    """Each number of levels over all probes, through real streams."""
    parts: dict[int, list[Quality]] = {level: [] for level in levels}
    sizes = dict.fromkeys(levels, 0)
    for probe in probes:
        cache = on_cpu(probe.cache)
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


def ordered_codec(spec: ModelSpec, profile: Profile) -> KltCodec:
    """For a model whose layers stand in the profile's order."""
    return KltCodec(spec if profile.windowed_from is None else ordered(spec), profile)


def order_of(spec: ModelSpec, profile: Profile) -> Sequence[int]:
    """That order: the model's layers, as it numbers them."""
    return range(spec.num_layers) if profile.windowed_from is None else layer_order(spec)


def simulated_kld(
    spec: ModelSpec, profile: Profile, probes: Sequence[QualityProbe], levels: int
) -> float:
    """Divergence at a number of levels, before there are tables to code them with. The geometric
    mean of the contexts': steps change all of them by like factors, and where a few tokens hang by
    a hair, an arithmetic mean would be theirs."""
    codec, order = ordered_codec(spec, profile), order_of(spec, profile)
    back = [order.index(layer) for layer in range(spec.num_layers)]
    logarithms = []
    for probe in probes:
        cache = on_cpu(probe.cache).of_layers(order)
        namespace = Namespace(codec.spec.fingerprint, codec.profile_id)
        lossy = KVCache(torch.empty_like(cache.keys), torch.empty_like(cache.values))
        for chunk in cut(probe.tokens[: probe.context].numpy(), namespace):
            part = codec.simulate(chunk, cache.slice(chunk.start, chunk.end), levels)
            lossy.slice(chunk.start, chunk.end).keys.copy_(part.keys)
            lossy.slice(chunk.start, chunk.end).values.copy_(part.values)
        kld = probe.measure(lossy.of_layers(back)).kld
        logarithms.append(np.log(max(kld, LEAST_KLD)))
    return float(np.exp(np.mean(logarithms)))


def on_cpu(cache: KVCache) -> KVCache:
    return KVCache(
        cache.keys.cpu().float(), cache.values.cpu().float(), cache.start, cache.valid_from
    )
