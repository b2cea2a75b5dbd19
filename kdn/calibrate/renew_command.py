"""`kdn calibrate MODEL --from PROFILE`: from names and files to a renewed profile, and its verdict.

Named by its model, the base can be measured beside the fine-tune, on the same text: then text plays
no part in the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kdn.cache.keys import TokenIds
from kdn.calibrate.base_profile import (
    Point,
    expected_of,
    kept_parts,
    load_base,
    points_of,
    shipped_profile,
)
from kdn.calibrate.corpus import Text, default_calibration, prompt_head, windows_of
from kdn.calibrate.drawing import drawn, open_texts
from kdn.calibrate.loading import load_to_calibrate
from kdn.calibrate.moments import normalised_embeddings
from kdn.calibrate.progress import bar
from kdn.calibrate.renewing import MIN_WINDOWS, Renewed, measure_base, options_for, renew
from kdn.calibrate.run import PROBE_WINDOWS, CalibrationOptions
from kdn.calibrate.self_text import SELF, write_text
from kdn.calibrate.steps import Progress
from kdn.checked import checked_output
from kdn.codec.klt.profile import Profile
from kdn.codec.profiles import find_profile, local_profile
from kdn.defaults import DEVICE
from kdn.engines.device import check_device
from kdn.engines.transformers import spec_of
from kdn.errors import FormatError, UnsupportedError
from kdn.files import write_whole

SHIPPED = "shipped"
DEFAULT_TOKENS = 50_000
"""Read by the fine-tune, where nobody says how many: 17 of the usual contexts."""


def renew_profile(
    model: str,
    base: str,
    *,
    text: Sequence[Path] = (),
    out: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    device: str = DEVICE,
) -> Path:
    """Renew for `model` the profile `base`: a file, `shipped`, or the base model, whose profile is
    found as if it were to be used. It is written where `open_codec` finds it, or to `out`."""
    check_device(device)
    if out is not None:
        checked_output(out)
    given = None if list(text) == [SELF] else open_texts(text, tokens)
    profile = load_base(Path(base)) if _is_file(base) else None
    told = Console(stderr=True)
    loaded, tokenizer = load_to_calibrate(model, device, told)
    spec = spec_of(loaded)
    other: Any = None
    if base == SHIPPED:
        profile = shipped_profile(spec)
    elif profile is None:
        other, profile = _base_model(base, device, told)
    # What cannot be renewed is refused before anything is read.
    kept_parts(profile, spec, normalised_embeddings(loaded))
    with bar(told) as progress:
        windows, names = _windows(loaded, tokenizer, given, options_for(profile), tokens, progress)
        reference = None
        if other is not None:
            progress("measuring the base", 0, 1)
            reference = measure_base(other, profile, windows)
            progress("measuring the base", 1, 1)
            del other
        done = renew(
            loaded,
            profile,
            windows,
            reference=reference,
            progress=progress,
            source={"texts": names},
        )
    shared = set(names) & set(profile.meta.get("calibration", {}).get("texts") or ())
    if shared:
        told.print(
            f"the base was calibrated on {', '.join(sorted(shared))}, too: on other text it may "
            "take more bits than this says; give --text that it has not seen"
        )
    target = out or local_profile(spec)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Meant to be shared: it holds statistics of texts, and who may read it the umask says.
    write_whole(target, done.profile.to_bytes(), target.with_suffix(".writing"), mode=0o666)
    _show(Console(), target, done, reference or expected_of(profile))
    return target


def _is_file(base: str) -> bool:
    """Whether it names a profile's file rather than a model: a file that is missing is no model."""
    path = Path(base)
    try:
        return base != SHIPPED and (path.suffix == ".safetensors" or path.is_file())
    except OSError as error:  # as where the name is too long for any file
        raise FormatError(f"--from: expected a profile or a model: {error.strerror}") from None


def _windows(
    model: Any,
    tokenizer: Any,
    given: Sequence[Text] | None,
    options: CalibrationOptions,
    tokens: int,
    progress: Progress,
) -> tuple[list[TokenIds], list[str]]:
    """Windows of the texts given, or of what every Python carries; None: the model writes them. And
    what their texts are called."""
    head, length = prompt_head(tokenizer), options.window
    count = max(MIN_WINDOWS, PROBE_WINDOWS + -(-tokens // options.context))
    if given is None:
        written = write_text(
            model, tokenizer, length - len(head), count, head=head, progress=progress
        )
        return windows_of(written.windows, length, count, head=head), [str(SELF)]
    texts = given or default_calibration()
    bodies = drawn(texts, tokenizer, count * length)
    return windows_of(bodies, length, count, head=head), [one.name for one in texts]


def _base_model(name: str, device: str, told: Console) -> tuple[Any, Profile]:
    model, _ = load_to_calibrate(name, device, told)
    profile = find_profile(spec_of(model))
    if profile is None:
        raise UnsupportedError(
            f"no klt profile of the base model {name!r} is here: make one with `kdn calibrate "
            f"{name}`, or name its file"
        )
    return model, profile


def _show(console: Console, target: Path, done: Renewed, base: Sequence[Point]) -> None:
    console.print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
    found = points_of(done.profile.meta["expected"])
    for level, (own, other) in enumerate(zip(found, base, strict=True)):
        console.print(
            f"level {level}: {own.bits:.3f} bits a value, KLD {own.kld:.4f} "
            f"(base: {other.bits:.3f} bits, KLD {other.kld:.4f})"
        )
    console.print(done.verdict.reason)
