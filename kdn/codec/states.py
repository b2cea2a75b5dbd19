"""The stream of a state (`kdn/cache/states.py`): every tensor as it is, in the container of chunks.

So stores, nodes, exports and spools treat it as they treat a chunk's: sealed, digested, bounded.

    level 0, group 0, kind 0: the layout, as text
    level 0, group n, kind 1: the bytes of its tensor n, little-endian

A reader knows its model's layout. What has another one, or other sizes, is not decoded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.states import DTYPES, State, StateLayout, StatePart
from kdn.codec.format import NO_PROFILE, Bitstream, CodecId, DType, Section, StreamInfo, write
from kdn.codec.header import Header
from kdn.errors import MismatchError

LAYOUT, TENSOR = 0, 1
"""Kinds of sections."""

assert sys.byteorder == "little", "tensors are stored as they lie in memory"


@dataclass(frozen=True)
class StateCodec:
    """States of one model. `chunk` is always the state's own (`StateLayout.chunk_of`)."""

    spec: ModelSpec
    layout: StateLayout
    codec_id: ClassVar[CodecId] = CodecId.STATE
    profile_id: ClassVar[bytes] = NO_PROFILE
    num_levels: ClassVar[int] = 1
    windowed_from: ClassVar[int | None] = None

    def encode(self, chunk: Chunk, state: State) -> bytes:
        if state.layout != self.layout:
            raise MismatchError("expected a state of this model, found one of another layout")
        info = StreamInfo.for_chunk(
            chunk, self.spec, codec=self.codec_id, dtype=DType.FLOAT32, num_levels=1
        )
        sections = [Section(0, LAYOUT, 0, self.layout.described)]
        sections += [Section(0, TENSOR, n, _bytes_of(one)) for n, one in enumerate(state.tensors)]
        return write(info, sections, chunk.seal_key)

    def fits(self, header: Header) -> bool:
        """Whether a stream with this header has sections of the right sizes: asked before memory is
        taken for them."""
        expected = [(LAYOUT, 0, len(self.layout.described))]
        expected += [(TENSOR, n, one.size_bytes) for n, one in enumerate(self.layout.parts)]
        found = [(one.kind, one.group, one.length) for one in header.entries]
        return sorted(found) == sorted(expected)

    def decode(self, stream: Bitstream, chunk: Chunk) -> State:
        """In memory of its own."""
        stream.check_for(chunk, self.spec, self.profile_id, self.codec_id)
        if not self.fits(stream.header):
            raise MismatchError("expected a state of this model, found one of other sizes")
        if stream.section(0, 0, LAYOUT) != self.layout.described:
            raise MismatchError("expected a state of this model, found one of another layout")
        parts = enumerate(self.layout.parts)
        return State(
            self.layout, tuple(_tensor(stream.section(0, n, TENSOR), one) for n, one in parts)
        )


def _tensor(data: memoryview, part: StatePart) -> torch.Tensor:
    if not data:
        return torch.empty(part.shape, dtype=DTYPES[part.dtype])
    flat = torch.frombuffer(bytearray(data), dtype=DTYPES[part.dtype])
    return flat.reshape(part.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data
