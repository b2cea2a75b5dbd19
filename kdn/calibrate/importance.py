"""How much a token's errors matter, predicted from its values.

Some tokens are read far more than others. The encoder cannot know who will read a token, but a
linear function of its values predicts part of it. With predicted importance w, squared steps are
best made proportional to 1 / w; the fit therefore aims at the mean of w (a Gamma regression with a
log link), not at the mean of its logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEPS = 1500
BATCH_TOKENS = 4096
LEARNING_RATE = 1e-4
CHECKED_EVERY, PATIENCE = 50, 200
"""Steps between checks on tokens kept out, and steps without any gain until the fit ends."""
CHECKED_TOKENS = 8192
SAMPLE_VALUES = 1 << 28
"""At most this many values are used for means and deviations: 1 GB."""
TRUSTED = 0.45
"""Of what is predicted, as a power. Steps that follow it wholly, or not at all, take more bytes for
the same divergence (docs/decisions/0013-smaller.md)."""
LARGEST = 50.0
"""Importances are cut at this multiple of the mean: a few larger ones would dominate the fit."""


@dataclass(frozen=True)
class Importance:
    """log importance = columns @ weight + bias, zero on average."""

    weight: torch.Tensor
    bias: float
    gain: float
    """By how much the expected divergence falls at an equal rate if steps follow it wholly, on
    tokens that it was not fitted on, though they decided when it ended."""


def relative(importance: torch.Tensor) -> torch.Tensor:
    """[windows, tokens] of measured importance, relative to what is usual at that position: the
    end of a context is always read more, and an encoder does not know where a context will end."""
    mean = importance.mean(dim=0)[None, None]
    width = min(257, 2 * (importance.shape[1] // 8) + 1)
    smooth = torch.nn.functional.avg_pool1d(
        mean, width, stride=1, padding=width // 2, count_include_pad=False
    )
    return importance / smooth[0]


def fit_importance(columns: torch.Tensor, importance: torch.Tensor) -> Importance:
    """`columns` [tokens, columns] (half precision will do), `importance` [tokens], mean near 1."""
    num_sampled = min(50_000, SAMPLE_VALUES // columns.shape[1])
    sample = columns[:: max(1, len(columns) // num_sampled)].float()
    mean, deviation = sample.mean(dim=0), sample.std(dim=0) + 1e-4
    known = int(0.9 * len(columns))
    kept_out = slice(known, None, -(-(len(columns) - known) // CHECKED_TOKENS))
    true = importance[kept_out].clamp(max=LARGEST)
    generator = torch.Generator(device="cpu").manual_seed(0)
    weight = torch.zeros(columns.shape[1], device=columns.device, requires_grad=True)
    bias = torch.zeros(1, device=columns.device, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=LEARNING_RATE)
    best, best_gain, best_step = weight.detach().clone(), 1.0, 0
    for step in range(STEPS):
        for settings in optimiser.param_groups:
            settings["lr"] = LEARNING_RATE * (1 - step / STEPS)
        pick = torch.randint(0, known, (BATCH_TOKENS,), generator=generator).to(columns.device)
        predicted = ((columns[pick].float() - mean) / deviation) @ weight + bias
        loss = (importance[pick].clamp(max=LARGEST) * torch.exp(-predicted) + predicted).mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % CHECKED_EVERY == CHECKED_EVERY - 1 or step == STEPS - 1:
            # Of few tokens too much is learned: what helps others no more is left.
            gain = _gain(_product(columns[kept_out], weight.detach() / deviation), true)
            if gain > best_gain:
                best, best_gain, best_step = weight.detach().clone(), gain, step
            elif step - best_step >= PATIENCE:
                break
    scaled = TRUSTED * best / deviation
    return Importance(scaled, -float(_product(columns[:known], scaled).mean()), best_gain)


def _product(columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float32, some tokens at a time."""
    parts = [columns[at : at + BATCH_TOKENS] for at in range(0, len(columns), BATCH_TOKENS)]
    return torch.cat([part.float() @ weight for part in parts])


def _gain(predicted: torch.Tensor, true: torch.Tensor) -> float:
    """From logarithms of importance, up to a constant."""
    centred = predicted - predicted.mean()
    return float(true.mean() / (true * torch.exp(-centred)).mean())
