"""Anchors: positions that a text has by itself, wherever it comes to stand.

Every window of WINDOW tokens has a keyed hash. It is an anchor if its hash is the least among some
REACH neighbouring ones (winnowing). So every text of LEAST tokens has at least one anchor that it
keeps whatever stands around it, and whoever has another secret finds other ones, or cannot tell
where they are.

    hashes      of 16 tokens, at every position          doubling: 4 passes over the prompt
    anchors     the least of 32 neighbours               about 2 of 33 positions
    keys        a keyed BLAKE2b of the anchor's tokens and whose they are

32,768 tokens take 1.6 ms on one core of a Xeon, and naming their anchors as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kdn.cache.keys import KEY_BYTES, Namespace, TokenIds

WINDOW = 16
"""Tokens. A power of two."""
REACH = 32
"""Windows. A power of two."""
LEAST = WINDOW + REACH - 1
"""Tokens of a text that is always found. Shorter ones may be."""

Hashes = npt.NDArray[np.uint64]


def anchors_of(tokens: TokenIds, secret: bytes) -> list[int]:
    """Where anchors begin, in order. Of a text with less than LEAST tokens, one, which may not be
    one any more where the text stands among others."""
    hashes = _window_hashes(tokens, secret)
    if len(hashes) < REACH:
        return [int(hashes.argmin())] if len(hashes) else []
    least = _sliding(hashes, np.minimum)
    # No neighbourhood that a hash is in has a greater minimum than this hash. It is the least of
    # one of them if the greatest of their minima is itself.
    around = np.zeros(REACH - 1, dtype=np.uint64)
    greatest = _sliding(np.concatenate([around, least, around]), np.maximum)
    return np.flatnonzero(hashes == greatest).tolist()


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


def _sliding(values: Hashes, least_or_greatest: np.ufunc) -> Hashes:
    """Of every REACH values that follow each other."""
    size = 1
    while size < REACH:
        values = least_or_greatest(values[:-size], values[size:])
        size *= 2
    return values


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
