"""The request log: bounded, private, shared by processes, and never in anybody's way."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from kdn import request_log
from kdn.request_log import RequestLog, find, newest, older


def written(path: Path, *records: dict[str, object], max_bytes: int = 1 << 20) -> RequestLog:
    log = RequestLog(path, max_bytes)
    for record in records:
        log.add(record)
    log.close()
    return log


def test_lines_are_found_by_their_request(tmp_path: Path) -> None:
    path = tmp_path / "new" / "requests.jsonl"
    written(path, {"request": "a", "n": 1}, {"request": "b", "n": 2}, {"request": "a", "n": 3})
    assert [one["n"] for one in find(path, "a")] == [1, 3]
    assert [one["n"] for one in find(path, "b")] == [2]
    assert find(path, "c") == []
    assert newest(path, 5) == ["a", "b"]


def test_vllms_longer_ids_are_found_by_what_the_user_knows(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    written(path, {"request": "chatcmpl-7-0f3a"}, {"request": "chatcmpl-77"})
    assert [one["request"] for one in find(path, "chatcmpl-7")] == ["chatcmpl-7-0f3a"]


def test_it_is_this_users_alone_and_a_wider_mode_is_tightened(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.touch(mode=0o644)
    os.chmod(path, 0o644)
    written(path, {"request": "a"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find(path, "a")


def test_it_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, 4000)
    for number in range(200):
        log.add({"request": str(number), "padding": "x" * 50})
        log.close()
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 4000
    log.close()
    assert stat.S_IMODE(older(path).stat().st_mode) == 0o600
    assert find(path, "199")  # the newest are kept
    assert not find(path, "0")
    assert len(list(tmp_path.iterdir())) == 2


def test_several_writers_share_one_file(tmp_path: Path) -> None:
    """Each has its own descriptor and renames what is full; no line is torn, and none of a file
    that is still there is lost."""
    path = tmp_path / "requests.jsonl"
    logs = [RequestLog(path, 1 << 20) for _ in range(4)]

    def write(number: int) -> None:
        for count in range(100):
            logs[number].add({"request": f"w{number}", "count": count})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    for number in range(4):
        assert [one["count"] for one in find(path, f"w{number}")] == list(range(100))


def test_a_writer_goes_on_in_the_file_that_another_began(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, 1 << 20)
    log._write([b'{"request":"a"}\n'])
    path.rename(older(path))
    log._write([b'{"request":"b"}\n'])
    assert path.read_bytes() == b'{"request":"b"}\n'
    os.close(log._fd)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_what_is_no_file_of_ours_costs_lines_and_nothing_else(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "target").touch()
        path.symlink_to(tmp_path / "target")
    log = written(path, {"request": "a"}, {"request": "b"})
    assert log.dropped == 2
    assert "requests are not logged" in caplog.text
    if kind == "link":
        assert not (tmp_path / "target").read_bytes()


def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(request_log.os, "write", full)
    assert written(tmp_path / "requests.jsonl", {"request": "a"}).dropped == 1


def test_too_many_at_once_are_dropped_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(RequestLog, "_write", lambda self, lines: stuck.wait(30))
    log = RequestLog(tmp_path / "requests.jsonl", 1 << 20)
    for _ in range(3 * request_log.MAX_WAITING):
        log.add({"request": "a"})
    assert log.dropped >= request_log.MAX_WAITING
    stuck.set()
    log.close()


def test_what_is_no_record_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    good = json.dumps({"request": "a"}).encode()
    path.write_bytes(b'{"request":"a"\n[1]\n"a"\n\xff\xfe"a"\n' + b"a" * 100_000 + b"\n" + good)
    assert find(path, "a") == [{"request": "a"}]


def test_what_cannot_be_written_down_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    written(path, {"request": "a", "what": object()}, {"request": "b", "what": "x" * 20_000})
    assert path.read_bytes() == b""
