"""Making the profile of a model: `kdn calibrate`. `run.py` tells the order of things."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
) -> Path:
    """Calibrate `model` on text files (or on what every Python carries), with a progress bar, and
    write the profile where `open_codec` finds it, or to `out`. An interrupted run is resumed."""
    import torch
    from rich.console import Console

    from kdn.calibrate.corpus import default_calibration, load_text, windows_of
    from kdn.calibrate.progress import bar
    from kdn.calibrate.run import CalibrationOptions, calibrate
    from kdn.checked import checked_output
    from kdn.codec.profiles import local_profile
    from kdn.engines.models import load_model
    from kdn.engines.transformers import spec_of
    from kdn.files import write_whole

    chosen = options or CalibrationOptions()
    if out is not None:
        checked_output(out)
    given = [load_text(path) for path in text or ()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded, tokenizer = load_model(model, device=device)
    texts = given or default_calibration()
    windows = windows_of([t.tokens(tokenizer) for t in texts], chosen.window, num_windows)
    target = out or local_profile(spec_of(loaded))
    target.parent.mkdir(parents=True, exist_ok=True)
    with bar() as progress:
        profile = calibrate(
            loaded,
            windows,
            chosen,
            progress=progress,
            checkpoint=target.with_suffix(".partial"),
            source={"texts": [t.name for t in texts]},
        )
    # Meant to be shared: it holds statistics of texts, and who may read it the umask says.
    write_whole(target, profile.to_bytes(), target.with_suffix(".writing"), mode=0o666)
    console = Console()
    console.print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
    for level, expected in enumerate(profile.meta["expected"]):
        console.print(
            f"level {level}: {expected['bits']:.3f} bits a value, "
            f"{16 / expected['bits']:.1f} times under fp16, "
            f"KLD {expected['kld']:.4f}, recall {expected['recall_kld']:.4f}"
        )
    return target
