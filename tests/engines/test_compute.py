"""The model reads along while chunks load."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.engines.compute import ChunkReader
from kdn.engines.reading import last_tokens, new_cache, read

TOKENS = [3 + i * i % 120 for i in range(600)]


def test_chunks_are_what_the_model_has(tiny_model: Any) -> None:
    model = tiny_model("llama")
    chunks = cut(TOKENS, Namespace(b"m", b"p"))
    past = new_cache(model)
    read(model, TOKENS, past)
    whole = last_tokens(past, 0)

    async def work() -> None:
        reader = ChunkReader(model, chunks)
        for number, chunk in enumerate(chunks):
            values = await reader(number, number + 1)
            own = whole.slice(chunk.start, chunk.end)
            assert (values.start, values.end) == (own.start, own.end)
            assert torch.allclose(values.keys, own.keys, atol=1e-5)
        with pytest.raises(AssertionError, match="each once"):
            await reader(0, 1)
        await reader.finish()
        both = ChunkReader(model, chunks)
        values = await both(0, 2)
        assert torch.allclose(values.keys, whole.slice(0, 512).keys, atol=1e-5)
        await both.finish()

    asyncio.run(work())


def test_a_cancelled_pass_is_stopped_and_waited_for(tiny_model: Any) -> None:
    model = tiny_model("llama")
    chunks = cut(TOKENS, Namespace(b"m", b"p"))

    async def work() -> None:
        reader = ChunkReader(model, chunks)
        task = asyncio.create_task(reader(0, 3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await reader.finish()
        assert reader._running is not None
        assert reader._running.done()
        read(model, TOKENS[:9], new_cache(model))  # the model is free, and works


def test_one_that_is_stopped_stops_no_other(tiny_model: Any) -> None:
    """Several deliveries may use one model."""
    model = tiny_model("llama")
    chunks = cut(TOKENS, Namespace(b"m", b"p"))

    async def work() -> None:
        first, second = ChunkReader(model, chunks), ChunkReader(model, chunks)
        await first(0, 1)
        first._stopped = True
        values = await second(0, 1)
        assert values.num_tokens == 256
        await first.finish()
        await second.finish()

    asyncio.run(work())
