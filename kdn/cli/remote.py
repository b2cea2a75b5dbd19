"""`kdn ls`, `kdn show`, `kdn rm`: what is at a node. Nothing here needs torch."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from rich.console import Console
from rich.table import Table

from kdn.checked import checked_text, checked_url
from kdn.config import ClientSettings, load_config
from kdn.errors import StoreError
from kdn.names import checked_name
from kdn.store.tls import client_tls, explain

_KEY = re.compile(r"[0-9a-f]{32}")
MAX_ANSWER_BYTES = 2**28


class Remote:
    """Asks a node, one request per connection: these commands are for people."""

    def __init__(self, settings: ClientSettings):
        self._settings = settings
        self._parts = urlsplit(checked_url(settings.url))
        own = settings.credentials
        self._headers = {"Authorization": f"Bearer {own.token}"} if own.token else {}
        self._tls = client_tls(own.tls_ca)

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> bytes | None:
        """The body of a good answer; None if there is no such thing."""
        connection = self._connect()
        try:
            connection.request(method, path, headers={**self._headers, **(headers or {})})
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(f"the node at {self._settings.url}: {explain(error)}") from error
        finally:
            connection.close()
        if response.status == 404:
            return None
        if response.status >= 400:
            raise StoreError(f"the node at {self._settings.url}: {_message(body, response.status)}")
        return body

    def ask_json(self, method: str, path: str) -> Any:
        body = self.ask(method, path)
        try:
            return None if body is None else json.loads(body)
        except ValueError as error:
            raise StoreError(f"the node at {self._settings.url} does not speak JSON") from error

    def pages(self, path: str, member: str, **query: str) -> Iterator[dict[str, Any]]:
        after = ""
        while True:
            asked = urlencode({**query, **({"after": after} if after else {})})
            page = self.ask_json("GET", f"{path}?{asked}")
            yield from page[member]
            after = page["next"]
            if not after:
                return

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        timeout_s = self._settings.timeout_s
        if self._parts.scheme == "https":
            context = self._tls or ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


@dataclass(frozen=True)
class Whom:
    """Which node to ask, as flags tell; None: as the configuration tells."""

    config: Path | None = None
    url: str | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None


def _remote(whom: Whom) -> Remote:
    flags = {"url": whom.url, "token_file": whom.token_file, "tls_ca": whom.tls_ca}
    given = {f"client.{name}": value for name, value in flags.items()}
    return Remote(load_config(whom.config, given).client)


def list_all(whom: Whom, prefix: str, chunks: bool) -> None:
    remote = _remote(whom)
    query = {"prefix": checked_text("prefix", prefix)} if prefix else {}
    if chunks:
        table = Table("chunk", "bytes", "after", "saves")
        for item in remote.pages("/v1/chunks", "objects", **query):
            saves = f"{item['saved_s']:g} s" if item["saved_s"] else ""
            table.add_row(item["key"], f"{item['size_bytes']:,}", item["parent"] or "", saves)
    else:
        table = Table("name", "version", "written", "bytes")
        for item in remote.pages("/v1/names", "names", **query):
            written = _when(item["created_s"])
            table.add_row(item["name"], str(item["version"]), written, f"{item['size_bytes']:,}")
    Console().print(table)


def show_one(whom: Whom, what: str) -> None:
    remote = _remote(whom)
    if _KEY.fullmatch(what):
        _show_chunk(remote, what)
    else:
        _show_name(remote, what)


def _show_name(remote: Remote, name: str) -> None:
    checked_name(name)
    history = remote.ask_json("GET", f"/v1/names/{quote(name, safe='')}/history")
    manifest = remote.ask_json("GET", f"/v1/names/{quote(name, safe='')}")
    if history is None or manifest is None:
        raise StoreError(f"there is no name {name!r} here")
    console = Console()
    table = Table("version", "etag", "written", "bytes", title=name)
    for item in history["versions"]:
        size = f"{item['size_bytes']:,}"
        table.add_row(str(item["version"]), item["etag"], _when(item["created_s"]), size)
    console.print(table)
    for fingerprint, model in manifest.get("models", {}).items():
        console.print(
            f"model {fingerprint}: {len(model.get('chunks', []))} chunks", highlight=False
        )


def _show_chunk(remote: Remote, key: str) -> None:
    from kdn.codec.header import MAX_HEADER_BYTES, Header

    last = MAX_HEADER_BYTES - 1
    data = remote.ask("GET", f"/v1/chunks/{key}", {"Range": f"bytes=0-{last}"})
    if data is None:
        raise StoreError(f"there is no chunk {key} here")
    header = Header.parse(data)
    info = header.info
    table = Table("level", "sections", "bytes", "bytes so far", title=f"chunk {key}")
    before = header.size_bytes
    for level in range(info.num_levels):
        sections = [entry for entry in header.entries if entry.level == level]
        end = header.level_end(level)
        table.add_row(str(level), str(len(sections)), f"{end - before:,}", f"{end:,}")
        before = end
    console = Console(highlight=False)
    console.print(table)
    console.print(f"stream {header.stream_id.hex()}, {info.codec.name.lower()}, {info.dtype.name}")
    tokens = f"tokens [{info.start}, {info.start + info.num_tokens})"
    console.print(f"model {info.model.hex()}, {tokens}", markup=False)


def remove(whom: Whom, what: str, chunks: bool) -> None:
    remote = _remote(whom)
    console = Console(highlight=False)
    if _KEY.fullmatch(what):
        if remote.ask("DELETE", f"/v1/chunks/{what}") is None:
            raise StoreError(f"there is no chunk {what} here")
        console.print(f"deleted chunk {what}")
        return
    checked_name(what)
    answer = remote.ask_json(
        "DELETE", f"/v1/names/{quote(what, safe='')}?chunks={'true' if chunks else 'false'}"
    )
    if answer is None:
        raise StoreError(f"there is no name {what!r} here")
    counts = ", ".join(f"{len(answer[kind])} chunks {kind}" for kind in ("deleted", "kept"))
    console.print(f"deleted {what}" + (f": {counts}" if chunks else ""), markup=False)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
