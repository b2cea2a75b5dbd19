"""`kdn ls`, `show`, `rm`, `config` against a real node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from typer.testing import CliRunner
from xxhash import xxh3_64_intdigest

from kdn.cli.main import app
from kdn.codec.header import Header
from kdn.errors import StoreError, UnsupportedError
from kdn.node.tenants import token_hash
from kdn.places.places import open_places
from tests.node.harness import chunk_stream, config_for, key_of, running, tenant

KEYS = [key_of(number).hex() for number in (1, 2)]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A node in a thread of its own, with two chunks and a name that uses one of them."""
    ready, stop, found = Event(), Event(), [""]

    async def serve() -> None:
        async with running(config_for(tmp_path, tenant("ann", "secret"))) as node:
            for number in (1, 2):
                await node.put_chunk(number, token="secret", Kdn_Saved_Seconds="0.5")
            manifest = json.dumps({"models": {"aa": {"chunks": KEYS[:1]}}}).encode()
            await node.ask("PUT", "/v1/names/handbook", manifest, "secret")
            found[0] = node.url
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    yield found[0]
    stop.set()
    thread.join(20)


def kdn(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_folder_shows_what_a_node_would(tmp_path: Path) -> None:
    async def fill() -> None:
        async with open_places(tmp_path / "data") as places:
            stream = chunk_stream(key_of(1))
            await places.publish_to.store.put(
                key_of(1), stream, etag=Header.parse(stream).stream_id,
                checksum=xxh3_64_intdigest(stream),
            )  # fmt: skip
            await places.names.change("handbook", lambda _: {"models": {}})

    asyncio.run(fill())
    folder = f"--url={tmp_path / 'data'}"
    assert "handbook" in kdn("ls", folder)
    assert KEYS[0] in kdn("ls", "--chunks", folder)
    assert "tokens [0, 16)" in kdn("show", KEYS[0], folder)
    kdn("rm", "handbook", folder)
    assert "handbook" not in kdn("ls", folder)
    with pytest.raises(UnsupportedError, match="learned into"):
        kdn("ls", f"--url={tmp_path / 'typo'}")
    assert not (tmp_path / "typo").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedError, match="learned into"):
        kdn("ls", f"--url={tmp_path / 'empty'}")
    assert not list((tmp_path / "empty").iterdir())


def test_ls_show_rm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_CLIENT_URL", url)
    with pytest.raises(StoreError, match="token"):
        kdn("ls")
    monkeypatch.setenv("KDN_CLIENT_TOKEN", "secret")
    assert "handbook" in kdn("ls")
    assert "handbook" not in kdn("ls", "other")
    chunks = kdn("ls", "--chunks")
    assert all(key in chunks for key in KEYS)
    assert "0.5 s" in chunks
    shown = kdn("show", "handbook")
    assert "model aa: 1 chunks" in shown
    levels = kdn("show", KEYS[1])
    assert "klt" in levels
    assert "tokens [0, 16)" in levels
    assert "1 chunks deleted" in kdn("rm", "handbook", "--chunks")
    assert "handbook" not in kdn("ls")
    assert KEYS[0] not in kdn("ls", "--chunks")
    assert KEYS[1] in kdn("rm", KEYS[1])
    for command in (["show", "handbook"], ["show", KEYS[1]], ["rm", KEYS[1]], ["rm", "handbook"]):
        with pytest.raises(StoreError, match=r"no (name|chunk)"):
            kdn(*command)


def test_no_node_there() -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        kdn("ls", "--url", "http://127.0.0.1:9")


def test_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_NODE_PORT", "1234")
    shown = kdn("config")
    assert "1234" in shown
    assert "KDN_NODE_PORT" in shown
    lines = kdn("config", "--new-token", "ann").splitlines()
    token = lines[1].removeprefix("# ")
    path = tmp_path / "kdn.toml"
    path.write_text("\n".join(lines))
    assert token_hash(token) in lines[-1]
    assert "tenants.ann" in kdn("config", "--config", str(path))
    assert (
        kdn("config", "--new-token", "ann", "--right", "read")
        .splitlines()[-1]
        .startswith('read_tokens = ["sha256:')
    )
    with pytest.raises(UnsupportedError, match="publish"):
        kdn("config", "--new-token", "ann", "--right", "write")


def test_a_node_refuses_to_be_exposed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="without tokens"):
        kdn("node", "--host", "0.0.0.0", "--data", str(tmp_path))
