"""Every answer has an id, by which the request log and traces know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.client.asynchronous import AsyncClient
from kdn.request_log import default_path, find
from tests.client.clients import QUESTION, TEXT, in_folder
from tests.traces import recorded, trace_of


def test_an_answer_can_be_explained(
    tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    ids: dict[str, str] = {}

    with recorded() as spans:

        @in_folder(tmp_path / "data", tiny_model("llama"))
        async def _(client: AsyncClient) -> None:
            learned = await client.learn("notes", TEXT)
            with spans.tracer.start_as_current_span("caller"):
                answer = client.ask("notes", QUESTION, max_new_tokens=2)
                await answer.read()
            loaded = await client.load([1] * 40)
            ids.update(
                learn=learned.request_id, ask=answer.stats.request_id, load=loaded.request_id
            )
            stats = answer.stats
            assert stats.tier_tokens == {"host": 0, "folder": stats.known_tokens, "remote": 0}
            assert sum(stats.level_bytes) > 0
            assert client.metrics.tier_tokens["folder"] == stats.known_tokens

    assert len(set(ids.values())) == 3
    events = {name: [one["event"] for one in find(default_path(), ids[name])] for name in ids}
    assert events["ask"] == ["deliver"]
    assert set(events["learn"]) >= {"publish", "accepted"}
    assert events["load"] == ["know"]
    whole = spans.one("kdn.ask")
    assert spans.parent_of(whole) == "caller"
    mine = {span.name for span in spans.spans if trace_of(span) == trace_of(whole)}
    assert mine >= {"kdn.deliver", "kdn.lookup", "kdn.plan", "kdn.decode", "kdn.hand_over"}
    assert "kdn.publish" in {span.name for span in spans.spans}


def test_no_log_where_none_is_wanted(
    tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KDN_CLIENT_REQUEST_LOG_BYTES", "0")

    @in_folder(tmp_path / "data", tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)

    assert not default_path().exists()
