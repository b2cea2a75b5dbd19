"""What a codec must know of a model: its KV shape, how its keys were rotated, and who it is.

RoPE variants differ only in their frequencies and one amplitude, so a spec holds those numbers
rather than a variant's name and parameters: linear, llama3 and yarn scaling need no code here.
"""

from __future__ import annotations

from dataclasses import dataclass

FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer: channel pairs turn by `position * inv_freq`.

    Only the first `2 * len(inv_freq)` channels turn (partial rotary). The pairs are
    (i, i + rotary_dim / 2), or (2i, 2i + 1) where `interleaved`. `amplitude` multiplies cosine and
    sine (yarn's attention factor).
    """

    inv_freq: tuple[float, ...]
    amplitude: float = 1.0
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class ModelSpec:
    """Shape and identity of a model's KV cache. `ropes[l]` is None where layer l has no RoPE;
    `windows[l]` is None where layer l attends to everything. Only layers with keys and values
    count."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    ropes: tuple[RopeSpec | None, ...]
    windows: tuple[int | None, ...]
    fingerprint: bytes
    has_states: bool = False
    """Other layers, or these, keep a state that every token changes (`kdn/cache/states.py`)."""
    max_tokens: int | None = None
    """In longer contexts the keys are turned otherwise than `ropes` says; None: in none."""

    @property
    def has_windows(self) -> bool:
        """Whether any layer attends to its last tokens only."""
        return any(window is not None for window in self.windows)

    @property
    def values_per_token(self) -> int:
        """K and V values one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
