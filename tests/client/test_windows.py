"""Models with sliding windows: whatever was not fetched, answers are the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import cut
from kdn.client.asynchronous import AsyncClient
from kdn.engines.reading import forward, new_cache, read
from kdn.engines.transformers import spec_of
from kdn.errors import FormatError
from tests.client.clients import QUESTION, TEXT, in_folder, own_answer, prompt_of
from tests.session.calibrated import calibrate_here

TOKENS = [3 + i * i % 125 for i in range(1100)]


def gemma(tiny_model: Any, window: int) -> Any:
    """Five of six layers with a window, as Gemma 3 has them."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return tiny_model(
        "gemma3_text", head_dim=16, num_hidden_layers=6, sliding_window=window, layer_types=kinds
    )


def spied(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are asked for, beyond what lookups bring."""
    asked: list[int] = []
    store = client.session.places.publish_to.store

    def count(way: str) -> None:
        own = getattr(store, way)

        def counted(asks: Sequence[Any], *more: Any) -> Any:
            asked.append(sum(one.end - one.start for one in asks))
            return own(asks, *more)

        monkeypatch.setattr(store, way, counted)

    count("read_spans" if client.session.places.publish_to.local else "read_into")
    return asked


async def sizes(client: AsyncClient, tokens: Sequence[int]) -> list[int]:
    keys = [chunk.key for chunk in cut(tokens, await client.engine.names(), whole=True)]
    found = await client.session.places.publish_to.store.lookup(keys)
    return [entry.size_bytes for entry in found if entry]


# Shorter than a chunk, with a border where a chunk has one and elsewhere, and beyond the context;
# and which part of the bytes is read. (Of a window of 20 tokens, chunks do not hold more.)
@pytest.mark.parametrize(
    ("window", "share"), [(20, 0.8), (257, 0.45), (300, 0.45), (600, 0.85), (2000, 1.0)]
)
def test_a_loaded_cache_is_the_models_own(
    window: int, share: float, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of contexts of several lengths, each of which goes on from the one before: so chunks are
    shared by readers that have other windows before their ends."""
    model = gemma(tiny_model, window)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        own, start = new_cache(model), 0
        for end in (160, 800, 1072):
            loaded = await client.load(TOKENS[:end])
            past = loaded.past_key_values or new_cache(model)
            assert loaded.num_tokens == start
            for stop in [*range(start // 256 * 256 + 256, end, 256), end]:
                read(model, TOKENS[start:stop], past)
                await client.publish(TOKENS[:stop], past)  # before windows pass
                start = stop
            assert await client.flush(60)
        asked = spied(client, monkeypatch)
        loaded = await client.load(TOKENS[:1072])
        assert loaded.num_tokens == 1072
        past = loaded.past_key_values
        assert past is not None
        read(model, TOKENS[:1072], own)
        for layer, (mine, theirs) in enumerate(zip(own.layers, past.layers, strict=True)):
            assert mine.get_seq_length() == theirs.get_seq_length()
            held = min(window - 1, 1072) if layer < 5 else 1072
            for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                # Read in other pieces, so not bit by bit.
                assert torch.allclose(a[:, :, -held:], b[:, :, -held:], atol=1e-3)
        logits = forward(model, TOKENS[1072:], own, every=True)
        again = forward(model, TOKENS[1072:], past, every=True)
        assert torch.allclose(logits, again, atol=1e-2)
        assert torch.equal(logits.argmax(-1), again.argmax(-1))
        stored = sum(await sizes(client, TOKENS[:1072]))
        assert 0 < sum(asked) <= share * stored


@pytest.mark.parametrize(
    ("missing", "window"),
    [((), 100), ((), 300), ((), 2000), ((0,), 300), ((1,), 100), ((1,), 300), ((2,), 300)],
)
def test_answers_are_the_models_own_whatever_is_gone(
    missing: tuple[int, ...], window: int, tiny_model: Any, tmp_path: Path
) -> None:
    """A chunk that nobody has is read by the model, and so is what its layers with a window attend
    to there."""
    model = gemma(tiny_model, window)
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        tokens = (await client.named("notes")).tokens
        chunks = cut(tokens, await client.engine.names(), whole=True)
        assert len(chunks) == 3
        for number in missing:
            await client.session.places.publish_to.store.delete(chunks[number].key)
        answer = client.ask("notes", QUESTION, max_new_tokens=9)
        assert await answer.read() == expected
        if not missing:
            assert answer.stats.known_tokens == len(tokens)
        else:  # what is known up to there goes with all that its end needs
            assert answer.stats.known_tokens == chunks[missing[0]].start


def test_a_chunk_that_does_not_decode(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows when the others are there: those behind it are of use all the same, and those before
    it are read again, for their layers with a window were not fetched."""
    model = gemma(tiny_model, 100)
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        tokens = (await client.named("notes")).tokens
        chunks = cut(tokens, await client.engine.names(), whole=True)
        codec = client.session.codec
        decode = codec.decode

        def fails(stream: Any, chunk: Any, **options: Any) -> Any:
            if chunk.start == 256:
                raise FormatError("no such stream")
            return decode(stream, chunk, **options)

        monkeypatch.setattr(codec, "decode", fails)
        answer = client.ask("notes", QUESTION, max_new_tokens=9)
        assert await answer.read() == expected
        assert answer.stats.known_tokens == chunks[2].num_tokens


def test_a_longer_text_goes_on_from_a_shorter_one(tiny_model: Any, tmp_path: Path) -> None:
    model = gemma(tiny_model, 300)
    parts = [TEXT[:end] for end in (300, 520, 700)]

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        for text in parts:
            await client.learn("notes", text)
            expected = own_answer(model, prompt_of(text, QUESTION), 9)
            assert await client.ask("notes", QUESTION, max_new_tokens=9).read() == expected


def test_klt_in_two_parts(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model = gemma(tiny_model, 300)
    calibrate_here(spec_of(model), in_parts=True)

    @in_folder(tmp_path / "data", model, codec="klt")
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        tokens = (await client.named("notes")).tokens
        asked = spied(client, monkeypatch)
        loaded = await client.load(tokens, quality="exact")
        end = loaded.num_tokens
        assert end == len(tokens) // 16 * 16
        assert 0 < sum(asked) < 0.8 * sum(await sizes(client, tokens[:end]))
        past, own = loaded.past_key_values, new_cache(model)
        assert past is not None
        read(model, tokens[:end], own)
        for layer, (mine, theirs) in enumerate(zip(own.layers, past.layers, strict=True)):
            held = 299 if layer < 5 else end
            for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                assert torch.allclose(a[:, :, -held:], b[:, :, -held:], atol=0.05)
