"""`kdn explain --request`: the request log, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdn.cli.main import main
from kdn.cli.requests import REASONS, described
from kdn.delivery.account import Why

KNOW = {"time": 0, "request": "r", "event": "know", "tokens": 4096, "known_tokens": 3840,
        "chunks": 15, "held": 0, "late": False, "seconds": 0.0123}  # fmt: skip
DELIVER = {
    "time": 0, "request": "r", "event": "deliver", "start": 0, "end": 4096, "first": "aa", "last":
    "bb", "chunks": 16, "held": 1, "deadline_s": 2.0, "enough_kld": 0.0035, "levels":
    [[4, 1], [3, 12], [0, 3]], "planned": [[3, 13], [0, 2]], "plans": 4, "why":
    [[None, 12], ["deadline", 2], ["damaged", 1]], "sources": [{"name": "http://n:8470", "bytes":
    5_000_000, "tokens": 3072}], "failures": 1, "troubles": ["http://n:8470: silent\x1b[31m"],
    "seconds": 2.01,
}  # fmt: skip


def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], *records: Any) -> str:
    log = tmp_path / "requests.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--request", "r", "--log", str(log)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_a_request_is_told_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = explained(tmp_path, capsys, KNOW, DELIVER)
    for line in (
        "looked up 4,096 tokens: 3,840 are known in 15 chunks (12.3 ms)",
        "by a deadline of 2.00 s: took 2.01 s",
        "held by this host: the first 1 chunks",
        "planned levels: 3 for chunks 1 to 13, none for chunks 14 to 15, planned 4 times",
        "levels in the cache: 4 for chunk 0, 3 for chunks 1 to 12, none for chunks 13 to 15",
        "from http://n:8470: 5.00 MB, 3,072 tokens mostly from there",
        "the model reads chunks 13 to 14: deadline (the deadline came first)",
        "the model reads chunk 15: damaged (they arrived damaged)",
        "trouble: http://n:8470: silent?[31m",
    ):
        assert line in shown
    assert "\x1b" not in shown


def test_publishing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"time": 0, "request": "r", "chunk": "abc", "start": 0, "end": 256}
    shown = explained(
        tmp_path, capsys, {**own, "event": "publish", "said": "queued"},
        {**own, "event": "accepted"}, {**own, "event": "refused", "why": "quota_exceeded"},
    )  # fmt: skip
    assert "published the chunk abc, tokens 0 to 256: queued" in shown
    assert "the place has the chunk abc" in shown
    assert "given up: quota_exceeded" in shown


def test_an_unknown_request_is_refused_with_the_newest_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_text(json.dumps({**KNOW, "request": "other"}) + "\n")
    with pytest.raises(SystemExit):
        main(["explain", "--request", "r", "--log", str(log)])
    assert "the newest there are other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "--request", "r", "text.txt"])
    with pytest.raises(SystemExit):
        main(["explain", "--log", str(log), "text.txt"])


def test_what_another_version_wrote_is_shown_as_it_is() -> None:
    for record in ({"event": "dream", "time": 0}, {"event": "know", "time": 0}):
        [line] = described(record)
        assert record["event"] in line


def test_every_reason_has_words() -> None:
    assert {why.value for why in Why} <= REASONS.keys()
