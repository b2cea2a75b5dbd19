"""`kdn bench tasks`: what codecs do to a model's answers, beside the exact cache's.

Every context is read once. Each codec encodes its cache and decodes it again, and the questions are
asked on top of what came out. Tasks are cut to what the model can solve with the exact cache: where
it fails anyway, a lossy cache has nothing to lose.

Not measured: speed (`kdn bench codec`, `kdn bench ttft`), joined pieces (`kdn bench blend`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from kdn.bench import options
from kdn.bench.calibration import Calibration
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.report import hardware, report_console
from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.ours import Layered, cachegen
from kdn.bench.tasks.found import Found
from kdn.bench.tasks.measure import Bench
from kdn.bench.tasks.problems import Problem, Task, Writer
from kdn.bench.tasks.report import plot, print_report, told
from kdn.bench.tasks.sources import KINDS, open_sources
from kdn.bench.tasks.summary import Row, as_json, rows_of, verdicts
from kdn.bench.tasks.ways import Ways, asked_for
from kdn.cache.keys import TokenIds
from kdn.cache.spec import ModelSpec
from kdn.calibrate.corpus import Text, default_calibration, load_text, prompt_head
from kdn.calibrate.progress import bar
from kdn.calibrate.steps import Progress
from kdn.codec import open_codec
from kdn.engines.models import load_model
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

FITTED_WINDOW, FITTED_TOKENS = 3072, 25_000
"""Text that CacheGen is fitted on, as in `kdn bench codec`."""
QUICK_ITEMS = 3
SCORING = 1
"""Counts changes in how answers are scored: results before and after are not mixed."""


def run(
    data: Annotated[
        list[Path] | None,
        options.files("Question sets (.jsonl) and texts (.txt), plain or .gz; repeatable."),
    ] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated kinds.")] = ",".join(KINDS),
    items: Annotated[int, options.count(1, "Contexts of each file, at most.")] = 40,
    quick: Annotated[bool, typer.Option("--quick", help="A little of everything.")] = False,
    without_cachegen: Annotated[
        bool, typer.Option("--without-cachegen", help="Only kdn's own codec.")
    ] = False,
    calibration: Annotated[
        list[Path] | None, options.files("Text to fit CacheGen on; repeatable.")
    ] = None,
    model: Annotated[str, typer.Option(help="smollm2, a folder, or a hub name.")] = "smollm2",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Answers after every codec beside the exact cache's: accuracy, F1, perplexity."""
    kinds = options.words("tasks", tasks, KINDS)
    sources = open_sources(data or [], kinds)
    texts = [load_text(path) for path in calibration or ()]
    loaded, tokenizer, spec = _loaded(model, device)
    most = min(items, QUICK_ITEMS) if quick else items
    made = [one.make(Writer(tokenizer), most) for one in sources]
    _check_lengths(made, spec)
    with bar() as report:
        klt = Layered(open_codec("klt", spec))
        rival = None if without_cachegen else _cachegen(loaded, tokenizer, spec, texts, report)
        ways = Ways(klt, rival, asked_for(klt.codec))
        found = Found.opened(json_file, _settings(model, spec, ways, device))
        rows, extra = _measured(Bench(loaded, tokenizer, ways), made, found, report, device)
    if plot_file:
        plot(plot_file, made, rows)
    print_report(report_console(), made, rows, extra)


def _loaded(model: str, device: str) -> tuple[Any, Any, ModelSpec]:
    from kdn.engines.grouped import use_grouped_attention

    loaded, tokenizer = load_model(model, device=options.device(device))
    use_grouped_attention(loaded)
    spec = spec_of(loaded)
    if spec.has_states or any(window is not None for window in spec.windows):
        raise UnsupportedError("model: one with sliding windows or recurrent layers is not asked")
    return loaded, tokenizer, spec


def _check_lengths(tasks: Sequence[Task], spec: ModelSpec) -> None:
    longest = max(len(problem.tokens) for task in tasks for problem in task.problems)
    if spec.max_tokens is not None and longest >= spec.max_tokens:
        raise UnsupportedError(f"model: it reads {spec.max_tokens} tokens, a context has {longest}")


def _cachegen(
    model: Any, tokenizer: Any, spec: ModelSpec, texts: Sequence[Text], report: Progress
) -> Layered:
    """Fitted as `kdn bench codec` fits it; what was fitted once is kept."""
    learnt = [(text, text.tokens(tokenizer)) for text in texts or default_calibration()]
    fit = Calibration.of(
        model, spec, learnt, window_tokens=FITTED_WINDOW, num_tokens=FITTED_TOKENS, seed=0,
        track=lambda windows: _tracked(windows, report), head=prompt_head(tokenizer),
    )  # fmt: skip
    return cachegen(CacheGenCodec(spec, fit.cachegen()))


def _settings(model: str, spec: ModelSpec, ways: Ways, device: str) -> dict[str, Any]:
    return {
        "model": model, "fingerprint": spec.fingerprint.hex(), "device": device,
        "ways": ways.labels, "enough_kld": dict(ways.enough_kld), "scoring": SCORING,
        "profile": ways.klt.codec.profile_id.hex(),
        "cachegen": ways.cachegen.codec.profile_id.hex() if ways.cachegen else None,
    }  # fmt: skip


def _tracked(windows: Sequence[TokenIds], report: Progress) -> Iterator[TokenIds]:
    for number, window in enumerate(windows):
        report("fitting cachegen", number, len(windows))
        yield window
    report("fitting cachegen", len(windows), len(windows))


def _measured(
    bench: Bench, tasks: Sequence[Task], found: Found, report: Progress, device: str
) -> tuple[list[Row], dict[str, Any]]:
    """All contexts that are not in the file yet. Every one is saved when it is done."""
    labels, facts = bench.ways.labels, hardware(device)
    todo = [(task, one) for task, one in in_turns(tasks) if found.of(task, one) is None]
    total, done = sum(len(p.tokens) for _, p in todo), 0.0
    for task, problem in todo:

        def passed(step: float = len(problem.tokens) / len(labels)) -> None:
            nonlocal done
            done += step
            report("tokens asked about", min(total, round(done)), total)

        found.add(task, problem, list(bench.measure(task, problem, passed)))
        found.save({"hardware": facts})
    rows = [row for task in tasks for row in _rows(task, found, labels)]
    passes, notes = verdicts(tasks, rows)
    extra = {
        "tasks": {task.name: {"kind": task.kind, "contexts": told(task)} for task in tasks},
        "rows": as_json(rows), "passes": passes, "notes": notes, "hardware": facts,
    }  # fmt: skip
    found.save(extra)
    return rows, extra


def in_turns(tasks: Sequence[Task]) -> Iterator[tuple[Task, Problem]]:
    """The first context of each task, then the second: a run that is stopped has some of each."""
    for problems in zip_longest(*(task.problems for task in tasks)):
        for task, problem in zip(tasks, problems, strict=True):
            if problem is not None:
                yield task, problem


def _rows(task: Task, found: Found, labels: Sequence[str]) -> list[Row]:
    contexts = [found.of(task, problem) for problem in task.problems]
    return rows_of(task, [one for one in contexts if one is not None], labels)
