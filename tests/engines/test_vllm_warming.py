"""What is compiled ahead: everything that a load may need, without touching the engine's memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import NOWHERE, TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Coded
from kdn.codec.exact import ExactCodec
from kdn.engines.vllm.warming import SWITCH_S, sharing_interpreter, warm_up, warm_up_gpu
from kdn.errors import KdnError, UnsupportedError
from tests.engines.vllm_working import DIM, HEADS, LAYERS, SPEC

CPU = torch.device("cpu")


class Watched(ExactCodec):
    """Says that it decodes on the device, and keeps what it is asked for."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__(SPEC)
        self.num_levels = 3
        self.decoded: list[tuple[int, int, int]] = []
        self.encoded: list[torch.dtype] = []
        self._breaks = breaks

    def decodes_on(self, device: torch.device) -> bool:
        return device == CPU

    def encode_batch(self, items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        self.encoded += [cache.dtype for _, cache in items]
        if self._breaks:
            return [UnsupportedError("no") for _ in items]
        return super().encode_batch(items)

    def decode_rows(
        self, batch: Sequence[Coded], rows: TokenRows, *, after: torch.cuda.Event | None = None
    ) -> list[KdnError | None]:
        for one in batch:
            assert (one.slots[1:] == NOWHERE).all()
            assert one.slots[0] == (NOWHERE if one.chunk.start else 0)  # so sinks are decoded
        starts = {one.chunk.start for one in batch}
        self.decoded += [(start, batch[0].levels, len(batch)) for start in starts]
        return [None] * len(batch)


def memory() -> TokenRows:
    sides = [[torch.full((8, HEADS, DIM), 9.0) for _ in range(LAYERS)] for _ in range(2)]
    return TokenRows(sides[0], sides[1], range(HEADS))


def test_all_levels_of_first_and_later_chunks_one_and_many() -> None:
    codec, rows = Watched(), memory()
    warm_up_gpu(codec, rows, torch.bfloat16)
    assert codec.encoded == [torch.bfloat16] * 3
    starts, levels, sizes = (set(found) for found in zip(*codec.decoded, strict=True))
    assert (starts, levels, min(sizes)) == ({0, 256, 512}, {1, 2, 3}, 1)
    assert max(sizes) > 16
    assert all((side == 9.0).all() for side in [*rows.keys, *rows.values])


def test_a_codec_that_decodes_elsewhere_is_left_alone() -> None:
    codec = ExactCodec(SPEC)
    assert not codec.decodes_on(CPU)
    warm_up_gpu(codec, memory(), torch.float32)
    warm_up(codec)


def test_what_does_not_work_does_not_stop_the_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Watched(breaks=True)
    warm_up_gpu(codec, memory(), torch.float32)
    assert "did not warm up" in caplog.text
    assert codec.decoded == []

    class CompilationError(Exception):
        """As Triton's own: no kind of RuntimeError."""

    def decode_rows(*given: object) -> None:
        raise CompilationError

    caplog.clear()
    codec = Watched()
    monkeypatch.setattr(codec, "decode_rows", decode_rows)
    warm_up_gpu(codec, memory(), torch.float32)
    assert "CompilationError" in caplog.text


def test_the_interpreter_is_shared_as_long_as_anybody_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[float] = []
    monkeypatch.setattr(sys, "getswitchinterval", lambda: told[-1] if told else 0.005)
    monkeypatch.setattr(sys, "setswitchinterval", told.append)
    gpu = torch.device("cuda")
    with sharing_interpreter(CPU):
        assert told == []
    first, second = sharing_interpreter(gpu), sharing_interpreter(gpu)
    with first:
        second.__enter__()
        assert told == [SWITCH_S]
    assert told == [SWITCH_S]
    second.__exit__(None, None, None)
    assert told == [SWITCH_S, 0.005]
