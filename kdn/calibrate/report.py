"""The report that ends `kdn calibrate`: what the new profile does on text kept out, and a verdict.

The text was kept out of calibration altogether where there was enough of it; else the report uses
the windows that calibration itself measured on (it chose one step size by them, and nothing else).
Prefill and decoding are timed in the same run, on the device that the model is on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from kdn.cache.keys import Namespace, TokenIds, cut
from kdn.cache.tensors import KVCache
from kdn.calibrate.corpus import overlap
from kdn.calibrate.ratios import KLD_LIMIT, RECALL_LIMIT, ratio_within
from kdn.calibrate.run import LEAST_WINDOWS as LEAST_READ
from kdn.calibrate.run import PROBE_WINDOWS
from kdn.calibrate.self_text import SELF
from kdn.calibrate.steps import Progress
from kdn.calibrate.verdict import Figures, Verdict, judge
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.codec.klt import Profile
from kdn.codec.profiles import codec_with
from kdn.defaults import QUALITY
from kdn.engines.quality import Quality, QualityProbe
from kdn.engines.transformers import spec_of
from kdn.session.quality import enough_kld

Interval = tuple[float, float]

KEPT_WINDOWS, MOST_WINDOWS = 6, 24
LARGE = 65_536
"""Values of a token in the cache of a model with 8B weights."""
ENOUGH_TIMES = 5
"""More than KEPT_WINDOWS are kept out only if there are this many times as many windows."""
LEAST_WINDOWS = PROBE_WINDOWS + LEAST_READ
"""The windows that calibration itself needs."""
FP16_BITS = 16
_STUDENT = (math.inf, math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Half-widths of a 95 % interval of a mean of n values, in standard errors, by n."""


@dataclass(frozen=True)
class ReportedLevel:
    """One level over all windows kept out; the intervals are of the mean over such windows."""

    level: int
    bits_per_value: float
    ratio: float
    kld: float
    kld_interval: Interval
    recall_kld: float
    recall_interval: Interval
    top1: float
    decode_s: float


