"""Delivered as on a GPU, token by token into the model's memory: the same answers as ever.

What a GPU adds, streams and their order, `test_gpu.py` sees; here the same code writes to a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import cut
from kdn.client.asynchronous import AsyncClient
from kdn.codec.format import Bitstream
from kdn.delivery.sink import Arrival, RowsSink
from kdn.engines.compute import ChunkReader
from kdn.engines.generating import Sampling
from kdn.engines.growing import Room, is_written_by_rows
from kdn.engines.transformers import spec_of
from tests.client.clients import QUESTION, TEXT, client_at, own_answer, prompt_of
from tests.node.harness import run


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kdn.client.engine.is_written_by_rows", lambda spec, device: not any(spec.windows)
    )


def test_only_a_gpu_and_whole_layers(tiny_model: Any) -> None:
    llama = spec_of(tiny_model("llama"))
    windows = spec_of(tiny_model("gemma2", head_dim=16, sliding_window=32))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [is_written_by_rows(*both) for both in ((llama, cpu), (llama, gpu), (windows, gpu))] == [
        False, True, False,
    ]  # fmt: skip


def test_rows_of_a_room_are_what_the_model_reads(tiny_model: Any) -> None:
    room = Room.of(spec_of(tiny_model("llama")), 300, torch.float32)
    rows, cache = room.rows(), room.canonical(300)
    for layer in range(4):
        for side, whole in ((rows.keys, cache.keys), (rows.values, cache.values)):
            assert side[layer].data_ptr() == whole[layer].data_ptr()
            assert side[layer][:300].stride() == whole[layer].stride()
    assert rows.num_slots == room.capacity
    assert room.after is None
    room.used()


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learn_and_ask(dtype: torch.dtype, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama").to(dtype)
    for module in model.modules():  # as `load_model` has them
        if hasattr(module, "inv_freq"):
            module.inv_freq = tiny_model("llama").model.rotary_emb.inv_freq
    prompt = prompt_of(TEXT, QUESTION)
    expected = own_answer(model, prompt, 9)

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)
        async with client_at(tmp_path, model) as client:
            assert client.engine.by_rows
            answer = client.ask("notes", QUESTION, max_new_tokens=9)
            assert await answer.read() == expected
            assert answer.stats.known_tokens == 709
            loaded = await client.load(prompt)
            assert loaded.num_tokens == 704
            assert loaded.cache is not None
            assert (loaded.cache.dtype, loaded.cache.is_complete) == (dtype, True)
            past = loaded.past_key_values
            assert past is not None
            assert past.get_seq_length() == 704
            more = await client.learn("more", TEXT + TEXT)  # goes on from what is loaded
            assert more.known_chunks == 2
            assert await client.ask_all("notes", [QUESTION], max_new_tokens=9) == [expected]

    run(test())


@pytest.mark.usefixtures("by_rows")
def test_the_model_reads_along(tiny_model: Any, tmp_path: Path) -> None:
    """Chunks that it computed go to the same memory as those that were decoded."""
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            engine, prompt = client.engine, prompt_of(TEXT, QUESTION)
            chunks = cut(prompt, await engine.names())
            room = engine.room_for(chunks[-1].end)
            landing = client.contexts.landing_for(chunks, room)
            reader = ChunkReader(model, chunks)
            values = await reader(0, len(chunks))
            for chunk in chunks:
                landing.sink.write(chunk, values)
            await reader.finish()
            context = engine.context_of(landing.until(chunks[-1].end), prompt, room)
            await engine.read(context, prompt[chunks[-1].end :])
            tokens = [token async for token in engine.answer(context, Sampling(9))]
            assert engine.text(tokens) == expected

    run(test())


@pytest.mark.usefixtures("by_rows")
def test_windows_are_put_together_in_main_memory(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("gemma2", head_dim=16, sliding_window=32)
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)
            assert not client.engine.by_rows
            assert await client.ask("notes", QUESTION, max_new_tokens=9).read() == expected

    run(test())


@pytest.mark.usefixtures("by_rows")
def test_a_context_is_refined_where_it_lies(tiny_model: Any, tmp_path: Path) -> None:
    """What is decoded later is in the cache that the model goes on from."""
    model = tiny_model("llama")

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)
            context, [chunk, *_], sink = await delivered(client)
            assert client.engine.lies_in_room(context)
            kept = context.past.layers[3].values.clone()
            found = await client.session.places.publish_to.store.get(chunk.key)
            stream = Bitstream.parse(bytes(found.data))
            context.past.layers[3].values[:, :, : chunk.end] = 7
            context.room.used()
            assert sink.decode([Arrival(chunk, stream, 1, True)]) == [None]
            assert torch.equal(context.past.layers[3].values, kept)

    run(test())


async def delivered(client: AsyncClient) -> tuple[Any, Any, RowsSink]:
    tokens = (await client.named("notes")).tokens
    chunks = cut(tokens, await client.engine.names())
    room = client.engine.room_for(chunks[-1].end)
    landing = client.contexts.landing_for(chunks, room)
    sink = landing.sink
    assert isinstance(sink, RowsSink)
    await client.session.deliver(chunks, sink)
    cache = landing.until(chunks[-1].end)
    return client.engine.context_of(cache, tokens, room), chunks, sink
