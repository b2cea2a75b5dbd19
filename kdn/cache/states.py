"""The state of a model's recurrent layers after some token: which tensors it has, and of what kind.

A layer of Mamba or of Gated DeltaNet keeps no keys and values of each token but a state that every
token changes. It belongs to a number of tokens, as a chunk does, but not to a part of a context: it
is the whole context so far. So it is stored beside chunks, where they end, as an object of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import torch

from kdn.cache.keys import KEY_BYTES, Chunk
from kdn.errors import MismatchError, UnsupportedError
from kdn.protocol.limits import MAX_CHUNK_BYTES

MAX_STATE_BYTES = MAX_CHUNK_BYTES - (1 << 20)
"""What places take, without the header."""
MAX_PARTS = 4096

DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


class StatePart(NamedTuple):
    """One tensor of a state."""

    layer: int
    """Of the model's layers."""
    kind: str
    """What it is there: "conv" (the last inputs of a convolution) or "recurrent"."""
    number: int
    """Of the layer's tensors of this kind."""
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def described(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.layer} {self.kind} {self.number} {self.dtype} {sizes}\n"


@dataclass(frozen=True)
class StateLayout:
    """All tensors of one model's state, by layer, kind and number."""

    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        unknown = sorted({one.dtype for one in self.parts} - set(DTYPES))
        if unknown:
            raise UnsupportedError(f"states of {unknown[0]} are not supported")
        if self.size_bytes > MAX_STATE_BYTES or len(self.parts) > MAX_PARTS:
            raise UnsupportedError(
                f"this model's states have {self.size_bytes} bytes in {len(self.parts)} tensors; "
                f"at most {MAX_STATE_BYTES} in {MAX_PARTS} are supported"
            )

    @cached_property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.parts)

    @cached_property
    def described(self) -> bytes:
        """A line of text for each tensor: equal for equal layouts, and for no others."""
        return "".join(one.described for one in self.parts).encode()

    def chunk_of(self, chunk: Chunk) -> Chunk:
        """Under which the state after `chunk` is stored: tokens and place are the chunk's, the key
        is one of its own. States of other kinds, of another dtype for instance, have others."""
        digest = blake2b(key=chunk.seal_key, digest_size=KEY_BYTES, person=b"kdn-state")
        digest.update(chunk.key)
        digest.update(self.described)
        own = digest.digest()
        return Chunk(own, chunk.key, chunk.start, chunk.tokens, chunk.history, chunk.seal_key)


@dataclass(frozen=True)
class State:
    """After so many tokens as whoever has it knows. Its tensors are nobody else's."""

    layout: StateLayout
    tensors: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        found = [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in self.tensors]
        if found != [(one.shape, one.dtype) for one in self.layout.parts]:
            raise MismatchError("expected tensors as the layout has them, of one sequence")
