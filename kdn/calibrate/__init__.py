"""Making the profile of a model: `kdn calibrate`. `run.py` tells the order of things."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdn.calibrate.run import CalibrationOptions

__all__ = ["make_profile"]


def make_profile(
    model: str,
    *,
    text: list[Path] | None = None,
    out: Path | None = None,
    options: CalibrationOptions | None = None,
    num_windows: int = 48,
    json: Path | None = None,
    plot: Path | None = None,
) -> Path:
    """Calibrate `model` on text files (or on what every Python carries; `self`: on what the model
    writes itself), with a progress bar, and write the profile where `open_codec` finds it, or to
    `out`. An interrupted run is resumed. It ends with a report: also as JSON, and as a plot."""
    import torch
    from rich.console import Console

    from kdn.calibrate.corpus import default_calibration, load_text, prompt_head, windows_of
    from kdn.calibrate.progress import bar
    from kdn.calibrate.report import KEPT_WINDOWS, keep_out, make_report
    from kdn.calibrate.report_text import show_report
    from kdn.calibrate.run import CalibrationOptions, calibrate
    from kdn.calibrate.self_text import SELF, write_text
    from kdn.checked import checked_output, checked_plot
    from kdn.codec.profiles import local_profile
    from kdn.engines.models import load_model
    from kdn.engines.transformers import spec_of
    from kdn.files import write_whole

    chosen = options or CalibrationOptions()
    for path in (out, json):
        if path is not None:
            checked_output(path)
    if plot is not None:
        checked_plot(plot)
    is_own = text == [SELF]
    given = [load_text(path) for path in text or ()] if not is_own else []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded, tokenizer = load_model(model, device=device)
    head = prompt_head(tokenizer)
    target = out or local_profile(spec_of(loaded))
    target.parent.mkdir(parents=True, exist_ok=True)
    count = num_windows + KEPT_WINDOWS
    source: dict[str, Any]
    with bar() as progress:
        if is_own:
            length = chosen.window - len(head)
            written = write_text(loaded, tokenizer, length, count, head=head, progress=progress)
            bodies = written.windows
            source = {"texts": [str(SELF)], "dropped_windows": written.dropped}
        else:
            texts = given or default_calibration()
            bodies = [t.tokens(tokenizer) for t in texts]
            source = {"texts": [t.name for t in texts]}
        windows, kept_out = keep_out(windows_of(bodies, chosen.window, count, head=head))
        profile = calibrate(
            loaded,
            windows,
            chosen,
            progress=progress,
            checkpoint=target.with_suffix(".partial"),
            source=source,
        )
        # Meant to be shared: it holds statistics of texts, and who may read it the umask says.
        write_whole(target, profile.to_bytes(), target.with_suffix(".writing"), mode=0o666)
        report = make_report(
            loaded, profile, learnt=windows, kept_out=kept_out, context=chosen.context,
            progress=progress,
        )  # fmt: skip
    if is_own:
        Console().print(f"{written.dropped} windows repeated themselves and were dropped")
    Console().print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
    show_report(report, json=json, plot=plot)
    return target
