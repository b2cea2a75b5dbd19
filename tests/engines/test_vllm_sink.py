"""Decoded chunks on their way into blocks: which tokens, and what leaves blocks as they are."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.delivery.sink import Arrival
from kdn.engines.vllm.layout import Heads, Layout, PagedCache
from kdn.engines.vllm.messages import LoadOrder
from kdn.engines.vllm.paged_sink import GivenUpError, LoadJob, PagedSink, SlotSink, sink_of
from kdn.errors import FormatError, KdnError, UnsupportedError
from tests.engines.vllm_working import BLOCK, BLOCKS, DIM, HEADS, LAYERS, SPACE, SPEC, TOKENS
from tests.engines.vllm_working import values as random_values

CHUNKS = cut(TOKENS, SPACE)
VALUES = random_values(600)
OLD = 9.0


class Decoder:
    """In a codec's place: gives what a test says, by where the chunk starts."""

    def __init__(self) -> None:
        self.given: dict[int, KVCache | KdnError] = {
            chunk.start: VALUES.slice(chunk.start, chunk.end) for chunk in CHUNKS
        }

    def decode(self, stream: Any, chunk: Any, *, levels: int, dtype: torch.dtype) -> KVCache:
        found = self.given[chunk.start]
        if isinstance(found, KdnError):
            raise found
        return found


class Setting:
    def __init__(self, start: int = 0, end: int = 576, max_kept: int = 0) -> None:
        shape = (BLOCKS, HEADS, BLOCK, 2 * DIM)
        layers = [torch.full(shape, OLD) for _ in range(LAYERS)]
        self.paged = PagedCache(layers, SPEC, Heads(0, HEADS), BLOCK)
        order = LoadOrder("r", tuple(CHUNKS), (), start, end, tuple(range(30)), 1.0, 0.0)
        self.job, self.codec = LoadJob(order, 0.0), Decoder()
        self.sink = PagedSink(self.codec, self.paged, self.job, max_kept)  # type: ignore[arg-type]

    def decode(self, *numbers: int, improves: bool = False) -> list[KdnError | None]:
        return self.sink.decode([Arrival(CHUNKS[n], None, 1, improves) for n in numbers])  # type: ignore[arg-type]

    def keys(self) -> torch.Tensor:
        return self.paged.read(0, 608, range(30)).keys


def test_chunks_are_written_as_far_as_the_load_goes() -> None:
    """Several at once, and no token before its start, behind its end or of another chunk."""
    setting = Setting(start=96, end=576)
    assert setting.decode(0, 2) == [None, None]
    found = setting.keys()
    for start, end in ((96, 256), (512, 576)):
        assert torch.equal(found[:, start:end], VALUES.keys[:, start:end])
        found[:, start:end] = OLD
    assert (found == OLD).all()
    setting.sink.write(CHUNKS[1], VALUES.slice(256, 512))  # what needs no decoding
    assert torch.equal(setting.keys()[:, 96:576], VALUES.keys[:, 96:576])


def test_a_failed_improvement_leaves_what_is_there() -> None:
    setting = Setting()
    assert setting.decode(0, 1) == [None, None]
    setting.codec.given[0] = FormatError("broken")
    setting.codec.given[256] = replace(better := random_values(256), start=256, valid_from=())
    failed, done = setting.decode(0, 1, improves=True)
    assert isinstance(failed, FormatError)
    assert done is None
    assert torch.equal(setting.keys()[:, :256], VALUES.keys[:, :256])
    assert torch.equal(setting.keys()[:, 256:512], better.keys)


def test_a_layer_that_lacks_tokens_is_refused() -> None:
    """Unless they are none of the load's."""
    setting = Setting(start=32)
    for lacking, expected in ((33, UnsupportedError), (32, type(None))):
        whole = VALUES.slice(0, 256)
        setting.codec.given[0] = replace(whole, valid_from=(0, lacking))
        [found] = setting.decode(0)
        assert isinstance(found, expected)
        assert (setting.keys() == OLD).all() == (found is not None)


def test_what_was_given_up_is_refused() -> None:
    setting = Setting(max_kept=3)
    assert setting.job.give_up()
    assert all(isinstance(one, GivenUpError) for one in setting.decode(0, 1))
    with pytest.raises(GivenUpError):
        setting.sink.write(CHUNKS[2], VALUES.slice(512, 592))
    assert (setting.keys() == OLD).all()
    assert setting.sink.decoded == {}


def test_blocks_that_are_being_written_are_not_given_up() -> None:
    """Not even by one of two who write."""
    job, entered, leave = Setting().job, threading.Barrier(3), threading.Event()

    def write() -> None:
        with job.writing():
            entered.wait(10)
            assert leave.wait(10)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for one in writers:
        one.start()
    entered.wait(10)
    assert not job.give_up()
    leave.set()
    for one in writers:
        one.join(10)
    with job.writing():
        assert not job.give_up()
    assert job.give_up()
    with pytest.raises(GivenUpError), job.writing():
        raise AssertionError("not to be reached")


def test_what_is_kept_is_bounded() -> None:
    setting = Setting(max_kept=2)
    assert setting.decode(0) == setting.decode(1) == setting.decode(2) == [None]
    assert list(setting.sink.decoded) == [chunk.key for chunk in CHUNKS[:2]]
    setting.codec.given[0] = better = random_values(256)
    assert setting.decode(0, improves=True) == [None]
    assert setting.sink.decoded[CHUNKS[0].key] is better


def test_slots_are_written_as_far_as_the_load_goes() -> None:
    """With a real codec, whose streams are decoded into memory whose places are slots."""
    codec = ExactCodec(SPEC)
    streams = [
        Bitstream.parse(codec.encode(chunk, VALUES.slice(chunk.start, chunk.end)))
        for chunk in CHUNKS
    ]
    shape = (BLOCKS, HEADS, BLOCK, 2 * DIM)
    layers = [torch.full(shape, OLD) for _ in range(LAYERS)]
    paged = PagedCache(layers, SPEC, Heads(0, HEADS), BLOCK, Layout.HEADS_FIRST)
    order = LoadOrder("r", tuple(CHUNKS), (), 96, 576, tuple(range(29, -1, -1)), 1.0, 0.0)
    job = LoadJob(order, 0.0)
    sink = sink_of(codec, paged, job)
    assert isinstance(sink, SlotSink)
    arrivals = [
        Arrival(chunk, stream, 1, False) for chunk, stream in zip(CHUNKS, streams, strict=True)
    ]
    assert sink.decode(arrivals[::2]) == [None, None]
    sink.write(CHUNKS[1], VALUES.slice(256, 512))
    found = paged.read(0, 608, order.block_ids)
    for here, given in ((found.keys, VALUES.keys), (found.values, VALUES.values)):
        assert torch.equal(here[:, 96:576], given[:, 96:576])
        here[:, 96:576] = OLD
        assert (here == OLD).all()
    assert job.give_up()
    assert all(isinstance(one, GivenUpError) for one in sink.decode(arrivals))
    with pytest.raises(GivenUpError):
        sink.write(CHUNKS[2], VALUES.slice(512, 592))
