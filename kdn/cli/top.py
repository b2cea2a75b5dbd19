"""`kdn top`: what the dashboard of a node shows, in a terminal. Nothing here needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kdn.cli.remote import Whom, client_settings
from kdn.errors import StoreError, UnavailableError
from kdn.store.http_answers import member
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.tls import client_tls

EVERY_S = 1.0
TENANTS, DELIVERIES = 12, 8
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
Json = dict[str, Any]


def run(whom: Whom, once: bool) -> None:
    console = Console()
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(whom, console, once or not console.is_terminal))


async def _watch(whom: Whom, console: Console, once: bool) -> None:
    settings = client_settings(whom)
    own, timeout_s = settings.credentials, settings.timeout_s
    limits = HttpLimits(1, timeout_s, timeout_s, timeout_s)
    tls = client_tls(own.tls_ca)
    client = NodeClient(settings.url, token=own.token, limits=limits, tls=tls)
    try:
        shown = board(await _ask(client), client.url)
        if once:
            console.print(shown)
            return
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(EVERY_S)
                try:
                    shown = board(await _ask(client), client.url)
                    live.update(shown, refresh=True)
                except UnavailableError as error:  # it may come back
                    live.update(Group(Text(plain(str(error)), style="red"), shown), refresh=True)
    finally:
        await client.close()


async def _ask(client: NodeClient) -> Json:
    found = (await client.ask("GET", "/v1/status")).json
    member(found, "health", dict)
    return dict(found)


def board(status: Json, url: str) -> RenderableType:
    """A whole screen of it. StoreError if whoever answers is no node of this version."""
    try:
        return Group(*_parts(status, url))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{url}: expected the status of a node: {error!r}") from error


def _parts(status: Json, url: str) -> Iterable[RenderableType]:
    yield _head(status, url)
    for problem in status["health"]["problems"]:
        colour = COLOURS.get(problem["severity"], "red")
        yield Text.assemble(("  ● ", colour), plain(problem["message"]))
    yield Text()
    yield _numbers(status)
    yield Text()
    yield _tiers(status)
    yield Text()
    yield _tenants(status)
    yield Text()
    if status["deliveries"]["number"]:
        yield _deliveries(status)
    if status["region"]:
        yield _region(status["region"])
    errors = {**status["errors"], **status["faults"]}
    if errors:
        words = ", ".join(f"{plain(code)} {number:,}" for code, number in errors.items())
        yield Text.assemble(("errors since start: ", "dim"), words)


def _head(status: Json, url: str) -> Text:
    node, health = status["node"], status["health"]["status"]
    words = "healthy" if health == "ok" else f"{len(status['health']['problems'])} problems"
    up = span(node["now_s"] - node["started_s"])
    return Text.assemble(
        ("● ", COLOURS.get(health, "red")), (words, "bold"),
        (f"   {plain(url)} · {plain(node['role'])} · version {plain(node['version'])}"
         f" · up {up}", "dim"),
    )  # fmt: skip


def _numbers(status: Json) -> Table:
    rates, traffic, known = status["rates"], status["traffic"], status["known"]
    ratio = rates["hit_ratio"] if rates["hit_ratio"] is not None else traffic["hit_ratio"]
    table = _table("served", "hit ratio", "requests", "p50", "p99", "received", "chunks", "names")
    table.add_row(
        f"{size(rates['sent_bytes_per_s'])}/s", share(ratio), f"{rates['requests_per_s']:,.1f}/s",
        seconds(traffic["p50_s"]), seconds(traffic["p99_s"]),
        f"{size(rates['received_bytes_per_s'])}/s", f"{known['chunks']:,}", f"{known['names']:,}",
    )  # fmt: skip
    return table


def _tiers(status: Json) -> Table:
    table = _table("tier", "objects", "bytes", "of", "hits", "evicted", "errors")
    for tier in status["tiers"]:
        name = tier["name"] + ("" if tier["answers"] else " (no answer)")
        table.add_row(
            cell(name), f"{tier['objects']:,}", size(tier["size_bytes"]),
            size(tier["capacity_bytes"]), f"{tier['hits']:,}", f"{tier['evictions']:,}",
            f"{tier['errors']:,}",
        )  # fmt: skip
    return table


def _tenants(status: Json) -> Table:
    table = _table("tenant", "stored", "names", "sent", "requests", "hits", "p50", "p99")
    for one in status["tenants"][:TENANTS]:
        rates, traffic = one["rates"], one["traffic"]
        table.add_row(
            cell(one["tenant"]), size(one["size_bytes"]), f"{one['names']:,}",
            f"{size(rates['sent_bytes_per_s'])}/s", f"{rates['requests_per_s']:,.1f}/s",
            share(traffic["hit_ratio"]), seconds(traffic["p50_s"]), seconds(traffic["p99_s"]),
        )  # fmt: skip
    return table


def _deliveries(status: Json) -> Table:
    table = _table("delivery to", "tenant", "sent", "of", "for")
    for one in status["deliveries"]["longest"][:DELIVERIES]:
        table.add_row(
            cell(one["client"]), cell(one["tenant"]), size(one["sent_bytes"]),
            size(one["asked_bytes"]), seconds(one["seconds"]),
        )  # fmt: skip
    return table


def _region(region: Json) -> Text:
    words = "answers" if region["centre_answers"] else "does not answer"
    waiting = f"{region['waiting_objects']:,} objects ({size(region['waiting_bytes'])})"
    ages = [feed["age_s"] for feed in region["feeds"]]
    behind = "unknown" if None in ages else seconds(max(ages, default=0.0))
    return Text(f"the centre {words}; {waiting} wait to be sent; names are {behind} behind")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def plain(value: str) -> str:
    """What others wrote, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "\ufffd" for one in str(value))


def cell(value: str) -> Text:
    """The same in a table, where a plain string would be read as markup."""
    return Text(plain(value))


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.1f} s"


def span(value: float) -> str:
    minutes, hours, days = (int(value // unit) for unit in (60, 3600, 86400))
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(value) % 60} s"
