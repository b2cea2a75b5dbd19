"""`kdn calibrate`: from a model's name and some text to a profile in its place, and a report.

Everything that must be chosen is chosen here: where the model runs and in what precision
(`loading.py`), how long contexts are, how much text is read (`drawing.py`), and the profile's sizes
(`sizes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kdn.cache.keys import CHUNK_TOKENS, TokenIds
from kdn.calibrate.corpus import Text, default_calibration, prompt_head, windows_of
from kdn.calibrate.drawing import drawn, open_texts
from kdn.calibrate.loading import load_to_calibrate
from kdn.calibrate.moments import PASSAGE_TOKENS
from kdn.calibrate.progress import bar
from kdn.calibrate.report import KEPT_WINDOWS, keep_out, kept_windows, make_report
from kdn.calibrate.report_text import show_report
from kdn.calibrate.run import LEAST_WINDOWS, PROBE_WINDOWS, CalibrationOptions, calibrate
from kdn.calibrate.self_text import SELF, USUAL, Manner, write_text
from kdn.calibrate.sizes import Shape, chosen_sizes, free_memory, shape_of
from kdn.calibrate.steps import Progress
from kdn.checked import MAX_COUNT, checked_count, checked_number, checked_output, checked_plot
from kdn.codec.profiles import local_profile
from kdn.defaults import DEVICE
from kdn.engines.device import check_device
from kdn.engines.refusals import longest_text
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from kdn.files import write_whole

DEFAULT_TOKENS = 500_000
"""Read at most, where nobody says how many. What less text there is is all read."""
LEAST_CONTEXT = 512
LARGE_WEIGHTS = 8_000_000_000
"""Of a model that takes its time on a GPU."""
MOST_GRADIENTS = 1000
MAX_MINUTES = 7 * 24 * 60.0


@dataclass(frozen=True)
class Request:
    """What the user asked for; None where the command chooses by itself."""

    model: str
    text: Sequence[Path] = ()
    out: Path | None = None
    tokens: int | None = None
    minutes: float | None = None
    operations: int | None = None
    device: str = DEVICE
    options: CalibrationOptions | None = None
    json: Path | None = None
    plot: Path | None = None
    manner: Manner = USUAL
    """How the model writes, where it writes its own text."""

    def check(self) -> None:
        """Refuse bad settings now, not after an hour of work."""
        for path in (self.out, self.json):
            if path is not None:
                checked_output(path)
        if self.plot is not None:
            checked_plot(self.plot)
        if self.tokens is not None:
            checked_count("tokens", self.tokens, 1, MAX_COUNT)
        if self.minutes is not None:
            checked_number("time", self.minutes, 0.01, MAX_MINUTES)
        if self.operations is not None:
            checked_count("operations", self.operations, 1, MAX_COUNT)
        check_device(self.device)

    @property
    def writes_itself(self) -> bool:
        return list(self.text) == [SELF]


def run(asked: Request) -> Path:
    """Where the profile is. An interrupted run is resumed by the same command."""
    asked.check()
    texts = [] if asked.writes_itself else open_texts(asked.text, asked.tokens or DEFAULT_TOKENS)
    told = Console(stderr=True)
    model, tokenizer = load_to_calibrate(asked.model, asked.device, told)
    spec = spec_of(model)
    options = asked.options or chosen_options(model, spec, asked.operations)
    target = asked.out or local_profile(spec)
    target.parent.mkdir(parents=True, exist_ok=True)
    with bar(told) as progress:
        kept = kept_windows(model.device, spec.values_per_token)
        windows, options, source = _windows(asked, model, tokenizer, texts, options, kept, progress)
        learnt, kept_out = keep_out(windows, kept)
        _say_plan(told, options, learnt)
        profile = calibrate(
            model,
            learnt,
            options,
            progress=progress,
            checkpoint=target.with_suffix(".partial"),
            source=source,
            time_s=asked.minutes and 60 * asked.minutes,
        )
        # Meant to be shared: it holds statistics of texts, and who may read it the umask says.
        write_whole(target, profile.to_bytes(), target.with_suffix(".writing"), mode=0o666)
        report = make_report(
            model, profile, learnt=learnt, kept_out=kept_out, context=options.context,
            progress=progress,
        )  # fmt: skip
    console, read = Console(), profile.meta["calibration"]["tokens"]
    planned = (len(learnt) - PROBE_WINDOWS) * options.context
    stopped = f" of {planned:,}, as the time was used up" if read < planned else ""
    console.print(f"{target} ({target.stat().st_size / 1e6:.1f} MB), from {read:,} tokens{stopped}")
    show_report(report, json=asked.json, plot=asked.plot)
    return target


def chosen_options(model: Any, spec: Any, operations: int | None = None) -> CalibrationOptions:
    """By the model's shape, its longest context, the memory at hand, and the multiplications that
    decoding a value may take."""
    shape = shape_of(model, spec)
    sizes = chosen_sizes(shape, free_memory(model.device), operations)
    return replace(
        CalibrationOptions(context=longest_context(model.config)),
        gradient_windows=gradient_windows(shape, model.device),
        **asdict(sizes),
    )


def gradient_windows(shape: Shape, device: torch.device) -> int:
    """Where gradients are cheap, more of them: on a GPU as many as take the time of the usual
    number in a large model. A window has two, with other labels, where windows are few."""
    usual = CalibrationOptions.gradient_windows
    if device.type == "cpu":
        return usual
    return max(usual, min(MOST_GRADIENTS, usual * LARGE_WEIGHTS // shape.num_used_weights))


def longest_context(config: Any) -> int:
    """The usual one, or the longest that the model has positions for with what follows it, all
    turned alike."""
    usual, config = CalibrationOptions.context, config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return usual
    positions = min(positions, longest_text(config) or positions)
    longest = min(usual, (positions - PASSAGE_TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS)
    if longest < LEAST_CONTEXT:
        least = LEAST_CONTEXT + PASSAGE_TOKENS
        raise UnsupportedError(
            f"calibration needs a model with at least {least} positions, this one has {positions}"
        )
    return longest


def _windows(
    asked: Request, model: Any, tokenizer: Any, texts: Sequence[Text], options: CalibrationOptions,
    kept: int, progress: Progress,
) -> tuple[list[TokenIds], CalibrationOptions, dict[str, Any]]:  # fmt: skip
    """Windows to calibrate with, and `kept` to report on; how long they are, what they are of."""
    head = prompt_head(tokenizer)
    tokens = asked.tokens or DEFAULT_TOKENS
    count = num_windows(tokens, options.context, kept)
    source: dict[str, Any]
    if asked.writes_itself:
        length = options.window - len(head)
        written = write_text(
            model, tokenizer, length, count, head=head, manner=asked.manner, progress=progress
        )
        windows = windows_of(written.windows, options.window, count, head=head)
        return windows, options, {"texts": [str(SELF)], "dropped_texts": written.dropped}
    texts = texts or default_calibration()
    source = {"texts": [one.name for one in texts]}
    bodies = drawn(texts, tokenizer, count * options.window)
    while True:
        windows = windows_of(
            bodies, options.window, num_windows(tokens, options.context, kept), head=head
        )
        shorter = options.context // 2 // CHUNK_TOKENS * CHUNK_TOKENS
        enough = len(windows) >= num_windows(1, options.context)
        if enough or shorter < LEAST_CONTEXT or asked.options is not None:
            return windows, options, source
        options = replace(options, context=shorter)  # of little text, more contexts


def num_windows(tokens: int, context: int, kept: int = KEPT_WINDOWS) -> int:
    """To read so many tokens, and to measure and report on others."""
    return max(-(-tokens // context), LEAST_WINDOWS) + PROBE_WINDOWS + kept


def _say_plan(told: Console, options: CalibrationOptions, learnt: Sequence[TokenIds]) -> None:
    count = max(0, len(learnt) - PROBE_WINDOWS)
    stages = f", two stages with {options.leading} of a layer" if options.leading else ""
    told.print(
        f"{count} contexts of {options.context} tokens, {count * options.context:,} in all; groups "
        f"of at most {options.group_layers} layers, {options.components} components{stages}"
    )
