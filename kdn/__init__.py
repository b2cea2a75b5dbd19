"""A knowledge delivery network: encode, store and deliver what language models have read.

    import kdn

    with kdn.connect("http://127.0.0.1:8470", model="smollm2") as client:
        client.learn("handbook", text)
        for piece in client.ask("handbook", "What is it about?"):
            ...

Importing this is light: torch and all else come when something is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdn.client.answers import Learned, Loaded, Stats
    from kdn.client.asynchronous import AsyncClient
    from kdn.client.synchronous import Client, connect
    from kdn.errors import KdnError

__all__ = ["AsyncClient", "Client", "KdnError", "Learned", "Loaded", "Stats", "connect"]

_HOMES = {
    "AsyncClient": "kdn.client.asynchronous",
    "Client": "kdn.client.synchronous",
    "KdnError": "kdn.errors",
    "Learned": "kdn.client.answers",
    "Loaded": "kdn.client.answers",
    "Stats": "kdn.client.answers",
    "connect": "kdn.client.synchronous",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kdn' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
