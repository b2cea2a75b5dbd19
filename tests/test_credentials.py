"""Tokens and secrets from files, the environment and arguments: found, checked, never shown."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

from kdn.cli.config import rows
from kdn.config import ClientSettings, NodeSettings, find_credentials, load_config
from kdn.credentials import Credentials, secret_from, token_from
from kdn.errors import KdnError, UnsupportedError

HUSH = "Hu5h"
"""What must not show anywhere."""


def private(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "token"),
    [(b"abc", "abc"), (b"abc\n", "abc"), (b"abc\r\n", "abc"), (b"x" * 1024 + b"\n", "x" * 1024)],
)
def test_a_token_in_a_file(tmp_path: Path, content: bytes, token: str) -> None:
    assert token_from(None, private(tmp_path / "t", content)) == token


@pytest.mark.parametrize(
    ("content", "secret"),
    [(b"a b\n", b"a b"), (b"\x00\xff\r", b"\x00\xff\r"), (b"x\n\n", b"x\n"),
     (b"k" * 64, b"k" * 64)],
)  # fmt: skip
def test_a_secret_in_a_file_is_any_bytes_less_one_line_break(
    tmp_path: Path, content: bytes, secret: bytes
) -> None:
    assert secret_from(None, private(tmp_path / "s", content)) == secret


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        (token_from, b"", "empty"),
        (token_from, b"\n", "empty"),
        (token_from, f"{HUSH}\n{HUSH}".encode(), "visible ASCII"),
        (token_from, f"{HUSH} x".encode(), "visible ASCII"),
        (token_from, f"{HUSH}\xe9".encode(), "visible ASCII"),
        (token_from, HUSH.encode() * 300, "at most 1024"),
        (secret_from, b"\n", "empty"),
        (secret_from, HUSH.encode() * 17, "at most 64"),
        (token_from, None, "No such file"),
        (secret_from, None, "No such file"),
    ],
)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, kind: Any, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        private(path, content)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        kind(None, path)
    assert str(path) in str(caught.value)
    assert HUSH not in "".join(traceback.format_exception(caught.value))


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "a\0b", "", 5):
        with pytest.raises(UnsupportedError, match="token_file"):
            token_from(None, path)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "a b", "a\r\nKdn-Client: me", "\xe9", "x" * 1025, 5, b"x"])
def test_bad_tokens(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="token: expected"):
        token_from(value, None)


@pytest.mark.parametrize("value", [b"", b"x" * 65, "text", 5])
def test_bad_secrets(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="secret: expected"):
        secret_from(value, None)


def test_a_file_that_others_may_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token_from(None, private(tmp_path / "own", HUSH.encode(), 0o640))
    assert caplog.messages == []
    token_from(None, private(tmp_path / "shared", HUSH.encode(), 0o644))
    [message] = caplog.messages
    assert "shared" in message
    assert "chmod 600" in message
    assert HUSH not in message


def test_given_before_environment(tmp_path: Path) -> None:
    file, other = private(tmp_path / "f", b"filed"), private(tmp_path / "o", b"other")
    environ = {"KDN_CLIENT_TOKEN": "env", "KDN_CLIENT_SECRET_FILE": str(other)}
    environ |= {"KDN_CLIENT_TLS_CA": "/ca"}
    assert find_credentials(environ={}) == Credentials()
    assert find_credentials(environ=environ) == Credentials("env", b"other", "/ca")
    given = find_credentials(token_file=file, secret=b"own", tls_ca="/my", environ=environ)
    assert given == Credentials("filed", b"own", "/my")
    gone = {"KDN_CLIENT_TOKEN_FILE": str(tmp_path / "gone")}
    assert find_credentials(token="own", environ=gone).token == "own"
    for wrong in ({"token": "a", "token_file": file}, {"secret": b"a", "secret_file": file}):
        with pytest.raises(UnsupportedError, match="found both"):
            find_credentials(**wrong, environ={})  # type: ignore[arg-type]
    both = {"KDN_CLIENT_TOKEN": HUSH, "KDN_CLIENT_TOKEN_FILE": str(file)}
    with pytest.raises(UnsupportedError, match="found both") as caught:
        find_credentials(environ=both)
    assert HUSH not in str(caught.value)
    with pytest.raises(UnsupportedError, match="KDN_CLIENT_TOKN"):
        find_credentials(environ={"KDN_CLIENT_TOKN": "x"})


def test_a_later_source_replaces_a_credential_in_whichever_way(tmp_path: Path) -> None:
    file = private(tmp_path / "f", b"filed")
    path = private(
        tmp_path / "kdn.toml",
        b'[client]\ntoken = "plain"\nsecret_file = "/gone"\n[node]\nupstream_token = "up"\n',
    )
    config = load_config(path, environ={})
    assert config.client.token == "plain"
    environ = {"KDN_CLIENT_TOKEN_FILE": str(file), "KDN_CLIENT_SECRET": "s\udcff"}
    environ |= {"KDN_NODE_UPSTREAM_TOKEN_FILE": str(file)}
    config = load_config(path, environ=environ)
    assert config.client.credentials == Credentials("filed", b"s\xff")
    assert config.node.upstream_credentials == Credentials("filed")
    assert config.sources["client.token_file"] == "KDN_CLIENT_TOKEN_FILE"
    assert config.sources["client.token"] == "default"
    environ = {"KDN_CLIENT_TOKEN": "env", "KDN_CLIENT_SECRET": "s"}
    config = load_config(path, {"client.token_file": file}, environ)
    assert config.client.credentials.token == "filed"
    assert config.sources["client.token_file"] == "--token-file"
    private(path, b'[client]\ntoken = "plain"\ntoken_file = "/x"\n')
    with pytest.raises(UnsupportedError, match="found both"):
        load_config(path, environ={})


@pytest.mark.parametrize(
    "text",
    [f'[client]\ntoken = ["{HUSH}"]', f'[client]\nsecret = {{a = "{HUSH}"}}',
     f'[node]\nupstream_token = ["{HUSH}"]', f'[[client]]\ntoken = "{HUSH}"',
     f'[client]\ntoken = "{HUSH} two"', f'[client]\nsecret = "{HUSH * 20}"',
     f'[node]\nupstream_token = "{HUSH}\\n"'],
)  # fmt: skip
def test_errors_do_not_show_it(tmp_path: Path, text: str) -> None:
    path = private(tmp_path / "kdn.toml", text.encode())

    def use() -> tuple[Credentials, Credentials]:
        config = load_config(path, environ={})
        return config.client.credentials, config.node.upstream_credentials

    with pytest.raises(KdnError) as caught:
        use()
    assert HUSH not in "".join(traceback.format_exception(caught.value))


def test_nothing_shows_in_a_repr(tmp_path: Path) -> None:
    path = private(
        tmp_path / "kdn.toml",
        f'[client]\ntoken = "{HUSH}"\nsecret = "{HUSH}"\n[node]\nupstream_token = "{HUSH}"\n'
        .encode(),
    )  # fmt: skip
    config = load_config(path, environ={})
    assert isinstance(config.client, ClientSettings)
    assert isinstance(config.node, NodeSettings)
    assert HUSH not in repr(config) + repr(config.client.credentials)


def test_a_settings_file_with_a_token_is_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    load_config(private(tmp_path / "kdn.toml", b"[node]\nport = 1\n", 0o644), environ={})
    assert caplog.messages == []
    load_config(private(tmp_path / "kdn.toml", b'[client]\ntoken = "a"\n', 0o644), environ={})
    [message] = caplog.messages
    assert "chmod 600" in message


def test_a_password_in_a_url_is_not_shown(tmp_path: Path) -> None:
    environ = {"KDN_CLIENT_URL": f"http://me:{HUSH}@host", "KDN_NODE_UPSTREAM": f"http://{HUSH}@h"}
    assert HUSH not in repr(rows(load_config(environ=environ)))
