"""Stores by their URLs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kdn.credentials import Credentials
from kdn.errors import UnsupportedError
from kdn.store.http import HttpStore
from kdn.store.opening import is_store_url, open_remote, scheme_of
from kdn.store.static import StaticStore


@pytest.mark.parametrize(
    ("text", "scheme", "is_store"),
    [
        ("s3://bucket/prefix", "s3", True),
        ("S3://bucket", "s3", True),
        ("gs://bucket", "gs", True),
        ("az://container", "az", True),
        ("file:///srv/kdn", "file", True),
        ("redis://localhost:6379/0", "redis", True),
        ("valkeys+cluster://a:1,b:2", "valkeys+cluster", True),
        ("redis+sentinel://a:1,b:2/service", "redis+sentinel", True),
        ("http://localhost:8700", "http", False),
        ("https://host/path", "https", False),
        ("ftp://host", "ftp", False),
        ("s3:/bucket", "", False),
        ("/srv/s3://bucket", "", False),
        ("~/kdn", "", False),
        ("", "", False),
    ],
)
def test_says_what_a_text_names(text: str, scheme: str, is_store: bool) -> None:
    assert (scheme_of(text), is_store_url(text)) == (scheme, is_store)


def test_opens_a_node_without_asking_it() -> None:
    async def test() -> None:
        store = open_remote("http://127.0.0.1:9", Credentials(token="t"))
        assert isinstance(store, HttpStore)
        await store.close()
        export = open_remote("https://127.0.0.1:9/some/path", Credentials(token="t"))
        assert isinstance(export, StaticStore)
        await export.close()

    asyncio.run(test())


@pytest.mark.parametrize("url", ["ftp://host", "/srv/kdn", ""])
def test_names_what_it_cannot_open(url: str) -> None:
    with pytest.raises(UnsupportedError, match="expected the URL of a store"):
        open_remote(url, Credentials())


@pytest.mark.parametrize(("url", "extra"), [("s3://b", "kdn[s3]"), ("redis://h", "kdn[redis]")])
def test_names_what_to_install(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdn.store.opening.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as raised:
        open_remote(url, Credentials())
    assert extra in str(raised.value)


def test_opens_a_folder_of_objects(tmp_path: Path) -> None:
    async def test() -> None:
        store = open_remote(f"file://{tmp_path}/objects", Credentials())
        assert await store.lookup([b"key"]) == [None]
        await store.close()

    asyncio.run(test())
