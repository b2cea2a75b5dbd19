"""The dashboard in a real browser: it renders, follows, escapes, and asks for a token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from math import sin
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kdn.background import faults
from kdn.codec.header import MAGIC, MODEL_AT
from kdn.config import TenantSettings
from kdn.depot.names import make_version
from kdn.node.status.history import OWN_CODES, STEP_S, Sample
from kdn.store.base import Entry
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import Tier, TieredStore
from tests.node.browser import browser, needs_browser, tab
from tests.node.harness import Running, chunk_stream, key_of, tenant, with_node

HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "\u202egpj.exe\u202c invoice \u05e9\u05dc\u05d5\u05dd",
    "javascript:alert(1)//" + "long-" * 60,
    "{{constructor.constructor('return 1')()}}",
)


@pytest.fixture(autouse=True)
def _needs_browser() -> None:
    needs_browser()
    faults.clear()  # of other tests of this process, of which a status would tell


def dashboard(
    folder: Path,
    work: Callable[[Running, Any], Awaitable[None]],
    *tenants: TenantSettings,
    **settings: Any,
) -> None:
    async def test(node: Running) -> None:
        async with browser() as chromium:
            await work(node, chromium)

    with_node(folder, test, *tenants, **settings)


async def put_name(node: Running, name: str, chunks: range, token: str | None = None) -> None:
    manifest = {"models": {"6d" * 16: {"chunks": [key_of(n).hex() for n in chunks]}}}
    status, _, body = await node.ask(
        "PUT", f"/v1/names/{name}", json.dumps(manifest).encode(), token
    )
    assert status in (200, 201), body


async def plant(node: Running, names: list[str], chunks: range = range(0)) -> None:
    """Names that no API accepts, past it: as if the store of names were somebody else's."""
    manifest = {"models": {"6d" * 16: {"chunks": [key_of(n).hex() for n in chunks]}}}
    data = json.dumps(manifest).encode()

    def insert(db: Any) -> None:
        db.execute("INSERT OR IGNORE INTO totals (tenant) VALUES ('public')")
        db.execute("UPDATE totals SET names = names + ? WHERE tenant = 'public'", (len(names),))
        for name in names:
            made = make_version(name, 1, time.time(), data)
            row = ("public", name, 1, made.etag, made.created_s, data)
            db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)", row)

    await node.node.depot.names._run("public", insert)


def test_it_renders_and_follows_what_happens(tmp_path: Path) -> None:
    async def work(node: Running, chromium: Any) -> None:
        async with tab(chromium, node.url) as seen:
            await seen.until("#verdict", "Healthy")
            await seen.until("#state", "live")
            assert "Nothing is being sent." in await seen.text("#board")
            assert "0\nchunks" in await seen.text("#facts")
            await seen.picture("empty")
            stream = await node.put_chunk(1)
            await put_name(node, "handbook", range(1, 3))
            await seen.until("#facts", "1\nchunks")
            await seen.until("#names", "handbook")
            await seen.until("#models", "1 chunk")
            await node.ask("GET", f"/v1/chunks/{key_of(1).hex()}")
            await seen.until("#sent-total", f"{(len(stream) + 100) / 1e3:.1f}".split(".")[0])
            await seen.page.click("text=handbook")
            await seen.until("#detail", "levels 1 to 3")
            told = await seen.text("#detail")
            assert "1\nchunks are not here" in told
            assert "16\ntokens" in told
            await seen.page.keyboard.press("Escape")
            await seen.page.click("#tenants button")
            await seen.until("#detail", "Reads by tier")

    dashboard(tmp_path, work)


def test_it_polls_where_there_is_no_stream(tmp_path: Path) -> None:
    async def work(node: Running, chromium: Any) -> None:
        async with AsyncExitStack() as listeners:  # all places are taken
            for _ in range(16):
                listeners.enter_context(node.node.status.listener())
            async with tab(chromium, node.url) as seen:
                await seen.until("#state", "polling")
                await node.put_chunk(1)
                await seen.until("#facts", "1\nchunks")

    dashboard(tmp_path, work)


