"""The connector's parts on a real GPU: who waits for what, and that values are in their places."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.delivery.sink import Arrival
from kdn.engines.vllm.layout import Heads, Layout, PagedCache
from kdn.engines.vllm.messages import LoadOrder, SaveOrder, Step
from kdn.engines.vllm.paged_sink import LoadJob, sink_of
from kdn.engines.vllm.saver import Saver
from kdn.engines.vllm.shared import SharedSession
from kdn.engines.vllm.staging import Staging
from kdn.engines.vllm.weights import Weights
from kdn.engines.vllm.worker import WorkerSide
from tests.engines.vllm_working import (
    ANSWER_S,
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    SPACE,
    SPEC,
    TOKENS,
    load,
    shared_session,
    values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHUNKS = tuple(cut(TOKENS, SPACE))
BLOCK_IDS = tuple(range(40, 60))
LONG_CYCLES = 1_000_000_000
"""About half a second."""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedSession]:
    with shared_session(tmp_path / "folder") as shared:
        yield shared


def memory(tokens_first: bool = True) -> PagedCache:
    """As vLLM has it on a GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    shape = (BLOCKS, BLOCK, HEADS, 2 * DIM) if tokens_first else (BLOCKS, HEADS, BLOCK, 2 * DIM)
    layers = [torch.zeros(shape, device=device) for _ in range(LAYERS)]
    if tokens_first:
        layers = [layer.transpose(1, 2) for layer in layers]
    paged = PagedCache(layers, SPEC, Heads(0, HEADS), BLOCK)
    assert paged.layout is Layout.HEADS_FIRST
    assert paged.rows is not None
    return paged


def make(shared: SharedSession, paged: PagedCache, look: Any) -> tuple[WorkerSide, Staging]:
    staging = Staging(paged, LAYERS, 1 << 24)

    def saver(counts: Counter[str]) -> Saver:
        return Saver(shared, paged, staging, look, counts)

    return WorkerSide(shared, paged, lambda _: False, ANSWER_S, saver=saver), staging


@pytest.mark.parametrize("tokens_first", [False, True])
def test_what_a_step_computes_is_published_and_loaded(
    shared: SharedSession, tokens_first: bool
) -> None:
    """vLLM's thread does not wait for the step; what is saved is what was there behind it, though
    the blocks are another's right afterwards."""
    paged = memory(tokens_first)
    model = nn.Linear(64, 64, device=paged.device)
    worker, staging = make(shared, paged, Weights([model]).look)
    cache = values(608)
    worker.begin(Step(saves=(SaveOrder("r", CHUNKS, BLOCK_IDS),), num_tokens=600))
    slots = torch.from_numpy(paged.slots(0, 608, BLOCK_IDS)).to(paged.device)
    keys, values_ = (side.pin_memory() for side in (cache.keys, cache.values))
    rows = paged.rows
    assert rows is not None

    def compute() -> None:
        for layer in range(LAYERS):
            rows.keys[layer][slots] = keys[layer].to("cuda", non_blocking=True)
            rows.values[layer][slots] = values_[layer].to("cuda", non_blocking=True)

    compute()  # a kernel that was never used is loaded, which waits for the device
    for layer in range(LAYERS):
        rows.keys[layer].zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # the step
    began_s = time.monotonic()
    compute()
    worker.save()
    for layer in range(LAYERS):
        paged.rows.keys[layer].zero_()
    assert time.monotonic() - began_s < 0.2
    until_s = time.monotonic() + 60
    while shared.session.publisher.counts.published < 3:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert staging.num_free == len(staging)
    assert load(worker, 0, 576) == (set(), 576)
    found = paged.read(0, 576, range(30))
    assert torch.equal(found.keys, cache.keys[:, :576])
    assert torch.equal(found.values, cache.values[:, :576])


def test_other_weights_are_noticed_behind_the_step(shared: SharedSession) -> None:
    paged = memory()
    model = nn.Linear(64, 64, device=paged.device).requires_grad_(False)
    worker, staging = make(shared, paged, Weights([model]).look)
    torch.cuda._sleep(LONG_CYCLES)
    model.weight.data.add_(1.0)  # queued, not done
    worker.begin(Step(saves=(SaveOrder("r", CHUNKS, BLOCK_IDS),), num_tokens=600))
    worker.save()
    until_s = time.monotonic() + 60
    while staging.num_free < len(staging):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    worker.take_finished()
    assert worker.take_report().weights_changed
    assert shared.session.publisher.counts.published == 0


def test_weights_are_looked_at_beside_a_step() -> None:
    """Behind what was queued before it, but not behind itself."""
    model = nn.Linear(256, 256, device="cuda").requires_grad_(False)
    weights = Weights([model])
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    began_s = time.monotonic()
    assert not weights.have_changed()
    assert time.monotonic() - began_s < 0.2
    model.weight.data.add_(1.0)
    before = torch.cuda.current_stream().record_event()
    torch.cuda._sleep(LONG_CYCLES)
    assert weights.have_changed(before)
    torch.cuda.synchronize()


def test_a_load_waits_for_steps_that_began_before_it() -> None:
    """They may still write to blocks that were just freed. Steps that begin later do not wait."""
    paged, codec, cache = memory(), ExactCodec(SPEC), values(600)
    assert paged.rows is not None
    torch.cuda._sleep(LONG_CYCLES)
    for layer in paged.rows.keys:
        layer.fill_(9.0)
    order = LoadOrder("r", CHUNKS, (), 0, 576, tuple(range(30)), 60.0, 0.0)
    sink = sink_of(codec, paged, LoadJob(order, 0.0, paged.mark()))
    arrivals = [
        Arrival(chunk, Bitstream.parse(codec.encode(chunk, cache.slice(chunk.start, chunk.end))),
                1, False)
        for chunk in CHUNKS
    ]  # fmt: skip
    assert sink.decode(arrivals) == [None] * 3
    found = paged.read(0, 576, order.block_ids)
    assert torch.equal(found.keys, cache.keys[:, :576])
    held = KVCache(cache.keys + 1, cache.values, 0)
    sink.write(CHUNKS[0], held.slice(0, 256))
    assert torch.equal(paged.read(0, 256, order.block_ids).keys, held.keys[:, :256])
