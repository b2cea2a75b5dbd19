"""Which spool a session gets: its place's, its tenant's, its secret's, or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kdn.cache.keys import Namespace
from kdn.credentials import Credentials
from kdn.delivery.endpoints import Endpoint
from kdn.errors import StoreError
from kdn.session.settings import SessionSettings
from kdn.session.spooling import open_spool
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore

TOKEN = "a-token-of-a-tenant"


def at(url: str, *, local: bool = False) -> Endpoint:
    return Endpoint(MemoryStore(1000, open_policy("lru")), name=url, local=local)


def settings(folder: Path | None, token: str | None = TOKEN, spool_bytes: int = 1 << 20) -> (
    SessionSettings
):  # fmt: skip
    own = SessionSettings(("http://a",), Credentials(token), spool_bytes=spool_bytes)
    return replace(own, spool_folder=folder)


def roots(folder: Path, url: str, token: str | None = TOKEN, secret: bytes = b"mine") -> set[str]:
    """Names of those that are there afterwards."""
    spool = open_spool(settings(folder, token), at(url), Namespace(b"m" * 16, b"", secret=secret))
    assert spool is not None
    spool.close()
    return {path.name for path in folder.iterdir()}


def test_one_for_each_place_token_and_secret(tmp_path: Path) -> None:
    found = [
        roots(tmp_path / str(number), *given)
        for number, given in enumerate(
            [
                ("http://a",), ("http://a/",), ("http://b",), ("http://a", "another"),
                ("http://a", None), ("http://a", TOKEN, b"yours"),
            ]
        )
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len({name for names in found for name in names}) == 5
    assert all(len(names) == 1 for names in found)
    assert not any(TOKEN in name or TOKEN.encode().hex() in name for name in found[0])


def test_none_for_a_folder_or_without_room(tmp_path: Path) -> None:
    namespace = Namespace(b"m" * 16, b"")
    assert open_spool(settings(tmp_path), at("/data", local=True), namespace) is None
    assert open_spool(settings(tmp_path, spool_bytes=0), at("http://a"), namespace) is None


def test_a_user_without_a_home_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("KDN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert open_spool(settings(None), at("http://a"), Namespace(b"m" * 16, b"")) is None
    assert "wait in memory, not on disk: Could not determine home" in caplog.text


def test_a_folder_that_was_asked_for_has_to_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot spool in"):
        open_spool(settings(tmp_path / "file"), at("http://a"), Namespace(b"m" * 16, b""))
