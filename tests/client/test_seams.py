"""A client fits seams on what it knows, and its joins are repaired from then on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kdn.client import fitting
from kdn.client.asynchronous import AsyncClient
from kdn.engines.seam_fitting import SeamOptions
from kdn.errors import MismatchError, StoreError, UnsupportedError
from kdn.session.seams import find_seams
from tests.client.clients import in_folder
from tests.engines.test_seam_fitting import SMALL, pieces

TEXTS = ["".join(map(chr, piece)).strip() for piece in pieces(48)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))

    def fit(*arguments: Any, options: SeamOptions, **more: Any) -> Any:
        return fit_seams(*arguments, options=SMALL, **more)

    fit_seams = fitting.fit_seams
    monkeypatch.setattr(fitting, "fit_seams", fit)


def test_seams_of_names_and_texts_are_found_and_used(tmp_path: Path, tiny_model: Any) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path / "place", model)
    async def test(client: AsyncClient) -> None:
        for number in range(3):
            await client.learn(f"piece-{number}", TEXTS[number])
        names = ["piece-0", "piece-1", "piece-2"]
        plain = client.ask(names, "?", max_new_tokens=2, quality="exact")
        await plain.read()
        assert plain.stats.repaired_tokens == 0
        seams = await client.seams(
            names[:2],
            texts=TEXTS[7:32],
            examples=[("what comes next?", TEXTS[3:5]), ("?", TEXTS[5:7])],
        )
        found = await find_seams(client.session)
        assert found is not None
        assert found.to_bytes() == seams.to_bytes()
        assert await find_seams(client.session, "other") is None
        joined = client.ask(names, "?", max_new_tokens=2, quality=9.0)
        await joined.read()
        assert joined.stats.repaired_tokens > 0
        with pytest.raises(StoreError, match="no name"):
            await client.seams(["nobody"])
        with pytest.raises(UnsupportedError, match="at least"):
            await client.seams(names)
        with pytest.raises(UnsupportedError, match="tag"):
            await client.seams(names, tag="a b")
        await client.learn("other", TEXTS[0], head="be brief")
        with pytest.raises(MismatchError, match="another head"):
            await client.seams(["piece-0", "other"])


def test_who_does_not_wait_any_more_frees_the_model(tmp_path: Path, tiny_model: Any) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path / "place", model)
    async def test(client: AsyncClient) -> None:
        told = asyncio.Event()
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        fitting = asyncio.create_task(
            client.seams(texts=TEXTS[:30], on_progress=lambda *_: call_soon(told.set) and None)
        )
        await asyncio.wait_for(told.wait(), 20)
        fitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fitting
        assert not client.engine.lock.locked()
        assert await find_seams(client.session) is None
