"""How large the parts of a profile are, from the shape of a model and the free memory.

The rule, in its order:

1. **Groups of layers** are as wide as they may be, for layers have much in common: at most 8,192
   columns (keys and values of one token in all layers of the group), and so few that the sums of
   calibration fill at most half of the free memory. As few groups as that allows, of equal size
   or one layer apart. Layers with a sliding window are in groups of their own: readers leave them
   out where no continuation reads them.
2. **Components**: 38 % of a group's columns, at most 2,200.
3. **Decoding speed**: the decoder multiplies every column with every component of its group. That
   may be at most a quarter of the weights that the model itself multiplies with each token it
   reads, else loading is no gain; but 256 components are always kept.
4. **Profile size**: at most 2 % of the weights in 16 bits, or 128 MB if that is more. Where it
   would be larger, components, ranks and embedding dimensions shrink together, down to a least of
   each: an eighth of the columns for components, 96 for the others.

SmolLM2-135M gets the sizes of the profile that is shipped for it.

**Few operations.** If the user limits the multiplications per value, groups get two stages where
one would cost more (`two_stage.py`). Groups then have 8 layers even if these have more than 8,192
columns, but at most 16,384. With C components and, of each of L layers with W columns, k leading
ones on average, a value costs k + C k / W beside the precise components, and C is 0.3 L k: on
SmolLM2 at 1,050 multiplications, 0.29 took the fewest bits at a divergence of 0.01, and 0.39 took
2 to 3 % more (decision 0009). Those that are too many to be coded, up to 2,200 in all, still have
their means: a row for a chunk costs nothing. Sections of groups wider than those of one stage are
cut into runs of 256 rows, which a GPU decodes side by side.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.windows import num_unbounded
from kdn.calibrate.fit import PRECISE_LATENTS
from kdn.codec.klt.profile import CONTEXT_TOKENS
from kdn.errors import UnsupportedError

MOST_COLUMNS = 8192
MOST_COMPONENTS = 2200
COMPONENTS_OF_COLUMNS = 2200 / 5760
MOST_COLUMNS_IN_STAGES = 16_384
LAYERS_IN_STAGES = 8
COMPONENTS_OF_LEADING = 0.3
LEADING_STEP = 8
ROWS_OF_RUNS = 256
"""At most 64 runs are found at once, so groups may have 16,384 columns."""
LEAST_COMPONENTS = 256
LEAST_COMPONENTS_OF_COLUMNS = 1 / 8
DECODER_OF_MODEL = 1 / 4
MEMORY_FOR_SUMS = 1 / 2
PROFILE_OF_WEIGHTS = 0.02
LEAST_PROFILE_BYTES = 128_000_000
LEAST_RANK = 96
SUM_BYTES = 8
"""Sums are float64."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides the sizes."""

    num_layers: int
    layer_columns: int
    """Keys and values of one token in one layer."""
    vocab_size: int
    hidden_size: int
    num_weights: int
    """All of them; each is a fingerprint's and a file's, in 16 bits."""
    num_used_weights: int
    """Those that a token is multiplied with while a context is read: no embeddings, no other
    experts."""
    num_windowed: int = 0
    """Layers with a sliding window."""

    def groups(self, most_layers: int) -> tuple[tuple[int, int], ...]:
        """Of its layers, those with a window last."""
        return layer_groups(self.num_layers, most_layers, self.num_windowed)

    @property
    def columns(self) -> int:
        return self.num_layers * self.layer_columns


@dataclass(frozen=True)
class Sizes:
    """Fields of `CalibrationOptions` of the same names."""

    group_layers: int
    components: int
    fine_components: int = 64
    embedding_dims: int = 448
    predictor_rank: int = 256
    metric_rank: int = 384
    mean_components: int = 0
    leading: int = 0
    run_rows: int = 0


