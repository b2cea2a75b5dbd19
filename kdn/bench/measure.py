"""Runs codecs over the contexts of texts and asks the model what each loss did to it.

Contexts are the outer loop, so that one exact cache is in memory at a time; a row is complete with
a text's last context.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich.progress import Progress

from kdn.bench.codec_report import row_line
from kdn.bench.codec_saved import Point, Saved
from kdn.bench.figures import CodecRow
from kdn.bench.rivals.base import CodedLevel, ExactContext, Rival
from kdn.cache.keys import TAIL_MULTIPLE, TokenIds
from kdn.cache.tensors import KVCache
from kdn.calibrate.corpus import Sample
from kdn.engines.quality import Quality, QualityProbe

FP16_BITS = 16
WARM_UP_TOKENS = 512


def measure(
    model: Any, rivals: Sequence[Rival], samples: Sequence[Sample], progress: Progress, saved: Saved
) -> list[CodecRow]:
    """Every row that is asked for; those that are saved already are not measured again."""
    warm = False
    levels = sum(len(rival.labels) for rival in rivals)
    for sample in samples:
        task = progress.add_task(sample.name, total=levels * len(sample.starts))
        for start in sample.starts:
            todo = [rival for rival in rivals if _is_open(rival, sample, start, saved)]
            done = sum(len(rival.labels) for rival in rivals if rival not in todo)
            progress.advance(task, done)
            if not todo:
                continue
            ids = sample.ids(start)
            if not warm:
                _warm_up(model, todo, ids[:WARM_UP_TOKENS])
                warm = True
            probe = QualityProbe(model, ids, sample.context)
            exact = ExactContext(ids[: sample.context], _on_cpu(probe.cache))
            for rival in todo:
                for outcome in rival.run(exact):
                    key = sample.name, rival.name, outcome.level
                    if not saved.has(key, start):
                        points = saved.add(key, start, _point(probe, outcome))
                        if len(points) == len(sample.starts):
                            row = row_of(rival.name, outcome.level, sample, points, exact.cache)
                            saved.complete(key, row)
                            progress.console.print(row_line(row, rival.labels[row.level]))
                    progress.advance(task)
    return saved.finish(
        [
            (sample.name, rival.name, level)
            for sample in samples
            for rival in rivals
            for level in range(len(rival.labels))
        ]
    )


def _is_open(rival: Rival, sample: Sample, start: int, saved: Saved) -> bool:
    """Whether some level of it is not measured on this context."""
    levels = range(len(rival.labels))
    return not all(saved.has((sample.name, rival.name, level), start) for level in levels)


def _point(probe: QualityProbe, outcome: CodedLevel) -> Point:
    quality = probe.measure(outcome.cache, outcome.kept)
    return Point(outcome.size_bytes, quality, outcome.encode_s, outcome.decode_s, probe.prefill_s)


def row_of(
    codec: str, level: int, sample: Sample, points: Sequence[Point], like: KVCache
) -> CodecRow:
    num_values = 2 * like.keys.numel()
    size_bytes = mean(point.size_bytes for point in points)
    quality = Quality.pooled([point.quality for point in points])
    return CodecRow(
        codec=codec,
        level=level,
        text=sample.name,
        bytes=size_bytes,
        bits_per_value=8 * size_bytes / num_values,
        ratio=FP16_BITS * num_values / 8 / size_bytes,
        kld=quality.kld,
        kld_p99=quality.kld_p99,
        recall_kld=quality.recall_kld,
        top1=quality.top1,
        ppl=quality.ppl,
        encode_s=median(point.encode_s for point in points),
        decode_s=median(point.decode_s for point in points),
        prefill_s=median(point.prefill_s for point in points),
    )


def _warm_up(model: Any, rivals: Sequence[Rival], ids: TokenIds) -> None:
    """The first use compiles kernels and starts threads: that is not what is timed."""
    context = len(ids) - TAIL_MULTIPLE
    probe = QualityProbe(model, ids, context)
    for rival in rivals:
        for _ in rival.run(ExactContext(ids[:context], _on_cpu(probe.cache))):
            pass


def _on_cpu(cache: KVCache) -> KVCache:
    return KVCache(cache.keys.cpu(), cache.values.cpu(), cache.start, cache.valid_from)