def test_a_hundred_thousand_chunks_and_a_thousand_names(tmp_path: Path) -> None:
    async def work(node: Running, chromium: Any) -> None:
        store, [owner] = node.node.depot.store, node.node.tenants
        for number in range(100_000):
            key = owner.store_key("chunks", key_of(number))
            await put_directly(store, key, header(bytes([number % 3]) * 16))
        await plant(node, [f"context-{number:04}" for number in range(1000)])
        async with tab(chromium, node.url) as seen:
            await seen.until("#facts", "100,000\nchunks")
            await seen.until("#facts", "1,000\nnames")
            assert await seen.page.locator("#names tr").count() == 50
            await seen.page.click("#more-names")
            await seen.page.wait_for_function(
                "() => document.querySelectorAll('#names tr').length == 100"
            )
            await seen.page.fill("#filter", "context-07")
            await seen.until("#names", "context-0700")
            assert "context-0000" not in await seen.text("#names")
            await seen.page.fill("#filter", "no such name!")
            await seen.until("#no-names", "letters, digits")
            began_s = time.process_time()
            told = await node.node.status.snapshot()
            assert time.process_time() - began_s < 0.1  # it goes through no chunk
            assert told["known"]["chunks"] == 100_000

    dashboard(tmp_path, work)


def header(model: bytes, more_bytes: int = 0) -> bytes:
    """As much of one as tells the model."""
    return MAGIC + bytes(MODEL_AT.start - len(MAGIC)) + model[:16] + bytes(more_bytes)


async def put_directly(store: Any, key: bytes, data: bytes) -> None:
    from xxhash import xxh3_64_intdigest

    await store.put_entry(Entry(key, b"e", len(data)), data, xxh3_64_intdigest(data))


def test_hostile_names_are_shown_and_not_run(tmp_path: Path) -> None:
    async def work(node: Running, chromium: Any) -> None:
        await node.put_chunk(1)
        await plant(node, list(HOSTILE), range(1, 2))
        for code in HOSTILE[:2]:
            node.node.traffic.refused("public", code)
        node.node.traffic.of("public").levels[1] = 3
        async with tab(chromium, node.url) as seen:
            await seen.until("#names", "<script>document.title")
            await seen.until("#errors", "<img src=x")
            assert await seen.page.locator("#board img, #board script").count() == 0
            shown = await seen.page.eval_on_selector_all(
                "#names bdi", "all => all.map(one => one.textContent)"
            )
            assert "\ufffdgpj.exe\ufffd invoice \u05e9\u05dc\u05d5\u05dd" in shown
            widths = await seen.page.evaluate("[document.body.scrollWidth, innerWidth]")
            assert widths[0] <= widths[1]  # the long one does not push the page apart
            await seen.picture("hostile")
            await seen.page.click("text=<img src=x onerror >> nth=0")
            await seen.until("#detail", "levels 1 to 3")
            assert await seen.page.locator("#detail img").count() == 0
            assert "owned" not in await seen.page.title()

    dashboard(tmp_path, work)


def test_a_node_with_tenants_asks_for_the_operators_token(tmp_path: Path) -> None:
    tenants = (
        tenant("research", "tok-operator-5e1f", "operate_tokens"),
        tenant("support", "tok-publisher-77aa"),
    )

    async def work(node: Running, chromium: Any) -> None:
        await node.put_chunk(1, token="tok-publisher-77aa")
        await put_name(node, "secret-plans", range(1, 2), "tok-publisher-77aa")
        async with tab(chromium, node.url) as seen:
            await seen.page.wait_for_selector("#token")
            assert "secret-plans" not in await seen.page.content()
            for wrong, words in (
                ("tok-publisher-77aa", "may publish"),
                ("nobody", "valid bearer token"),
            ):
                await seen.page.fill("#token", wrong)
                await seen.page.click("#sign-in button")
                await seen.until("#said", words)
                assert "support" not in await seen.page.content()
            await seen.page.fill("#token", "tok-operator-5e1f")
            await seen.page.click("#sign-in button")
            await seen.until("#tenants", "support")
            await seen.page.select_option("#whose", "support")
            await seen.until("#names", "secret-plans")
            kept = await seen.page.evaluate("[localStorage.length, sessionStorage.length]")
            assert kept == [0, 1]
            assert await seen.page.evaluate("document.cookie") == ""
            content = await seen.page.content()
            assert not any(
                one in content for one in ("tok-operator-5e1f", "sha256:", "tok-publisher")
            )
            await seen.page.click("#sign-out")
            await seen.page.wait_for_selector("#token")
            assert await seen.page.evaluate("sessionStorage.length") == 0
            assert not any("tok-" in url for url in seen.requested)

    dashboard(tmp_path, work, *tenants)