def shape_of(model: Any, spec: ModelSpec) -> Shape:
    """Experts beside those that each token goes through are left out by their share."""
    config = model.config.get_text_config(decoder=True)
    table = model.get_input_embeddings().weight
    total = sum(one.numel() for one in model.parameters())
    outside = sum(
        one.weight.numel()
        for one in {model.get_input_embeddings(), model.get_output_embeddings()}
        if one is not None
    )
    if model.get_output_embeddings() is not None and _are_tied(model):
        outside -= table.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    every = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    used = getattr(config, "num_experts_per_tok", None)
    idle = int(experts * (1 - used / every)) if experts and every and used else 0
    return Shape(
        spec.num_layers, 2 * spec.num_kv_heads * spec.head_dim, table.shape[0], table.shape[1],
        total, total - outside - idle, spec.num_layers - num_unbounded(spec),
    )  # fmt: skip


def _are_tied(model: Any) -> bool:
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return inputs is outputs or inputs.data_ptr() == outputs.data_ptr()


def chosen_sizes(shape: Shape, memory_bytes: int, operations: int | None = None) -> Sizes:
    """By the rule above; `memory_bytes` are free where the sums will lie. `operations`:
    multiplications that decoding a value may take."""
    sizes = _in_one_stage(shape, memory_bytes)
    if operations is None or sizes.components <= operations:
        return sizes
    return _in_two_stages(shape, memory_bytes, operations)


def _in_one_stage(shape: Shape, memory_bytes: int) -> Sizes:
    group_layers = _even_layers(shape, _most_layers(shape, memory_bytes, MOST_COLUMNS))
    columns = group_layers * shape.layer_columns
    fast = int(DECODER_OF_MODEL * shape.num_used_weights / shape.columns)
    wanted = min(MOST_COMPONENTS, round(COMPONENTS_OF_COLUMNS * columns))
    components = max(min(wanted, fast), min(LEAST_COMPONENTS, columns))
    sizes = Sizes(group_layers, components)
    return _shrunk(
        shape, replace(sizes, embedding_dims=min(sizes.embedding_dims, shape.hidden_size))
    )


