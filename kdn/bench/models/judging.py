"""What kdn does with a trained model: calibrated cold, handed over exactly, measured on other text.

`kdn calibrate` itself is run, with nothing but text of the model's kind, and what its report says
is then held against text that neither training nor calibration has seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kdn.bench.models.documents import Split, write_lines
from kdn.bench.models.handover import HandedOver, hand_over
from kdn.bench.models.training import Say
from kdn.cache.keys import TokenIds
from kdn.calibrate import command
from kdn.calibrate.corpus import Text, prompt_head, windows_of
from kdn.calibrate.loading import load_to_calibrate
from kdn.calibrate.moments import PASSAGE_TOKENS
from kdn.calibrate.report import make_report
from kdn.codec.klt import Profile
from kdn.engines.models import load_model

LEAST_RATIO, LEAST_SPEED, MOST_OFF = 20.0, 16.0, 0.25
"""What must be shown: ratio at quality, prefill over decoding, and by how much the KLD on other
text may differ from the report's."""
OTHER_WINDOWS, EXACT_WINDOWS, SPEED_WINDOWS = 24, 2, 2
ALL_WINDOWS = 100_000
JUDGED = "judged"
"""A folder in the model's own: there, engines would take a profile for some of its weights."""
PROFILE, REPORT, PLOT = (
    f"{JUDGED}/{name}" for name in ("profile.safetensors", "calibration.json", "calibration.png")
)


@dataclass(frozen=True)
class Judged:
    """Of one model. `calibrated` and `other` are reports: on text kept out of calibration, and on
    other documents. `on_cpu` is how many times faster decoding is than prefill there."""

    calibrated: dict[str, Any]
    other: dict[str, Any]
    on_cpu: float
    handed_over: HandedOver
    calibrate_s: float

    @property
    def ratio(self) -> float:
        return float(self.other["figures"]["ratio_at_quality"])

    @property
    def on_device(self) -> float:
        return float(self.other["figures"]["prefill_over_decode"])

    @property
    def expected_kld(self) -> float:
        """What the report says of the level that the default quality fetches."""
        return float(self.calibrated["figures"]["kld"])

    @property
    def measured_kld(self) -> float:
        level = self.calibrated["default_level"]
        return float(self.other["levels"][level]["kld"])

    @property
    def off(self) -> float:
        """Part by which what is measured differs from what was expected."""
        return self.measured_kld / max(self.expected_kld, 1e-12) - 1

    def passes(self) -> dict[str, bool]:
        return {
            f"ratio at quality at least {LEAST_RATIO:g}": self.ratio >= LEAST_RATIO,
            f"decoding at most 1/{LEAST_SPEED:g} of prefill": max(self.on_cpu, self.on_device)
            >= LEAST_SPEED,
            f"KLD within {MOST_OFF:.0%} of the report's": abs(self.off) <= MOST_OFF,
            "exact token for token": self.handed_over.is_exact,
        }

    def as_json(self) -> dict[str, Any]:
        own = ("ratio", "on_device", "on_cpu", "expected_kld", "measured_kld", "off")
        return asdict(self) | {name: getattr(self, name) for name in own}


def judge(
    folder: Path, texts: Split, device: str, say: Say, *, tokens: int, minutes: float | None = None
) -> Judged:
    """The model in `folder`. Its profile and the report stay there, and are taken again."""
    calibrated, calibrate_s = _calibrated(folder, texts, device, tokens, minutes)
    told = Console(stderr=True)
    model, tokenizer = load_to_calibrate(str(folder), device, told)
    profile = Profile.load(folder / PROFILE)
    context = int(calibrated["context"])
    say(f"{folder.name}: measuring on other text")
    other = _windows(texts.other, tokenizer, calibrated, OTHER_WINDOWS)
    learnt = _windows(texts.calibration, tokenizer, calibrated, ALL_WINDOWS)
    report = make_report(model, profile, learnt=learnt, kept_out=other, context=context)
    plain, _ = load_model(folder, dtype=torch.float32, device=model.device)
    say(f"{folder.name}: handing over")
    exact = hand_over(model, plain, tokenizer, other[:EXACT_WINDOWS], context)
    on_cpu = report.figures.prefill_over_decode
    if model.device.type != "cpu":
        own, _ = load_to_calibrate(str(folder), "cpu", told)
        few = other[:SPEED_WINDOWS]
        found = make_report(own, profile, learnt=learnt, kept_out=few, context=context)
        on_cpu = found.figures.prefill_over_decode
    return Judged(calibrated, report.as_json(), on_cpu, exact, calibrate_s)


def _calibrated(
    folder: Path, texts: Split, device: str, tokens: int, minutes: float | None
) -> tuple[dict[str, Any], float]:
    """What `kdn calibrate` reported and the seconds that it took, now or before if the same was
    asked for."""
    report, asked_for = folder / REPORT, folder / JUDGED / "asked.json"
    asked = [tokens, minutes, device, texts.digest()]
    if (folder / PROFILE).exists() and report.exists() and asked_for.exists():
        before = json.loads(asked_for.read_text())
        if before["asked"] == asked:
            return json.loads(report.read_text()), float(before["calibrate_s"])
    (folder / JUDGED).mkdir(exist_ok=True)
    text = write_lines(folder / JUDGED / "calibration.jsonl", texts.calibration)
    begun = time.monotonic()
    command.run(
        command.Request(
            model=str(folder), text=[text], out=folder / PROFILE, tokens=tokens, minutes=minutes,
            device=device, json=report, plot=folder / PLOT if find_spec("matplotlib") else None,
        )
    )  # fmt: skip
    calibrate_s = time.monotonic() - begun
    asked_for.write_text(json.dumps({"asked": asked, "calibrate_s": calibrate_s}))
    return json.loads(report.read_text()), calibrate_s


def _windows(
    texts: Sequence[Text], tokenizer: Any, calibrated: dict[str, Any], count: int
) -> list[TokenIds]:
    """As calibration cuts them: all documents one after the other."""
    whole = Text("documents", "\n\n".join(text.content for text in texts))
    length = int(calibrated["context"]) + PASSAGE_TOKENS
    head = prompt_head(tokenizer)
    return windows_of([whole.tokens(tokenizer)], length, count, seed=1, head=head)
