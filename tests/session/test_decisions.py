"""What the request log says of a request: what was known and planned, what came, and why not."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn import tracing
from kdn.cache.keys import cut
from kdn.delivery.account import Why
from kdn.delivery.publish import Admission, Values
from kdn.delivery.sink import HostSink
from kdn.request_log import find
from kdn.session.decisions import MAX_RUNS, runs, unrolled
from kdn.session.session import Session
from tests.session.test_session import TOKENS, publish_all, settings, values, with_session


def told(folder: Path, *tests: Callable[[Session], Coroutine[Any, Any, Any]]) -> list[Any]:
    """What the log says of the last session's request."""
    for test in tests:

        async def named(session: Session, test: Any = test) -> None:
            with tracing.named("r"):
                await test(session)

        log = folder / "requests.jsonl"
        log.unlink(missing_ok=True)
        with_session(settings(folder / "data", request_log=log), named)
    return find(log, "r")


async def load(session: Session, **more: Any) -> None:
    chunks = cut(TOKENS, session.namespace)
    sink = HostSink.of(session.codec, chunks, torch.float32)
    await session.deliver(chunks, sink, **more)


def test_a_delivery_tells_what_was_planned_and_what_came_from_where(tmp_path: Path) -> None:
    [record] = told(tmp_path, publish_all, load)
    levels = record["levels"][0][0]
    assert (record["event"], record["start"], record["end"]) == ("deliver", 0, 688)
    assert record["levels"] == record["planned"] == [[levels, 3]]
    assert record["why"] == [[None, 3]]
    [source] = record["sources"]
    assert (source["name"], source["tokens"]) == (str(tmp_path / "data"), 688)
    assert sum(record["level_bytes"]) > 688
    assert record["deadline_s"] is None
    assert record["troubles"] == []


def test_a_miss_and_a_late_request_say_so(tmp_path: Path) -> None:
    [record] = told(tmp_path, load)
    assert (record["why"], record["levels"], record["sources"]) == ([["miss", 3]], [[0, 3]], [])
    [record] = told(tmp_path, publish_all, lambda session: load(session, deadline_s=0.0))
    assert record["why"] == [["no time", 3]]


def test_what_is_gone_says_so(tmp_path: Path) -> None:
    async def lost(session: Session) -> None:
        chunks = cut(TOKENS, session.namespace)
        known = await session.know(TOKENS)
        assert await session.places.publish_to.store.delete(chunks[2].key)
        sink = HostSink.of(session.codec, chunks, torch.float32)
        got = await session.deliver(chunks, sink, known=known, deadline_s=1.0)
        assert got.result is not None
        assert got.result.account.why == (None, None, Why.GONE)
        assert got.tokens_by_tier == {"host": 0, "folder": 512, "remote": 0}

    know, deliver = told(tmp_path, publish_all, lost)
    assert (know["event"], know["tokens"], know["known_tokens"]) == ("know", 700, 688)
    assert deliver["why"] == [[None, 2], ["gone", 1]]


def test_publishing_says_what_became_of_each_chunk(tmp_path: Path) -> None:
    async def publish(session: Session) -> None:
        chunks = cut(TOKENS, session.namespace)
        for chunk in chunks:
            session.publish(chunk, Values(values(chunks)), exact_until=512)
        assert await session.publisher.flush(10.0)

    records = told(tmp_path, publish)
    said = [one["said"] for one in records if one["event"] == "publish"]
    assert said == [Admission.QUEUED.value] * 2 + [Admission.LOSSY.value]
    assert sum(one["event"] == "accepted" for one in records) == 2


def test_no_log_no_file(tmp_path: Path) -> None:
    own = settings(tmp_path / "data", request_log=tmp_path / "log", request_log_bytes=0)
    with_session(own, publish_all)
    assert not (tmp_path / "log").exists()


def test_a_log_that_cannot_be_written_fails_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").mkdir()
    own = settings(tmp_path / "data", request_log=tmp_path / "log")

    async def test(session: Session) -> None:
        with tracing.named("r"):
            await publish_all(session)
            await load(session)

    with_session(own, test)
    assert "requests are not logged" in caplog.text


def test_no_line_has_tokens_secrets_or_whole_keys(tmp_path: Path) -> None:
    told(tmp_path, publish_all, load)
    with_session(settings(tmp_path / "data"), publish_all)
    text = (tmp_path / "requests.jsonl").read_text()
    assert ",".join(map(str, TOKENS[:4])) not in text.replace(" ", "")

    async def keys(session: Session) -> list[str]:
        return [chunk.key.hex() for chunk in cut(TOKENS, session.namespace)]

    for key in with_session(settings(tmp_path / "data"), keys):
        assert key not in text


def test_runs_are_short_and_can_be_read_again() -> None:
    levels = [3] * 14 + [4] + [0, 0]
    assert runs(levels) == [[3, 14], [4, 1], [0, 2]]
    assert unrolled(runs(levels)) == levels
    cut_off = runs([i % 2 for i in range(1000)])
    assert len(cut_off) == MAX_RUNS + 1
    assert cut_off[-1] == ["...", 1000 - MAX_RUNS]
