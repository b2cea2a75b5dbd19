"""What the GPU decoder's kernels find, before anything is made of it: integers, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.codec.klt.kinds import KIND_TOKENS
from tests.codec import klt_reference


class Planes:
    """Those of a decoder's next decoding, of one slab."""

    def __init__(self, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._components: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._errors: list[tuple[int, Any]] = []
        planes, errors = decoder.planes, decoder._correction.decode

        def keep_components(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self._components.append(planes(*arguments))
            return self._components[-1]

        def keep_errors(slab: Any, batch: tuple[int, int], *rest: Any) -> Any:
            found = errors(slab, batch, *rest)
            self._errors.append((batch[0], found))
            return found

        monkeypatch.setattr(decoder, "planes", keep_components)
        monkeypatch.setattr(decoder, "_borrowed", lambda *_: None)
        monkeypatch.setattr(decoder._correction, "decode", keep_errors)

    def check(
        self, codec: KltCodec, streams: Sequence[Bitstream], chunks: Sequence[Chunk], levels: int
    ) -> None:
        """That all integers of so many levels are the reference's."""
        ((low, high),) = self._components
        parts = min(levels, codec.num_levels - 1)
        for index, (stream, chunk) in enumerate(zip(streams, chunks, strict=True)):
            for g in range(len(codec.profile.groups)):
                wanted = klt_reference.integers(codec, stream, chunk, g, parts)
                found = _joined(low[index, g], high[index, g])
                assert np.array_equal(found[: len(wanted), : chunk.num_tokens], wanted)
            if levels == codec.num_levels:
                self._check_errors(codec, stream, chunk, index)

    def _check_errors(self, codec: KltCodec, stream: Bitstream, chunk: Chunk, index: int) -> None:
        classes = codec.coder.decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
        done = 0
        for first, errors in self._errors:
            for g in range(first, first + errors.low.shape[1]):
                _, wanted = codec.coder.decode(stream, g, codec.num_levels, classes)
                assert wanted is not None
                own = index, g - first
                found = _joined(errors.low[own], errors.high[own])
                assert np.array_equal(found[: len(wanted), : chunk.num_tokens], wanted)
                done += 1
        assert done == len(codec.profile.groups)


def _joined(low: torch.Tensor, high: torch.Tensor) -> npt.NDArray[np.int32]:
    """[row, token] of two planes of bytes; the upper one may lack the last rows."""
    found, upper = (_unpacked(plane).astype(np.int32) for plane in (low, high))
    wide = len(upper)
    found[:wide] = upper * 256 + (found[:wide] & 255)
    return found


def _unpacked(plane: torch.Tensor) -> npt.NDArray[np.int8]:
    raw = plane.cpu().numpy().view(np.int8)
    return raw.reshape(len(raw), 2, 32, 4).transpose(0, 1, 3, 2).reshape(len(raw), 256)