def test_a_busy_node_on_a_desk_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    tenants = [tenant(name, name, "operate_tokens") for name in ("research", "support", "batch")]

    async def work(node: Running, chromium: Any) -> None:
        await fill(node)
        reading = [asyncio.create_task(slow_read(node, name)) for name in ("research", "support")]
        try:
            for name, looks in (
                ("busy", {}), ("dark", {"dark": True}), ("phone", {"phone": True}),
            ):  # fmt: skip
                async with tab(chromium, node.url, **looks) as seen:
                    await seen.page.fill("#token", "research")
                    await seen.page.click("#sign-in button")
                    await seen.until("#deliveries", "engine-support")
                    await seen.page.wait_for_selector("#models .bar")
                    await seen.page.wait_for_function(
                        "() => document.querySelector('#counting').textContent === ''"
                    )
                    await seen.until("#evictions", "to make room")
                    widths = await seen.page.evaluate("[document.body.scrollWidth, innerWidth]")
                    assert widths[0] <= widths[1]
                    ground = await seen.page.evaluate("getComputedStyle(document.body).background")
                    assert ("rgb(18, 20, 22)" in ground) == (name == "dark")
                    await seen.picture(name)
                    await seen.page.select_option("#whose", "research")
                    await seen.page.click("text=handbook")
                    await seen.until("#detail", "levels 1 to 3")
                    if name == "busy":
                        await seen.picture("name", whole=False)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def store() -> TieredStore:
        memory, disk = (MemoryStore(size, open_policy("lru")) for size in (2**21, 2**23))
        return TieredStore([Tier("memory", memory, 1.0), Tier("disk", disk, 1.0)])

    async def test(node: Running) -> None:
        async with browser() as chromium:
            await work(node, chromium)

    with_node(tmp_path, test, *tenants, store=store, egress_bits_per_s=2_000_000)


async def slow_read(node: Running, name: str) -> None:
    """Long enough to be seen: the node sends slowly."""
    spans = [{"key": key_of(number).hex()} for number in range(40, 60)] * 40
    data = json.dumps({"spans": spans}).encode()
    while True:
        await node.ask("POST", "/v1/read", data, name, Kdn_Client=f"engine-{name}")


async def fill(node: Running) -> None:
    """A node that has been in use for a while."""
    for number in range(60):
        for name in ("research", "support", "batch"):
            if number >= 40 or name == "research":
                await node.put_chunk(number, 60_000, token=name)
    for number, owner in enumerate([*node.node.tenants] * 12):
        key = owner.store_key("chunks", key_of(1000 + number))
        await put_directly(node.node.depot.store, key, header(b"\x1f\x8b\x27" * 6, 40_000))
    for number, name in enumerate(("handbook", "onboarding", "release-notes", "faq", "contracts")):
        await put_name(node, name, range(40, 48 + number), ("research", "support")[number % 2])
    for name, keys in (("research", range(45, 75)), ("batch", range(20, 60))):
        body = json.dumps({"keys": [key_of(n).hex() for n in keys]}).encode()
        await node.ask("POST", "/v1/lookup", body, name)
    for number in range(40, 60):
        end = len(chunk_stream(key_of(number), 60_000)) * (2 if number % 3 else 3) // 3
        await node.ask(
            "GET", f"/v1/chunks/{key_of(number).hex()}", token="support", Range=f"bytes=0-{end - 1}"
        )
    await node.ask("GET", "/v1/names", token="wrong")
    remember(node)


def remember(node: Running) -> None:
    """Some minutes of history, so that pictures show lines."""
    history, now_s = node.node.status._history, time.monotonic()
    now, errors = history._samples[-1], dict.fromkeys(OWN_CODES, 0)
    steps, noise = [], Random(5)
    for step in range(140):
        wave = 2 + sin(step / 9) + noise.random() + (2.5 if 60 < step < 95 else 0)
        burst = 40_000 * noise.random() if step % 35 < 9 else 900
        steps.append([wave * 70_000, burst, 3 * wave, 9 * wave, 1 + 2 * noise.random()])
    history._samples.clear()
    for step in range(140):  # so that all ends at what was counted by now
        left = [int(sum(one[at] for one in steps[step:])) for at in range(5)]
        counts = [count - more for count, more in zip(now[1:6], left, strict=True)]
        at_s = now_s - (140 - step) * STEP_S
        history._samples.append(Sample(at_s, *counts, errors))
