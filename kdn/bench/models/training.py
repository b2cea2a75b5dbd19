"""Training for a given time: AdamW under a cosine that ends when the time does.

On a GPU in bfloat16 (weights and their sums stay float32). Compiling is left out: it takes most of
a minute for each model, which is as long as training takes, and saves a third.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdn.bench.models.material import Material
from kdn.bench.models.shapes import Size, new_model, settings_of
from kdn.bench.models.windows import Windows, unigram_nats
from kdn.errors import KdnError

WARMING = 0.04
"""Part of the time in which the rate rises."""
LEAST_RATE = 0.05
"""Of the highest, at the end."""
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
EVERY_S = 5.0
"""Between two lines of progress."""
HELD_OUT_WINDOWS = 16
PASSAGE, NOTICED = 128, 32
"""Tokens that come back at a window's end, and those after which the model should have noticed."""
VERSION = 2
"""Of how models are made: one that was made otherwise is made anew."""
ABOUT = "training.json"

Say = Callable[[str], object]


@dataclass(frozen=True)
class Trained:
    """What became of it. Losses are in nats per token; `unigram` is that of a model which knows
    only how often each token occurs, `new` and `recalled` those of a passage of text kept out when
    it is read first, and far behind it again."""

    made_of: str
    shape: str
    parameters: int
    steps: int
    tokens: int
    seconds: float
    step_s: float
    loss: float
    held_out: float
    unigram: float
    new: float
    recalled: float
    text_tokens: int
    peak_bytes: int


@dataclass(frozen=True)
class Order:
    """A model to be made."""

    shape: str
    seconds: float
    device: torch.device
    seed: int = 0

    def made_of(self, material: Material) -> str:
        """Everything that decides what comes out, but the speed of the machine."""
        size = material.size
        settings = settings_of(self.shape, size) | asdict(size)
        return json.dumps(
            [VERSION, settings, self.seconds, self.seed, material.texts.digest()], sort_keys=True
        )


def trained(
    folder: Path,
    order: Order,
    material: Material,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """The model in `folder`: as it was left there, or trained now. It appears whole."""
    made_of = order.made_of(material)
    if (found := _left_there(folder)) is not None and found.made_of == made_of:
        say(f"{order.shape}: trained before, {folder}")
        return found
    say(f"{order.shape}: {len(material.training):,} tokens to train on")
    torch.manual_seed(order.seed)
    model = new_model(order.shape, material.size).to(order.device)
    size = material.size
    windows = Windows(material.training, size.length, order.seed, swapped=size.swapped)
    kept_out = Windows(material.other, size.length, seed=1, repeating=0)
    told = _Training(model, windows, size, order, say, clock).run()
    if not math.isfinite(told["loss"]):
        raise KdnError(f"{order.shape}: training came to a loss of {told['loss']}")
    new, recalled = recall_losses(model, kept_out)
    about = Trained(
        made_of=made_of,
        shape=order.shape,
        parameters=sum(one.numel() for one in model.parameters()),
        held_out=held_out_loss(model, kept_out),
        unigram=unigram_nats(windows.tokens, kept_out.tokens, size.vocabulary),
        new=new,
        recalled=recalled,
        text_tokens=len(windows.tokens),
        **told,
    )
    say(
        f"{order.shape}: {about.held_out:.2f} nats on text kept out, {about.unigram:.2f} by "
        f"frequencies alone; {about.recalled:.2f} on what came before, {about.new:.2f} there"
    )
    _save(folder, model, material.tokenizer, about)
    return about


def _save(folder: Path, model: Any, tokenizer: Any, about: Trained) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # Rounded once, here: whoever loads it computes with the same weights.
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / ABOUT).write_text(json.dumps(asdict(about), indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _left_there(folder: Path) -> Trained | None:
    try:
        return Trained(**json.loads((folder / ABOUT).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Training:
    def __init__(
        self,
        model: Any,
        windows: Windows,
        size: Size,
        order: Order,
        say: Say,
        clock: Callable[[], float],
    ) -> None:
        self.model, self.windows, self.size = model.train(), windows, size
        self.order, self.say = order, say
        self.device, self.clock = order.device, clock
        decayed = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
            lr=size.rate, betas=BETAS, fused=self.device.type == "cuda",
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        losses = [self._step(0.0)]  # it starts kernels, so it is not timed
        begun = said = self._now()
        while (passed := self._now() - begun) < self.order.seconds:
            losses.append(self._step(passed / self.order.seconds))
            if begun + passed - said >= EVERY_S:
                said = begun + passed
                self._tell(losses, passed)
        seconds = self._now() - begun
        self._tell(losses, seconds)
        count = len(losses)
        return {
            "steps": count,
            "tokens": count * self.size.batch * self.windows.length,
            "seconds": seconds,
            "step_s": seconds / max(1, count - 1),
            "loss": _mean(losses[-20:]),
            "peak_bytes": torch.cuda.max_memory_allocated(self.device)
            if self.device.type == "cuda"
            else 0,
        }

    def _step(self, done: float) -> torch.Tensor:
        for group in self.optimiser.param_groups:
            group["lr"] = self.size.rate * rate_at(done)
        batch = torch.from_numpy(self.windows.draw(self.size.batch)).to(self.device)
        loss = loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def _now(self) -> float:
        """When everything so far is computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _tell(self, losses: list[torch.Tensor], passed: float) -> None:
        count = max(1, len(losses) - 1)
        speed = count * self.size.batch * self.windows.length / max(passed, 1e-9)
        self.say(
            f"{self.order.shape}: step {len(losses)}, loss {_mean(losses[-20:]):.3f}, "
            f"{1000 * passed / count:.0f} ms a step, {speed:,.0f} tokens/s, about "
            f"{max(0.0, self.order.seconds - passed):.0f} s left"
        )


def rate_at(done: float) -> float:
    """Part of the highest rate, when that part of the time is over."""
    if done < WARMING:
        return 0.02 + 0.98 * done / WARMING
    falling = (min(done, 1.0) - WARMING) / (1 - WARMING)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * falling))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens but the first of each window."""
    with _precision(batch.device):
        logits = model(batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Any, windows: Windows) -> float:
    model.eval()
    device = next(model.parameters()).device
    losses = [
        loss_of(model, torch.from_numpy(windows.draw(1)).to(device))
        for _ in range(HELD_OUT_WINDOWS)
    ]
    return _mean(losses)


@torch.no_grad()
def recall_losses(model: Any, windows: Windows) -> tuple[float, float]:
    """Of the same tokens, at a window's beginning and at its end: a model that looks back knows
    them by then."""
    model.eval()
    device = next(model.parameters()).device
    passage = min(PASSAGE, windows.length // 4)
    scored = slice(passage * NOTICED // PASSAGE, passage)
    first, again = [], []
    for _ in range(HELD_OUT_WINDOWS):
        batch = torch.from_numpy(windows.draw(1)).to(device)
        batch[:, -passage:] = batch[:, 1 : 1 + passage]
        with _precision(device):
            logits = model(batch[:, :-1], use_cache=False).logits[0].float()
        nats = torch.nn.functional.cross_entropy(logits, batch[0, 1:], reduction="none")
        first.append(nats[:passage][scored].mean())
        again.append(nats[-passage:][scored].mean())
    return _mean(first), _mean(again)


def _precision(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


def _mean(losses: list[torch.Tensor]) -> float:
    return float(np.mean([float(loss) for loss in losses]))
