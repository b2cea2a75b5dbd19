"""`kdn bench codec`: rate, quality and speed of every codec on a real model, in one run.

Every codec turns the same caches into real bytes and back; the model then tells what each loss did
to its predictions. Texts used for calibration must not be measured on: what they share is counted
and told. With `--json`, a run that was stopped goes on where it stood (`codec_saved.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer

from kdn.bench import options
from kdn.bench.calibration import Calibration
from kdn.bench.codec_report import plot, print_report
from kdn.bench.codec_saved import Saved
from kdn.bench.measure import measure
from kdn.bench.options import PlotFile, SavedFile
from kdn.bench.progress import progress_bar
from kdn.bench.report import code_digest, hardware, report_console
from kdn.bench.rivals import NAMES, open_rivals
from kdn.cache.keys import TAIL_MULTIPLE
from kdn.cache.spec import ModelSpec
from kdn.calibrate.corpus import (
    OVERLAP_WARNING,
    Sample,
    Text,
    default_calibration,
    default_texts,
    load_text,
    overlap,
    prompt_head,
)
from kdn.codec.klt import Profile
from kdn.codec.profiles import find_profile
from kdn.engines.models import load_model
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

OWN_PROFILE = ("klt", "klt-tail")
"""Codecs with a profile that is calibrated elsewhere."""


def run(
    text: Annotated[
        list[Path] | None, options.files("Text to measure on (.txt, .jsonl, .gz); repeatable.")
    ] = None,
    codecs: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(NAMES),
    context: Annotated[int, options.count(512, "Tokens of each context.")] = 3072,
    contexts: Annotated[int, options.count(1, "Contexts of each text.")] = 4,
    continuation: Annotated[int, options.count(1, "Tokens scored after each.")] = 128,
    calibration: Annotated[
        list[Path] | None, options.files("Text to fit kvtc and cachegen on; repeatable.")
    ] = None,
    calibration_tokens: Annotated[int, options.count(1, "About so many of it.")] = 25_000,
    profile: Annotated[Path | None, options.files("A klt profile to use instead.")] = None,
    model: Annotated[str, typer.Option(help="smollm2, a folder, or a hub name.")] = "smollm2",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    json_file: SavedFile = None,
    plot_file: PlotFile = None,
    seed: Annotated[int, options.seed("Chooses the contexts.")] = 0,
) -> None:
    """Rate, quality and speed of every codec on a real model."""
    if context % TAIL_MULTIPLE:
        raise UnsupportedError(f"expected a context of a multiple of {TAIL_MULTIPLE} tokens")
    chosen = options.words("codecs", codecs, NAMES)
    texts = list(_unique(map(load_text, text) if text else default_texts()))
    fitted = [load_text(path) for path in calibration or ()]
    if profile is not None:
        Profile.load(profile)  # refused now, not after an hour
    loaded, tokenizer = load_model(model, device=options.device(device))
    spec = spec_of(loaded)
    head = prompt_head(tokenizer)
    samples = [
        Sample.of(part, part.tokens(tokenizer), context, contexts, continuation, seed, head)
        for part in texts
    ]
    learnt = [(part, part.tokens(tokenizer)) for part in fitted or default_calibration()]
    shared = {s.name: max(overlap(s.tokens, ids) for _, ids in learnt) for s in samples}
    notes = _notes(samples, shared, contexts)
    with progress_bar() as progress:
        for note in notes:
            progress.console.print(note, style="yellow")
        fit = Calibration.of(
            loaded, spec, learnt, window_tokens=context, num_tokens=calibration_tokens, seed=seed,
            track=lambda windows: iter(progress.track(windows, description="calibrating")),
            klt_profile=profile, head=head,
        )  # fmt: skip
        rivals = open_rivals(chosen, spec, fit)
        facts = hardware(device)
        extra: dict[str, Any] = {
            "levels": {rival.name: rival.labels for rival in rivals},
            "settings": {
                "model": model, "fingerprint": spec.fingerprint.hex(), "device": device,
                "seed": seed, "context": context,
                "contexts": {s.name: len(s.starts) for s in samples},
                "texts": {s.name: digest_of(s.tokens.tobytes()) for s in samples},
                "continuation": continuation, "begins_with": head.tolist(),
                "profile": _profile_id(spec, profile) if {*chosen} & {*OWN_PROFILE} else "",
                "code": code_digest(),
            },
            "calibration": {
                "texts": [part.name for part, _ in learnt], "tokens": fit.num_tokens,
                "overlap": shared, "digest": fit.digest,
            },
            "notes": notes,
            "hardware": facts,
            "commit": facts["commit"],
        }  # fmt: skip
        saved = Saved(json_file, extra)
        if saved.note:
            progress.console.print(saved.note, markup=False)
        rows = measure(loaded, rivals, samples, progress, saved)
    if plot_file:
        plot(plot_file, rows)
    print_report(report_console(), rows, extra)


def digest_of(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _profile_id(spec: ModelSpec, named: Path | None) -> str:
    found = find_profile(spec, named)
    return found.profile_id.hex() if found else ""


def _unique(texts: Iterable[Text]) -> Iterator[Text]:
    """Texts with names that tell them apart: they are keys of the report."""
    seen: dict[str, int] = {}
    for text in texts:
        seen[text.name] = count = seen.get(text.name, 0) + 1
        yield text if count == 1 else Text(f"{text.name}-{count}", text.content)


def _notes(samples: Sequence[Sample], shared: dict[str, float], contexts: int) -> list[str]:
    notes = []
    for sample in samples:
        if len(sample.starts) < contexts:
            notes.append(f"{sample.name} is short: {len(sample.starts)} of {contexts} contexts")
        if sample.overlaps:
            notes.append(f"{sample.name} is short: its contexts overlap")
        if shared[sample.name] > OVERLAP_WARNING:
            notes.append(
                f"{sample.name}: {shared[sample.name]:.0%} of its 8-grams are in the calibration "
                "text; rivals fitted on it are flattered"
            )
    return notes
