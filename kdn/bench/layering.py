"""`kdn bench layering`: what it costs to code klt's components in levels instead of at once.

A level of klt quantises exactly as a stream of that level alone would: both decode to the same
values, and only bytes differ. The single-level stream is coded by the same coder, with thresholds
and tables counted for its integers on calibration text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kdn.bench import options
from kdn.cache.keys import Namespace, TokenIds, cut
from kdn.calibrate import moments, tables
from kdn.calibrate.corpus import (
    Text,
    default_calibration,
    default_texts,
    load_text,
    prompt_head,
    windows_of,
)
from kdn.calibrate.tables import Quantised
from kdn.codec import open_codec
from kdn.codec.klt import KltCodec, symbols_numba
from kdn.codec.klt.kinds import KIND_ENTERING
from kdn.engines.models import load_model
from kdn.engines.transformers import spec_of


def run(
    text: Annotated[list[Path] | None, options.files("Text to measure on.")] = None,
    calibration: Annotated[list[Path] | None, options.files("Text to count tables on.")] = None,
    context: Annotated[int, options.count(512, "Tokens of each context.")] = 3072,
    contexts: Annotated[int, options.count(1, "Contexts measured.")] = 2,
    counted: Annotated[int, options.count(1, "Contexts counted.")] = 12,
    profile: Annotated[Path | None, options.files("A klt profile to use instead.")] = None,
    model: Annotated[str, typer.Option(help="smollm2, a folder, or a hub name.")] = "smollm2",
) -> None:
    """Bytes of klt's levels beside those of a single-level stream of the same values."""
    fitted = [load_text(path) for path in calibration or ()]
    texts = [load_text(path) for path in text or ()] or default_texts()
    loaded, tokenizer = load_model(model)
    spec = spec_of(loaded)
    codec = open_codec("klt", spec, profile)
    assert isinstance(codec, KltCodec)

    def samples(texts: Sequence[Text], count: int) -> list[Quantised]:
        ids = [t.tokens(tokenizer) for t in texts]
        windows = windows_of(ids, context, count, head=prompt_head(tokenizer))
        return [sample for ids in windows for sample in _quantised(loaded, codec, ids)]

    learnt = samples(fitted or default_calibration(), counted)
    tested = samples(texts, contexts)
    shown = Table("level", "bytes in levels", "bytes at once", "cost of layering")
    for level in range(codec.num_levels - 1):
        layered = sum(layered_bytes(codec, sample, level) for sample in tested)
        single = single_level_bytes(codec, learnt, tested, level)
        shown.add_row(str(level), f"{layered:,}", f"{single:,}", f"{layered / single - 1:+.2%}")
    Console().print(shown)


def _quantised(model: Any, codec: KltCodec, ids: TokenIds) -> Iterator[Quantised]:
    import torch

    cache = moments.read(model, torch.as_tensor(ids.astype(np.int64)))
    for chunk in cut(ids, Namespace(codec.spec.fingerprint, codec.profile_id)):
        yield tables.quantise(codec, chunk, cache.slice(chunk.start, chunk.end))


def layered_bytes(codec: KltCodec, sample: Quantised, last: int) -> int:
    """Components of all groups in the levels up to `last`, with the profile's own tables."""
    total = 0
    for group, values in enumerate(sample.levels):
        for level, kind, _ in codec.coder.parts(group):
            if level <= last:
                section = codec.coder.encode_part(level, kind, group, values, sample.classes)
                total += len(section.data)
    return total


def single_level_bytes(
    codec: KltCodec, learnt: Sequence[Quantised], tested: Sequence[Quantised], level: int
) -> int:
    """The same integers coded at once, with tables counted on other text."""
    total = 0
    for group, count in enumerate(codec.profile.levels[level].num_components):
        rows = slice(0, count)

        def models(samples: Sequence[Quantised], **parts: Any) -> list[Any]:
            base = [codec.coder.table_model(KIND_ENTERING, group, rows, s.classes) for s in samples]  # noqa: B023
            return [replace(m, **parts) for m in base]

        values = [s.levels[group][level][rows] for s in learnt]
        cuts = tables.thresholds(values)
        counts = tables.count_symbols(models(learnt, thresholds=cuts), values, None)
        cdf = np.zeros((counts.shape[0], counts.shape[1] + 1), np.uint16)
        np.cumsum(tables.frequencies(counts), axis=1, out=cdf[:, 1:])
        for sample, model in zip(tested, models(tested, thresholds=cuts, cdf=cdf), strict=True):
            total += len(symbols_numba.encode(model, sample.levels[group][level][rows], None))
    return total
