"""Callers that read with the model themselves: what they load, and what they may publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.client.asynchronous import AsyncClient
from kdn.engines.reading import new_cache, read
from kdn.engines.transformers import spec_of
from kdn.session.quality import Quality
from tests.client.clients import TEXT, in_folder
from tests.codec.klt_profile import LEVELS
from tests.session.calibrated import calibrate_here


def test_load_finds_the_longest_beginning(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        tokens, _ = client.engine.prompts.learn(TEXT)
        await client.learn("notes", TEXT)
        covered = len(tokens) // 16 * 16
        loaded = await client.load([*tokens, 5, 6, 7])
        assert loaded.num_tokens == covered  # two chunks, and a tail that is not the prompt's own
        past, own = loaded.past_key_values, new_cache(model)
        read(model, tokens[:covered], own)
        assert past is not None
        for mine, theirs in zip(own.layers, past.layers, strict=True):
            assert (mine.keys == theirs.keys).all()
            assert (mine.values == theirs.values).all()
        nothing = await client.load([9] * 300)
        assert (nothing.num_tokens, nothing.cache, nothing.past_key_values) == (0, None, None)
        half = await client.load([*tokens[:300], *[9] * 300])
        assert half.num_tokens == 256


def test_publish_and_load_by_hand(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tokens = list(np.random.default_rng(1).integers(3, 128, 600))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, tokens[:300], past)
        assert await client.publish(tokens[:300], past) == 2
        assert await client.flush(20)
        loaded = await client.load(tokens)
        assert loaded.num_tokens == 288
        more = loaded.past_key_values
        assert more is not None
        read(model, tokens[288:], more)
        assert await client.publish(tokens, more, after=loaded) == 2  # [256, 512) and a tail
        assert await client.flush(20)
        assert (await client.load(tokens)).num_tokens == 592


@pytest.mark.parametrize(("quality", "published"), [(0.1, 0), ("exact", 2)])
def test_nothing_is_published_on_top_of_losses(
    quality: Quality,
    published: int,
    tiny_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One level of a lossy codec, or all of them, which count as exact."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")
    calibrate_here(spec_of(model))
    tokens = list(np.random.default_rng(1).integers(3, 128, 600))

    @in_folder(tmp_path / "data", model, codec="klt")
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, tokens, past)
        assert await client.publish(tokens[:256], past) == 1
        assert await client.flush(120), "kernels may have to be compiled first"
        loaded = await client.load(tokens, quality=quality)
        assert loaded.delivered is not None
        assert loaded.delivered.levels == (1 if quality == 0.1 else LEVELS,)
        after = loaded.past_key_values
        assert after is not None
        read(model, tokens[256:], after)
        assert await client.publish(tokens, after, after=loaded) == published


def test_a_window_that_has_passed_is_not_published(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=64)
    tokens = list(np.random.default_rng(1).integers(3, 128, 512))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, tokens, past)
        assert await client.publish(tokens, past) == 1  # of the first, its layers hold nothing
        assert await client.flush(20)
        assert (await client.load(tokens)).num_tokens == 0
