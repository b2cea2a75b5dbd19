"""CacheGen's quantisers: 8-bit anchors, and deltas to them. NumPy, one layer at a time.

The tokens a layer holds are cut into groups of 10. The first of a group is its anchor: 8 bits with
one scale per token over all heads (vector-wise). The others are coded as deltas to the anchor as
the decoder will see it, so errors do not add up, and every token of a group decodes on its own.

A delta symbol is `q + reach` for |q| <= reach; the last symbol of the alphabet is the escape, and
the value itself then travels as a float32 beside the stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kdn.errors import UnsupportedError

GROUP_TOKENS = 10
ANCHOR_REACH = 127
ANCHOR_ALPHABET = 2 * ANCHOR_REACH + 1
MAX_SCALE = np.float32(2.679e36)
"""127 of these are still finite."""

Floats = npt.NDArray[np.float32]
Symbols = npt.NDArray[np.uint8]


def check_finite(values: Floats) -> None:
    if not np.isfinite(values).all():
        raise UnsupportedError("cachegen codes finite values only, found infinity or NaN")


def num_anchors(num_tokens: int) -> int:
    return -(-num_tokens // GROUP_TOKENS)


def is_delta(num_tokens: int) -> npt.NDArray[np.bool_]:
    """Which of these tokens are not anchors."""
    mask: npt.NDArray[np.bool_] = np.arange(num_tokens) % GROUP_TOKENS != 0
    return mask


def escape(reach: int) -> int:
    """The symbol of a delta out of reach: the last one."""
    return 2 * reach + 1


def is_escape(symbols: Symbols, reach: int) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = symbols == escape(reach)
    return mask


def delta_alphabet(reach: int) -> int:
    return escape(reach) + 1


def quantise_anchors(values: Floats) -> tuple[Symbols, Floats]:
    """Symbols [anchors, channels] and scales [anchors] of one layer's tokens [tokens, channels]."""
    anchors = values[::GROUP_TOKENS]
    scales = np.minimum(np.abs(anchors).max(axis=1, initial=0) / np.float32(127), MAX_SCALE)
    divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
    q = np.clip(np.rint(anchors / divisor), -ANCHOR_REACH, ANCHOR_REACH)
    return (q + ANCHOR_REACH).astype(np.uint8), scales


def restore_anchors(symbols: Symbols, scales: Floats) -> Floats:
    """What the decoder makes of them, [anchors, channels]."""
    return (symbols.astype(np.float32) - np.float32(ANCHOR_REACH)) * scales[:, None]


def spread_anchors(anchors: Floats, num_tokens: int) -> Floats:
    """Each token's anchor, [tokens, channels]."""
    return np.repeat(anchors, GROUP_TOKENS, axis=0)[:num_tokens]


def quantise_deltas(deltas: npt.NDArray[np.float64], step: float, reach: int) -> Symbols:
    """Symbols of deltas; the escape where one is out of reach."""
    q = np.rint(deltas / step)
    return np.where(np.abs(q) <= reach, q + reach, escape(reach)).astype(np.uint8)


def restore_deltas(symbols: Symbols, step: np.float32, reach: int) -> Floats:
    """The deltas' values; what it says for an escape is to be replaced."""
    return (symbols.astype(np.float32) - np.float32(reach)) * step
