"""`kdn ls`, `kdn show`, `kdn rm`: what is at a node or in a folder. Nothing here needs torch."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kdn.checked import checked_name, checked_text, shown
from kdn.config import ClientSettings, load_config
from kdn.errors import StoreError, UnsupportedError
from kdn.places.places import Places, is_folder, open_places
from kdn.store.node_client import HttpLimits

NO_LIMIT = 1 << 62
"""Bytes: to look into a folder must not make it smaller."""
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Whom:
    """Which node to ask, as flags tell; None: as the configuration tells."""

    config: Path | None = None
    url: str | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None


def client_settings(whom: Whom) -> ClientSettings:
    flags = {"url": whom.url, "token_file": whom.token_file, "tls_ca": whom.tls_ca}
    given = {f"client.{name}": value for name, value in flags.items()}
    return load_config(whom.config, given).client


def _ask(whom: Whom, question: Callable[[Places], Awaitable[None]]) -> None:
    settings = client_settings(whom)
    if is_folder(settings.url) and not os.path.isfile(names_file(settings.url)):
        raise UnsupportedError(
            "expected the URL of a node, or a folder that something was learned into, found "
            f"{shown(settings.url)}"
        )
    own, timeout_s = settings.credentials, settings.timeout_s
    limits = HttpLimits(connect_s=timeout_s, silence_s=timeout_s, deadline_s=timeout_s)

    async def work() -> None:
        places = open_places(
            settings.url, token=own.token, tls_ca=own.tls_ca, limits=limits, memory_bytes=0,
            disk_bytes=NO_LIMIT,
        )  # fmt: skip
        async with places as opened:
            await question(opened)

    asyncio.run(work())


def names_file(folder: str) -> str:
    return os.path.join(os.path.expanduser(folder), "names.sqlite")


def list_all(whom: Whom, prefix: str, chunks: bool) -> None:
    if prefix:
        checked_text("prefix", prefix)

    async def work(at: Places) -> None:
        Console().print(await (_chunks if chunks else _names)(at, prefix))

    _ask(whom, work)


async def _chunks(at: Places, prefix: str) -> Table:
    if not re.fullmatch("([0-9a-f]{2})*", prefix):
        raise UnsupportedError(f"prefix: expected pairs of hex digits, found {shown(prefix)}")
    table = Table("chunk", "bytes", "after", "saves")
    async for entry in at.publish_to.store.list(bytes.fromhex(prefix)):
        parent, saved_s = entry.hints.parent or b"", entry.hints.saved_s
        saves = f"{saved_s:g} s" if saved_s else ""
        table.add_row(entry.key.hex(), f"{entry.size_bytes:,}", parent.hex(), saves)
    return table


async def _names(at: Places, prefix: str) -> Table:
    table = Table("name", "version", "written", "bytes")
    async for about in at.names.list(prefix):
        written, size = _when(about.created_s), f"{about.size_bytes:,}"
        table.add_row(about.name, str(about.version), written, size)
    return table


def show_one(whom: Whom, what: str, latest: bool = False) -> None:
    async def work(at: Places) -> None:
        if _KEY.fullmatch(what):
            await _show_chunk(at, what)
        else:
            await _show_name(at, what, latest)

    _ask(whom, work)


async def _show_name(at: Places, name: str, latest: bool) -> None:
    newest = await at.names.get(checked_name(name), latest=latest)
    history = await at.names.history(name)
    if not history or newest is None:
        raise StoreError(f"there is no name {name!r} here")
    console = Console()
    table = Table("version", "etag", "written", "bytes", title=name)
    for about in history:
        size = f"{about.size_bytes:,}"
        table.add_row(str(about.version), about.etag, _when(about.created_s), size)
    console.print(table)
    for fingerprint, model in newest.manifest.get("models", {}).items():
        chunks = len(model.get("chunks", []))
        console.print(f"model {fingerprint}: {chunks} chunks", highlight=False, markup=False)


async def _show_chunk(at: Places, key: str) -> None:
    from kdn.codec.header import MAX_HEADER_BYTES, Header

    span = await at.publish_to.store.get(bytes.fromhex(key), 0, MAX_HEADER_BYTES)
    if span is None:
        raise StoreError(f"there is no chunk {key} here")
    header = Header.parse(bytes(span.data))
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
    console = Console(highlight=False)

    async def work(at: Places) -> None:
        if _KEY.fullmatch(what):
            if not await at.publish_to.store.delete(bytes.fromhex(what)):
                raise StoreError(f"there is no chunk {what} here")
            console.print(f"deleted chunk {what}")
            return
        report = await at.names.delete(checked_name(what), chunks=chunks)
        if report is None:
            raise StoreError(f"there is no name {what!r} here")
        counts = ", ".join(f"{len(report[kind])} chunks {kind}" for kind in ("deleted", "kept"))
        console.print(f"deleted {what}" + (f": {counts}" if chunks else ""), markup=False)

    _ask(whom, work)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
