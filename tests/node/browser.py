"""A real browser for tests of the dashboard: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = os.environ.get("KDN_SCREENSHOTS")
"""A folder: the tests leave pictures of what they saw there."""
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
WAIT_MS = 20_000


def needs_browser() -> None:
    pytest.importorskip("playwright", reason="needs the Python package playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium (apt-get install chromium)")


class Tab:
    """A page, and whatever went wrong in it."""

    def __init__(self, page: Any):
        self.page = page
        self.wrongs: list[str] = []
        self.requested: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.wrongs.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.wrongs.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requested.append(request.url))

        def said(message: Any) -> None:
            # What a policy blocks is told as an error, too. Refused tokens are no surprise.
            if message.type == "error" and "the server responded with a status" not in message.text:
                self.wrongs.append(f"console: {message.text}")

        page.on("console", said)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))

    async def until(self, selector: str, text: str) -> None:
        """That element has this text."""
        script = "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)"
        await self.page.wait_for_function(script, arg=[selector, text])

    async def picture(self, name: str, whole: bool = True) -> None:
        if SCREENSHOTS:
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            data = await self.page.screenshot(full_page=whole)
            _save_small(data, Path(SCREENSHOTS) / f"dashboard-{name}.png")


def _save_small(data: bytes, path: Path) -> None:
    """With few colours, which is all that a dashboard has."""
    from PIL import Image

    picture = Image.open(BytesIO(data)).convert("RGB")
    few = picture.quantize(192, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # No sandbox: tests may run as root.
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def tab(
    chromium: Any, url: str, *, dark: bool = False, phone: bool = False
) -> AsyncIterator[Tab]:
    """A fresh profile with one tab, which must have had no trouble in the end."""
    context = await chromium.new_context(
        viewport=PHONE if phone else DESKTOP, color_scheme="dark" if dark else "light",
        device_scale_factor=2 if phone else 1, locale="en-GB", timezone_id="UTC",
    )  # fmt: skip
    try:
        opened = Tab(await context.new_page())
        await opened.page.goto(url)
        yield opened
        assert opened.wrongs == []
        assert all(one.startswith((url, "data:")) for one in opened.requested)
    finally:
        await context.close()
