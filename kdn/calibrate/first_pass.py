"""Pass one over all windows: it takes most of the time, so it can be stopped and resumed.

Sums are written down now and then, together with a digest of everything they depend on. After a
kill the next run of the same calibration goes on from there. What is written down is read with
care: it may be cut short or belong to something else, and then reading begins anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from kdn.calibrate.moments import Moments
from kdn.calibrate.steps import Progress

logger = logging.getLogger(__name__)

CHECKPOINT_S = 120.0
CHECKPOINT_SHARE = 0.05
"""The share of the time that saving sums may take: those of large models have many gigabytes."""


@dataclass(frozen=True)
class FirstPass:
    """`add(sums, index)` reads one window into the sums."""

    add: Callable[[Moments, int], None]
    num_windows: int
    digest: bytes
    checkpoint: Path | None
    progress: Progress
    stop_after: Callable[[int], bool] = lambda _: False
    """Told how many windows have been read: whether that is enough, as the time is used up."""

    def run(self, sums: Moments) -> None:
        """`sums.num_windows` says how many were read."""
        self._resume(sums)
        due = time.monotonic() + CHECKPOINT_S
        for index in range(sums.num_windows, self.num_windows):
            if self.stop_after(index):
                break
            self.progress("reading", index, self.num_windows)
            self.add(sums, index)
            if time.monotonic() >= due:
                due = time.monotonic() + max(CHECKPOINT_S, self._save(sums) / CHECKPOINT_SHARE)
        self.progress("reading", sums.num_windows, sums.num_windows)
        self._save(sums)

    def _save(self, sums: Moments) -> float:
        """How long it took."""
        begin = time.monotonic()
        if self.checkpoint is not None:
            named = {name: one.cpu().contiguous() for name, one in sums.tensors().items()}
            aside = self.checkpoint.with_name(self.checkpoint.name + ".writing")
            try:
                save_file(named | {"digest": torch.tensor(list(self.digest))}, aside)
                aside.replace(self.checkpoint)
            except (OSError, SafetensorError) as error:  # as where the disk is full
                logger.warning("%s: a kill will cost all that was read: %s", self.checkpoint, error)
                aside.unlink(missing_ok=True)
        return time.monotonic() - begin

    def _resume(self, sums: Moments) -> None:
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        try:
            with safe_open(self.checkpoint, "pt") as file:
                told = file.get_tensor("digest").flatten().tolist()
            if told == list(self.digest):
                sums.restore(load_file(self.checkpoint))
        except (SafetensorError, OSError, KeyError, RuntimeError, ValueError):
            return  # cut short, or not ours


def until(seconds: float | None, least_windows: int) -> Callable[[int], bool]:
    """Stops when so much time has passed from now on, though not before `least_windows`."""
    end = None if seconds is None else time.monotonic() + seconds
    return lambda read: end is not None and read >= least_windows and time.monotonic() >= end
