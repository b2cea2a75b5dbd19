"""What one request wants: None where the client's own setting holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kdn.client.quality import Quality
from kdn.delivery.request import OnProgress
from kdn.engines.generating import Sampling


@dataclass(frozen=True)
class Options:
    quality: Quality | None = None
    deadline_s: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    on_progress: OnProgress | None = None
