"""A client that stores fewer levels: for all that it publishes, or for one text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.client.asynchronous import AsyncClient
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.client.clients import TEXT, client_at, in_folder
from tests.session.calibrated import calibrate_here

MIDDLE = 0.00625
"""What three of four levels promise (tests/session/calibrated.py)."""
TOKENS = [ord(letter) for letter in TEXT]


def levels_at(client: AsyncClient, tokens: list[int]) -> Any:
    async def stored() -> list[int]:
        known = await client.session.know(tokens, enough_kld=1.0)
        return [one.assembly.stored for one in known.streams.values() if one is not None]

    return stored()


def test_a_text_is_learned_with_fewer_levels_than_others(
    tmp_path: Path, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")
    calibrate_here(spec_of(model))
    klt = {"codec": "klt", "quality": MIDDLE}
    loaded: list[Any] = []

    @in_folder(tmp_path / "less", model, **klt)
    async def _(client: AsyncClient) -> None:
        await client.learn("text", TOKENS, stored_quality=MIDDLE)
        assert await levels_at(client, TOKENS) == [3, 3, 3]
        loaded.append((await client.load(TOKENS)).cache)
        again = await client.learn("text", TOKENS, stored_quality=MIDDLE)
        assert (again.known_chunks, again.new_chunks) == (4, 0)
        nothing = await client.load(TOKENS, quality="exact")
        assert nothing.num_tokens == 0, "for going on exactly it is missing"
        whole = await client.learn("text", TOKENS)
        assert (whole.known_chunks, whole.computed_tokens) == (0, len(TOKENS))
        assert await levels_at(client, TOKENS) == [4, 4, 4]
        exact = await client.load(TOKENS, quality="exact")
        assert (exact.num_tokens, exact.exact_until) == (688, None)

    @in_folder(tmp_path / "whole", model, **klt)
    async def _(client: AsyncClient) -> None:
        await client.learn("text", TOKENS)
        loaded.append((await client.load(TOKENS)).cache)

    less, whole = loaded
    assert torch.equal(less.keys, whole.keys)
    assert torch.equal(less.values, whole.values)


def test_a_client_that_stores_fewer_levels(
    tmp_path: Path, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")
    calibrate_here(spec_of(model))

    @in_folder(tmp_path / "data", model, codec="klt", quality=MIDDLE, stored_quality=MIDDLE)
    async def _(client: AsyncClient) -> None:
        await client.learn("text", TOKENS)
        assert await levels_at(client, TOKENS) == [3, 3, 3]
        await client.learn("other", TOKENS[::-1], stored_quality="exact")
        assert await levels_at(client, TOKENS[::-1]) == [4, 4, 4]


def test_a_stored_quality_that_there_is_not_is_refused(
    tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="quality"):
        client_at(tmp_path, model, stored_quality="best")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        with pytest.raises(UnsupportedError, match="quality"):
            await client.learn("text", TOKENS, stored_quality="best")
