"""The dashboard: one page with its own style and script, which shows what `/v1/status` tells.

Anybody may have the page: there is nothing in it but itself. What it shows it asks for with the
operator's token. It may run only its own script, and talk to nobody but this node.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from aiohttp import web

from kdn.node.state import NODE

UNKNOWN = 'data-tokens="unknown"'


async def get_dashboard(request: web.Request) -> web.StreamResponse:
    body, headers = _page(needs_token=not request.app[NODE].tenants.open)
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


@cache
def _page(needs_token: bool) -> tuple[bytes, dict[str, str]]:
    text = files("kdn.node.status").joinpath("dashboard.html").read_text("utf-8")
    text = text.replace(UNKNOWN, f'data-tokens="{"needed" if needs_token else "none"}"')
    return text.encode(), {
        "Content-Security-Policy": policy_of(text),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


def policy_of(text: str) -> str:
    """Only this very script and this very style, by their digests."""
    allowed = {
        "default-src": "'none'",
        "script-src": _digest(text, "script"),
        "style-src": _digest(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{what} {source}" for what, source in allowed.items())


def _digest(text: str, element: str) -> str:
    [inside] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"
