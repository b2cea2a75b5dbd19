"""What one request wants: None where the client's own setting holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kdn.checked import checked_deadline, checked_function
from kdn.delivery.request import OnProgress
from kdn.engines.generating import Sampling
from kdn.session.quality import Quality, enough_kld


@dataclass(frozen=True)
class Options:
    quality: Quality | None = None
    deadline_s: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        if self.quality is not None:
            enough_kld(self.quality)
        checked_deadline(self.deadline_s)
        checked_function("on_progress", self.on_progress)
