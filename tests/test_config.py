"""Settings: who wins, where each came from, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kdn.cli.config import rows
from kdn.config import ClientSettings, NodeSettings, load_config
from kdn.errors import UnsupportedError

HASH, OTHER, THIRD = ("sha256:" + digits * 32 for digits in ("ab", "cd", "ef"))


def write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    config = load_config(environ={})
    assert config.node == NodeSettings()
    assert config.client == ClientSettings()
    assert config.tenants == ()
    assert config.node.data == tmp_path / "cache" / "node"
    assert set(config.sources.values()) == {"default"}


def test_a_later_source_wins(tmp_path: Path) -> None:
    path = write(tmp_path, '[node]\nport = 1\nhost = "::1"\nmemory_bytes = "2 GiB"\n')
    environ = {"KDN_NODE_PORT": "2", "KDN_NODE_DISK_BYTES": "10GB", "KDN_CLIENT_TOKEN": "secret"}
    flags = {"node.port": 3, "node.data": Path("/d"), "node.insecure": None}
    config = load_config(path, flags, environ)
    assert (config.node.port, config.node.host) == (3, "::1")
    assert (config.node.memory_bytes, config.node.disk_bytes) == (2 * 2**30, 10**10)
    assert config.sources["node.port"] == "--port"
    assert config.sources["node.host"] == str(path)
    assert config.sources["node.disk_bytes"] == "KDN_NODE_DISK_BYTES"
    assert config.sources["node.insecure"] == "default"
    assert load_config(path, {}, environ).node.port == 2
    assert load_config(path, {}, {}).node.port == 1


def test_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kdn.toml").write_text("[node]\nport = 5\n")
    other = write(tmp_path, "[node]\nport = 6\n")
    assert load_config(environ={}).node.port == 5
    assert load_config(environ={"KDN_CONFIG": str(other)}).node.port == 6
    assert load_config(tmp_path / "kdn.toml", environ={"KDN_CONFIG": str(other)}).node.port == 5


def test_tenants(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f'[tenants.ann]\ntokens = ["{HASH}"]\nweight = 2\nquota_bytes = "1MB"\n'
        f'read_tokens = ["{OTHER}"]\n[tenants.bob]\noperate_tokens = ["{THIRD}"]\n',
    )
    ann, bob = load_config(path, environ={}).tenants
    assert (ann.name, ann.tokens, ann.weight) == ("ann", (HASH,), 2.0)
    assert (ann.quota_bytes, ann.requests_per_s, ann.read_tokens) == (10**6, 0.0, (OTHER,))
    assert (bob.tokens, bob.read_tokens, bob.operate_tokens) == ((), (), (THIRD,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[nodes]\n", "nodes"),
        ("[node]\nprot = 1\n", "prot"),
        ('[node]\nport = "many"\n', "node.port"),
        ("[node]\nport = -1\n", "node.port"),
        ("[node]\nport = true\n", "node.port"),
        ("[node]\nport = 1.5\n", "node.port"),
        ("[node]\nhost = 3\n", "node.host"),
        ('[node]\ninsecure = "perhaps"\n', "node.insecure"),
        ("[node]\nwrite_timeout_s = -1.0\n", "write_timeout_s"),
        ("[node]\nwrite_timeout_s = nan\n", "write_timeout_s"),
        ('[node]\nmemory_bytes = "5 apples"\n', "memory_bytes"),
        ("node = 3\n", "node"),
        ("[node\n", "own.toml"),
        ("[tenants.ann]\nweight = 1\n", "tokens"),
        ("[tenants.ann]\ntokens = []\n", "tokens"),
        ('[tenants.ann]\ntokens = ["plain token"]\n', "sha256"),
        (f'[tenants.ann]\ntokens = ["{HASH}"]\nweight = 0\n', "weight"),
        (f'[tenants.ann]\ntokens = ["{HASH}"]\ncolour = 1\n', "colour"),
        (f'[tenants."a b"]\ntokens = ["{HASH}"]\n', "a b"),
        (f'[tenants.a]\ntokens = ["{HASH}"]\n[tenants.b]\ntokens = ["{HASH}"]\n', "same token"),
        (f'[tenants.a]\ntokens = ["{HASH}"]\nread_tokens = ["{HASH}"]\n', "same token"),
        (f'[tenants.a]\nread_tokens = "{HASH}"\n', "a list of texts"),
        ('[tenants.a]\noperate_tokens = ["x"]\n', "sha256"),
        ("[tenants]\nann = 3\n", "ann"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        load_config(write(tmp_path, text), environ={})


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="KDN_NODE_PROT"):
        load_config(environ={"KDN_NODE_PROT": "1"})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", environ={})


def test_every_setting_is_shown_and_no_secret(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f'[client]\ntoken = "hush"\nsecret = "whisper"\n[tenants.ann]\ntokens = ["{HASH}"]\n',
    )
    shown = rows(load_config(path, environ={}))
    names = {name for name, _, _ in shown}
    assert {f"node.{item.name}" for item in fields(NodeSettings)} <= names
    assert {f"client.{item.name}" for item in fields(ClientSettings)} <= names
    text = repr(shown)
    assert "hush" not in text
    assert "whisper" not in text
    assert HASH not in text
    assert ("client.token", "(set)", str(path)) in shown
