"""What was found in files is remembered as long as they stay as they are, and never longer."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdn.engines import remembered as module
from kdn.engines.remembered import MAX_ENTRIES, remembered

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SETTLED_S", -1.0)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    return path


def finds(value: bytes) -> Callable[[], bytes]:
    return lambda: value


def test_files_that_stay(weights: Path, tmp_path: Path) -> None:
    assert remembered([weights], "a", finds(ONE)) == ONE
    assert remembered([weights], "a", finds(TWO)) == ONE
    assert remembered([weights], "b", finds(TWO)) == TWO
    assert remembered([weights], "a", finds(TWO)) == ONE
    path = tmp_path / "cache" / "fingerprints.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not list(path.parent.glob("*.part"))


def test_files_that_change(weights: Path) -> None:
    before = weights.stat()
    assert remembered([weights], "", finds(ONE)) == ONE
    time.sleep(0.02)  # clocks of file systems are coarse: see SETTLED_S
    weights.write_bytes(b"abd")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as some tools copy
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert remembered([weights], "", finds(TWO)) == TWO


def test_a_file_put_in_place_of_another(weights: Path) -> None:
    assert remembered([weights], "", finds(ONE)) == ONE
    other = weights.with_name("other")
    other.write_bytes(b"abd")
    other.replace(weights)
    assert remembered([weights], "", finds(TWO)) == TWO


def test_files_that_change_while_they_are_read(weights: Path) -> None:
    def read() -> bytes:
        weights.write_bytes(b"abcd")
        return ONE

    assert remembered([weights], "", read) == ONE
    assert remembered([weights], "", finds(TWO)) == TWO


def test_what_has_just_changed_is_not_remembered(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 60.0)
    assert remembered([weights], "", finds(ONE)) == ONE
    assert remembered([weights], "", finds(TWO)) == TWO


@pytest.mark.parametrize("bad", [b"", b"{", b"[]", b'{"a": 3}', b'{"a": "zz"}', b"[" * 9999])
def test_what_makes_no_sense_is_ignored(bad: bytes, weights: Path, tmp_path: Path) -> None:
    remembered([weights], "", finds(ONE))
    (tmp_path / "cache" / "fingerprints.json").write_bytes(bad)
    assert remembered([weights], "", finds(TWO)) == TWO
    assert remembered([weights], "", finds(ONE)) == TWO


def test_no_more_than_so_many(weights: Path) -> None:
    for number in range(MAX_ENTRIES + 1):
        remembered([weights], number, finds(ONE))
    assert remembered([weights], 1, finds(TWO)) == ONE
    assert remembered([weights], 0, finds(TWO)) == TWO


def test_a_folder_that_cannot_be(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "file" / "cache"))
    assert remembered([weights], "", finds(ONE)) == ONE
    assert remembered([weights], "", finds(TWO)) == TWO


def test_one_reads_and_the_others_wait(weights: Path) -> None:
    reads, found = [], []

    def read() -> bytes:
        reads.append(1)
        time.sleep(0.1)
        return ONE

    def start() -> None:
        found.append(remembered([weights], "", read))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [ONE] * 4
    assert len(reads) == 1


def test_nobody_waits_for_ever(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.1)

    def read() -> bytes:
        return remembered([weights], "", finds(ONE))  # the lock is taken: by ourselves

    assert remembered([weights], "", read) == ONE
