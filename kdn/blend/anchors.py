"""Anchors: positions that a text has by itself, wherever it comes to stand.

A window of WINDOW tokens is an anchor if a keyed hash of it, and of nothing around it, begins with
zeros: about one in SPACING is. So a text that was moved has the same anchors, and whoever has
another secret finds other ones, or cannot tell where they are.

    windows            hash 16 tokens at every position     doubling: 4 passes over the prompt
    anchors            the hash begins with 5 zero bits     1,024 of 32,768 positions
    keys               a keyed BLAKE2b of the anchor's tokens and whose they are

32,768 tokens take 1 ms on one core of a Xeon, and naming their anchors half of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kdn.cache.keys import KEY_BYTES, Namespace, TokenIds

WINDOW = 16
"""Tokens. A power of two."""
SPACING = 32
"""A power of two. A text of 200 tokens has no anchor once in 350 times, one of 100 once in 15."""

Hashes = npt.NDArray[np.uint64]


def anchors_of(tokens: TokenIds, secret: bytes) -> list[int]:
    """Where anchors begin, in order."""
    hashes = _window_hashes(tokens, secret)
    return np.flatnonzero(hashes < np.uint64((1 << 64) // SPACING)).tolist()


def anchor_keys(tokens: TokenIds, starts: Sequence[int], namespace: Namespace) -> list[bytes]:
    """Names of the anchors that begin there, the same wherever their windows stand."""
    keyed = blake2b(key=namespace.secret, digest_size=KEY_BYTES, person=b"kdn-anchor")
    keyed.update(namespace.root)
    data, size = np.ascontiguousarray(tokens, dtype="<u4").tobytes(), 4
    keys = []
    for start in starts:
        digest = keyed.copy()
        digest.update(data[size * start : size * (start + WINDOW)])
        keys.append(digest.digest())
    return keys


def _window_hashes(tokens: TokenIds, secret: bytes) -> Hashes:
    """A polynomial in a keyed base over keyed tokens, modulo 2**64, of every whole window."""
    if len(tokens) < WINDOW:
        return np.zeros(0, dtype=np.uint64)
    drawn = blake2b(key=secret, digest_size=16, person=b"kdn-anchors").digest()
    mask, base = (int(one) for one in np.frombuffer(drawn, dtype="<u8"))
    base |= 1  # odd: no token of a window is lost
    hashes = _mixed(tokens.astype(np.uint64) ^ np.uint64(mask))
    size = 1
    while size < WINDOW:
        power = np.uint64(pow(base, size, 1 << 64))
        hashes = hashes[:-size] * power + hashes[size:]
        size *= 2
    return _mixed(hashes)


def _mixed(values: Hashes) -> Hashes:
    """Every bit depends on every bit (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