@dataclass(frozen=True)
class Report:
    """Text kept out is `figures.num_windows` contexts of `context` tokens. `default_level` is the
    last that is fetched at the default quality."""

    levels: tuple[ReportedLevel, ...]
    figures: Figures
    verdict: Verdict
    default_level: int
    prefill_s: float
    context: int
    profile_bytes: int
    weight_bytes: int
    device: str
    num_dropped: int
    """Windows of its own text that repeated themselves."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "limits": {"kld": KLD_LIMIT, "recall_kld": RECALL_LIMIT},
            "default_quality": enough_kld(QUALITY),
        }


def kept_windows(device: torch.device, values_per_token: int) -> int:
    """How many are reported on. Windows differ much, so more are better where they are quick: on a
    GPU, as many as take the time of KEPT_WINDOWS of a large model."""
    if device.type == "cpu":
        return KEPT_WINDOWS
    return max(KEPT_WINDOWS, min(MOST_WINDOWS, KEPT_WINDOWS * LARGE // values_per_token))


def keep_out(
    windows: Sequence[TokenIds], count: int = KEPT_WINDOWS
) -> tuple[list[TokenIds], list[TokenIds]]:
    """Windows to calibrate with and windows to report on. Of little text, the latter are fewer, or
    those that calibration measures on itself."""
    found = list(windows)
    kept = count if len(found) >= ENOUGH_TIMES * count else KEPT_WINDOWS
    if len(found) >= LEAST_WINDOWS + kept:
        return found[:-kept], found[-kept:]
    return found, found[-PROBE_WINDOWS:]


def make_report(
    model: Any,
    profile: Profile,
    *,
    learnt: Sequence[TokenIds],
    kept_out: Sequence[TokenIds],
    context: int,
    progress: Progress = lambda *_: None,
) -> Report:
    """`learnt` and `kept_out` are windows of a context and what follows it, as `keep_out` gave
    them."""
    codec = codec_with(spec_of(model), profile)
    tried = []
    for number, window in enumerate(kept_out):
        progress("reporting", number, len(kept_out))
        tried.append(_try_window(model, codec, window, context, warm=number > 0))
    progress("reporting", len(kept_out), len(kept_out))
    levels = tuple(_level(index, tried, codec, context) for index in range(codec.num_levels))
    prefill_s = median(one.prefill_s for one in tried)
    default = levels[_default_level(codec.expected_kld)]
    profile_bytes, weight_bytes = len(profile.to_bytes()), _weight_bytes(model)
    source = profile.meta["calibration"]
    figures = Figures(
        ratio_at_quality=ratio_within(levels),
        prefill_over_decode=prefill_s / max(default.decode_s, 1e-9),
        stated_kld=codec.expected_kld[default.level],
        kld=default.kld,
        kld_low=default.kld_interval[0],
        kld_high=default.kld_interval[1],
        num_windows=len(tried),
        overlap=_shared(learnt, kept_out),
        num_tokens=int(source["tokens"]),
        profile_share=profile_bytes / weight_bytes,
        is_own_text=source.get("texts") == [str(SELF)],
    )
    return Report(
        levels, figures, judge(figures), default.level, prefill_s, context,
        profile_bytes, weight_bytes, str(model.device), int(source.get("dropped_texts", 0)),
    )  # fmt: skip


def _shared(learnt: Sequence[TokenIds], kept_out: Sequence[TokenIds]) -> float:
    """Part of the 8-grams kept out that were learnt from as well."""
    kept = {id(window) for window in kept_out}
    others = [window for window in learnt if id(window) not in kept]
    return overlap(np.concatenate(kept_out), np.concatenate(others))


@dataclass(frozen=True)
class _Tried:
    """One window: of each level its bytes, its quality and the time to decode it."""

    prefill_s: float
    sizes: list[int]
    qualities: list[Quality]
    decode_s: list[float]


def _try_window(model: Any, codec: Codec, window: TokenIds, context: int, *, warm: bool) -> _Tried:
    if not warm:  # the first use compiles kernels and starts threads
        _try_window(model, codec, window, context, warm=True)
    probe = QualityProbe(model, window, context)
    chunks = cut(window[:context], Namespace(codec.spec.fingerprint, codec.profile_id))
    host = KVCache(
        probe.cache.keys.cpu().float(), probe.cache.values.cpu().float(), 0, probe.cache.valid_from
    )
    streams = [Bitstream.parse(data) for data in codec.encode_all(chunks, host)]
    out = probe.cache if codec.decodes_on(model.device) else host
    sizes, qualities, taken = [], [], []
    for levels in range(1, codec.num_levels + 1):
        decoded = KVCache(
            torch.zeros_like(out.keys), torch.zeros_like(out.values), 0, out.valid_from
        )
        begin = _now(out)
        codec.decode_all(streams, chunks, decoded, levels=levels)
        taken.append(_now(out) - begin)
        sizes.append(sum(stream.level_end(levels - 1) for stream in streams))
        qualities.append(probe.measure(decoded))
    return _Tried(probe.prefill_s, sizes, qualities, taken)


def _now(cache: KVCache) -> float:
    if cache.keys.device.type == "cuda":
        torch.cuda.synchronize(cache.keys.device)
    return time.perf_counter()


def _level(level: int, tried: Sequence[_Tried], codec: Codec, context: int) -> ReportedLevel:
    values = context * codec.spec.values_per_token
    bits = 8 * sum(one.sizes[level] for one in tried) / (values * len(tried))
    qualities = [one.qualities[level] for one in tried]
    pooled = Quality.pooled(qualities)
    return ReportedLevel(
        level=level,
        bits_per_value=bits,
        ratio=FP16_BITS / bits,
        kld=pooled.kld,
        kld_interval=interval([quality.kld for quality in qualities]),
        recall_kld=pooled.recall_kld,
        recall_interval=interval([quality.recall_kld for quality in qualities]),
        top1=pooled.top1,
        decode_s=median(one.decode_s[level] for one in tried),
    )


def interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean of few values that differ by factors: Student's, of logarithms."""
    logs = np.log(np.maximum(values, 1e-12))
    count = len(logs)
    if count < 2:
        return 0.0, math.inf
    student = _STUDENT[count] if count < len(_STUDENT) else 2.2
    half = student * float(logs.std(ddof=1)) / math.sqrt(count)
    middle = float(np.log(np.maximum(np.mean(values), 1e-12)))
    return math.exp(middle - half), math.exp(middle + half)


def _default_level(expected_kld: Sequence[float]) -> int:
    enough = enough_kld(QUALITY)
    good = [level for level, kld in enumerate(expected_kld) if kld <= enough]
    return good[0] if good else len(expected_kld) - 1


def _weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
