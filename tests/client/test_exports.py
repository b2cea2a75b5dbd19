"""Knowledge from a web server: what was learned, exported and served by plain nginx is known to an
instance that has nothing but the URL, and nothing is ever written there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kdn.bench.web_server import start_web
from kdn.cli.main import app
from kdn.errors import ReadOnlyError
from tests.client.clients import QUESTION, TEXT, client_at, own_answer, prompt_of
from tests.node.harness import run
from tests.places.exports import needs_nginx

pytestmark = needs_nginx


def test_learn_export_and_ask_from_a_web_server(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    knowledge, files = tmp_path / "knowledge", tmp_path / "files"
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 24)

    async def learn() -> None:
        async with client_at(knowledge, model) as client:
            await client.learn("notes", TEXT)
            await client.learn("other", TEXT[:300])

    async def ask(url: str) -> None:
        async with client_at(url, tiny_model("llama")) as client:
            answer = client.ask("notes", QUESTION, max_new_tokens=24)
            assert await answer.read() == expected
            assert answer.stats.known_tokens == 709
            assert answer.stats.computed_tokens == len(prompt_of(TEXT, QUESTION)) - 709
            with pytest.raises(ReadOnlyError, match="read-only"):
                await client.learn("more", TEXT)
            with pytest.raises(ReadOnlyError):
                await client.forget("notes")
            # What is computed on the way goes nowhere, at once and without complaint.
            assert await client.publish([5] * 300, await own_cache(client, [5] * 300)) == 0
            assert await client.flush(1.0)
            counts = client.session.publisher.counts
            assert (counts.refused, counts.dropped, counts.failures, counts.spooled) == (0, 0, 0, 0)

    run(learn(), 60.0)
    result = CliRunner().invoke(
        app, ["export", str(knowledge), str(files), "--names", "notes"], env={"COLUMNS": "150"}
    )
    assert result.exit_code == 0, result.output
    assert "1 names, 4 chunks; 4 of them new" in result.output
    with start_web(files, tmp_path / "web") as web:
        run(ask(web.url), 60.0)
        listed = CliRunner().invoke(app, ["ls", "--url", web.url], env={"COLUMNS": "150"})
        assert "notes" in listed.output
        assert "other" not in listed.output
        chunks = CliRunner().invoke(app, ["ls", "--chunks", "--url", web.url])
        assert chunks.exit_code == 0
        shown = CliRunner().invoke(app, ["show", "notes", "--url", web.url])
        assert "4 chunks" in shown.output
        assert not any(line.startswith(("PUT", "POST", "DELETE")) for line in web.requests())
    assert not list((tmp_path / "cache").glob("spool/*"))


async def own_cache(client: Any, tokens: list[int]) -> Any:
    from kdn.engines.reading import new_cache, read

    past = new_cache(client.engine.model)
    await asyncio.to_thread(read, client.engine.model, tokens, past)
    return past