def _in_two_stages(shape: Shape, memory_bytes: int, operations: int) -> Sizes:
    wide = min(MOST_COLUMNS_IN_STAGES, LAYERS_IN_STAGES * shape.layer_columns)
    most = _most_layers(shape, memory_bytes, max(MOST_COLUMNS, wide))
    layers, width = _even_layers(shape, most), shape.layer_columns
    spent = operations - Sizes.fine_components
    if layers < 2 or spent < 2 * LEADING_STEP:
        raise UnsupportedError(
            f"{operations} multiplications a value are too few for this model with the memory at "
            f"hand, groups of {layers} layers of {width} columns: allow more, or free memory"
        )
    # k + 0.3 L k^2 / W is what may be spent.
    grows = COMPONENTS_OF_LEADING * layers / width
    leading = min(width, ((1 + 4 * grows * spent) ** 0.5 - 1) / (2 * grows))
    leading = max(LEADING_STEP, int(leading) // LEADING_STEP * LEADING_STEP)
    coarse = min((spent - leading) * width // leading, layers * leading)
    runs = ROWS_OF_RUNS if layers * width > MOST_COLUMNS else 0
    components = Sizes.fine_components + coarse
    every = min(MOST_COMPONENTS, layers * leading)
    sizes = Sizes(
        layers, components, mean_components=max(0, every - components), leading=leading,
        run_rows=runs,
    )  # fmt: skip
    return _shrunk(
        shape, replace(sizes, embedding_dims=min(sizes.embedding_dims, shape.hidden_size))
    )


def _even_layers(shape: Shape, most_layers: int) -> int:
    """Layers of the largest group, with as few groups as `most_layers` allows."""
    return max(last - first for first, last in shape.groups(most_layers))


def _most_layers(shape: Shape, memory_bytes: int, most_columns: int) -> int:
    by_memory = MEMORY_FOR_SUMS * memory_bytes - _cross_bytes(shape, Sizes.embedding_dims)
    by_memory /= 2 * SUM_BYTES * shape.columns
    most = int(min(most_columns, by_memory) // shape.layer_columns)
    if by_memory < shape.layer_columns:
        needed = sums_bytes(shape, Sizes(1, 0)) / MEMORY_FOR_SUMS
        raise UnsupportedError(
            f"calibrating this model takes at least {needed / 1e9:.1f} GB of free memory beside "
            f"its weights, found {memory_bytes / 1e9:.1f} GB: free some, or use another device"
        )
    return max(1, most)


def _shrunk(shape: Shape, sizes: Sizes) -> Sizes:
    limit = max(LEAST_PROFILE_BYTES, int(PROFILE_OF_WEIGHTS * 2 * shape.num_weights))
    columns = sizes.group_layers * shape.layer_columns
    least = min(sizes.components, max(LEAST_COMPONENTS, int(LEAST_COMPONENTS_OF_COLUMNS * columns)))
    found = sizes
    for percent in range(99, 0, -1):
        if profile_bytes(shape, found) <= limit:
            break
        found = replace(
            sizes,
            components=max(least, sizes.components * percent // 100),
            mean_components=sizes.mean_components * percent // 100,
            embedding_dims=_part(sizes.embedding_dims, percent),
            predictor_rank=_part(sizes.predictor_rank, percent),
            metric_rank=_part(sizes.metric_rank, percent),
        )
    return found


def _part(rank: int, percent: int) -> int:
    return max(min(LEAST_RANK, rank), rank * percent // 100)


def layer_groups(
    num_layers: int, most_layers: int, num_windowed: int = 0
) -> tuple[tuple[int, int], ...]:
    """As few groups [first, last) as that allows, all of one size or one layer apart. The last
    `num_windowed` layers have groups of their own."""
    border, ends = num_layers - num_windowed, [0]
    for first, last in ((0, border), (border, num_layers)):
        count = -(-(last - first) // max(1, most_layers))
        ends += [first + (last - first) * (index + 1) // count for index in range(count)]
    return tuple(pairwise(ends))


def profile_bytes(shape: Shape, sizes: Sizes) -> int:
    """About how large the profile will be: its tensors that grow with a model (profile.py)."""
    total = 0
    for first, last in shape.groups(sizes.group_layers):
        columns = (last - first) * shape.layer_columns
        components = min(sizes.components + sizes.mean_components, columns)
        fine = min(sizes.fine_components, components)
        inner = min((last - first) * sizes.leading, columns)
        total += 2 * columns * fine + 5 * components  # precise rows, scales of all
        total += (components - fine) * (inner or columns)
        total += inner * (shape.layer_columns + 4)  # rows of layers, in two stages
        total += columns * 2 * min(sizes.metric_rank, columns)
    total += shape.vocab_size * sizes.embedding_dims
    total += CONTEXT_TOKENS * sizes.embedding_dims * sizes.predictor_rank
    # Predictor, and per column: bias, steps, scales, weight, importance, first tokens.
    return total + shape.columns * (sizes.predictor_rank + PRECISE_LATENTS + 4 * 6 + 2 + 8)


def sums_bytes(shape: Shape, sizes: Sizes) -> int:
    """Memory of the sums that the first pass takes."""
    groups = shape.groups(sizes.group_layers)
    widths = [(last - first) * shape.layer_columns for first, last in groups]
    return 2 * SUM_BYTES * sum(w * w for w in widths) + _cross_bytes(shape, sizes.embedding_dims)


def _cross_bytes(shape: Shape, dims: int) -> int:
    inputs = CONTEXT_TOKENS * min(dims, shape.hidden_size) + 1
    return SUM_BYTES * inputs * (inputs + shape.columns)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be used there."""
    if device.type == "cuda":
        from kdn.engines.device import free_bytes

        return free_bytes(device)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 8 << 30
