"""Pass one over the calibration text: what the fit needs, as sums over tokens.

- second moments of the predictor's inputs, of the values, and between them;
- the Fisher information of the values: how the model's output distribution on a continuation and
  on recalled passages moves with them. With a label drawn from the model's own distribution, the
  gradient of its log-probability is a sample whose outer product has that information as its mean.
  Only what is read after the context counts: the context's own values are fixed when delivered.
  A gradient takes as long as reading the window, and far fewer windows are enough for it.

Sums are per group of layers, so that memory grows with the square of a group, not of a model. The
first tokens of a context (attention sinks) are unlike all others and are summed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.klt.profile import CONTEXT_TOKENS
from kdn.engines.reading import read_whole, state_after
from kdn.engines.spread import placed
from kdn.engines.states import freeze_states, repeat
from kdn.engines.transformers import to_dynamic_cache
from kdn.errors import UnsupportedError

NUM_SINKS = 4
BLOCK_COLUMNS = 2048
PASSAGE_TOKENS = 160
UNSCORED_TOKENS = 32
PASSAGE_STARTS = (0.1, 0.3, 0.5)
# Divergences that matter equally: a continuation is judged more strictly than a recalled passage.
CONTINUATION_KLD, RECALL_KLD = 0.01, 0.05


@dataclass(frozen=True)
class Columns:
    """Where each group's values stand in a token's row (see profile.py). Groups are of layers in
    the profile's order, which `order` names as the model has them; None: the model's own."""

    spec: ModelSpec
    groups: tuple[tuple[int, int], ...]
    order: tuple[int, ...] | None = None

    def slices(self) -> list[slice]:
        width = 2 * self.spec.num_kv_heads * self.spec.head_dim
        return [slice(first * width, last * width) for first, last in self.groups]

    def of(self, cache: KVCache) -> torch.Tensor:
        """[tokens, columns] in float32 with RoPE undone, on the cache's device."""
        keys, values = rope.undo(cache.keys, self.spec, cache.start), cache.values
        if self.order is not None:
            keys, values = keys[list(self.order)], values[list(self.order)]
        parts = []
        for first, last in self.groups:
            for side in (keys[first:last], values[first:last].float()):
                parts.append(side.transpose(0, 1).reshape(cache.num_tokens, -1))
        return torch.cat(parts, dim=1)

    def of_gradient(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Gradients by the cache's values as gradients by the columns: a rotation's transpose is
        its inverse, an amplitude's is itself."""
        amplitude = torch.ones(self.spec.num_layers, 1, 1, 1, device=keys.device)
        reach = torch.ones_like(amplitude)
        for layer, layer_rope in enumerate(self.spec.ropes):
            if layer_rope is not None:
                amplitude[layer] = layer_rope.amplitude**2
            reach[layer] = self._reach(layer, keys.shape[1])
        keys, values = keys.float() * amplitude * reach, values.float() * reach
        return self.of(KVCache(keys, values))

    def _reach(self, layer: int, num_tokens: int) -> float:
        """Layers with a window are read at their last tokens only: all others have no gradient.
        What matters is how much a token's errors count where they are read at all, so the mean
        must be over those; its root, for gradients are squared."""
        window = self.spec.windows[layer]
        held = num_tokens if window is None else max(1, min(window - 1, num_tokens))
        return float(np.sqrt(num_tokens / held))


@dataclass
class Moments:
    """Sums over all windows seen so far; `tensors` names them for a checkpoint."""

    num_tokens: int
    num_windows: int
    num_gradients: int
    """Of how many tokens' values: of those of some windows."""
    features: torch.Tensor
    cross: torch.Tensor
    values: list[torch.Tensor]
    fisher: list[torch.Tensor]
    sinks: torch.Tensor
    sinks_squared: torch.Tensor

    @classmethod
    def zeros(cls, num_features: int, slices: Sequence[slice], device: torch.device) -> Moments:
        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        widths = [s.stop - s.start for s in slices]
        return cls(
            0,
            0,
            0,
            make(num_features, num_features),
            make(num_features, sum(widths)),
            [make(w, w) for w in widths],
            [make(w, w) for w in widths],
            make(NUM_SINKS, sum(widths)),
            make(NUM_SINKS, sum(widths)),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {
            "count": torch.tensor([self.num_tokens, self.num_windows, self.num_gradients]),
            "features": self.features,
            "cross": self.cross,
            "sinks": self.sinks,
            "sinks_squared": self.sinks_squared,
        }
        for index, (values, fisher) in enumerate(zip(self.values, self.fisher, strict=True)):
            named |= {f"values{index}": values, f"fisher{index}": fisher}
        return named

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        """All of it, or nothing: ValueError if these are sums of something else."""
        own = {name: one.shape for name, one in self.tensors().items()}
        if own != {name: saved[name].shape for name in own}:
            raise ValueError("sums of other shapes")
        counts = (int(number) for number in saved["count"])
        self.num_tokens, self.num_windows, self.num_gradients = counts
        for name, tensor in self.tensors().items():
            if name != "count":
                tensor.copy_(saved[name])

    def add_values(self, inputs: torch.Tensor, columns: torch.Tensor, slices: list[slice]) -> None:
        self.sinks += columns[:NUM_SINKS].double()
        self.sinks_squared += columns[:NUM_SINKS].double() ** 2
        inputs, columns = inputs[NUM_SINKS:], columns[NUM_SINKS:]
        self.num_tokens += len(columns)
        self.num_windows += 1
        add_products(self.features, inputs)
        for part in slices:
            self.cross[:, part] += inputs.T @ columns[:, part]
        for total, part in zip(self.values, slices, strict=True):
            add_products(total, columns[:, part])

    def add_fisher(self, gradient: torch.Tensor, slices: list[slice]) -> None:
        if not torch.isfinite(gradient).all():
            raise UnsupportedError(
                "the model's output is not a number somewhere in the calibration text: nothing can "
                "be learned from it; try another dtype or text"
            )
        self.num_gradients += len(gradient) - NUM_SINKS
        for total, part in zip(self.fisher, slices, strict=True):
            add_products(total, gradient[NUM_SINKS:, part])


def add_products(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds rows' rows. The products of one window are taken in float32, and summed in float64:
    GPUs for games are slow in that, and adding is little work. In blocks, so that memory beside the
    sums stays small, and each pair of blocks once: the sum is symmetric."""
    width = rows.shape[1]
    for first in range(0, width, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, width)
        part = rows[:, first:last].T @ rows[:, first:]
        total[first:last, first:] += part
        total[last:, first:last] += part[:, last - first :].T


class Features:
    """Inputs of the predictor: embeddings of a token and of those before it, and a constant."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self._table = codes.float() * scale

    @property
    def count(self) -> int:
        return CONTEXT_TOKENS * self._table.shape[1] + 1

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._table[ids]
        shifted = [rows]
        for back in range(1, CONTEXT_TOKENS):
            shifted.append(torch.cat([torch.zeros_like(rows[:back]), rows[:-back]]))
        return torch.cat([*shifted, rows.new_ones(len(rows), 1)], dim=1)


def embedding_table(model: Any, num_dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token embeddings, each normalised, projected to at most `num_dims` principal components, as
    int8 codes and a scale per dimension."""
    table = normalised_embeddings(model)
    _, directions = torch.linalg.eigh((table.T @ table).double())
    table = table @ directions[:, -num_dims:].flip(1).float()
    scale = table.abs().amax(dim=0).clamp(min=1e-6) / 127
    return torch.round(table / scale).to(torch.int8), scale


def normalised_embeddings(model: Any) -> torch.Tensor:
    """[vocabulary, width] in float32, each of mean square 1."""
    table: torch.Tensor = model.get_input_embeddings().weight.detach().float()
    return table * torch.rsqrt(table.square().mean(dim=-1, keepdim=True) + 1e-6)


def read(model: Any, ids: torch.Tensor) -> KVCache:
    """The complete cache of a window's context."""
    return read_whole(model, ids.cpu().numpy())


def gradient_of(
    model: Any,
    cache: KVCache,
    window: torch.Tensor,
    columns: Columns,
    generator: torch.Generator,
) -> torch.Tensor:
    """A sample of the gradient for the continuation and for recall, scaled by what matters alike.
    Both are added with a random sign: their products vanish on average, so that squares add up as
    if they were apart, for half of the work.

    `window` holds the context's tokens and PASSAGE_TOKENS more."""
    context = cache.num_tokens
    starts = [int(part * context) for part in PASSAGE_STARTS]
    rows = [window[context : context + PASSAGE_TOKENS]]
    rows += [window[start : start + PASSAGE_TOKENS] for start in starts]
    keys = cache.keys.detach().requires_grad_(True)
    values = cache.values.detach().requires_grad_(True)
    state = state_after(model, window[:context].cpu().numpy())
    past = to_dynamic_cache(KVCache(keys, values), model.config, state=state)
    placed(past, model)
    repeat(past, len(rows))
    freeze_states(past)
    logits = model(torch.stack(rows), past_key_values=past, use_cache=True).logits.float()
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, _drawn(log_probs.detach(), generator))[..., 0]
    continued = chosen[0].sum() / np.sqrt(chosen[0].numel() * CONTINUATION_KLD)
    recalled = chosen[1:, UNSCORED_TOKENS:]
    sign = 2 * torch.randint(2, (), generator=generator, device=generator.device) - 1
    loss = continued + sign * recalled.sum() / np.sqrt(recalled.numel() * RECALL_KLD)
    return columns.of_gradient(*torch.autograd.grad(loss, (keys, values)))


def _drawn(log_probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A label [..., 1] from each distribution, where the sum of probabilities passes a random
    number: `torch.multinomial` draws a number per label instead."""
    sums = log_probs.exp().cumsum(dim=-1)
    drawn = torch.rand((*log_probs.shape[:-1], 1), generator=generator, device=log_probs.device)
    return torch.searchsorted(sums, drawn * sums[..., -1:]).clamp(max=log_probs.shape[-1] - 1)
