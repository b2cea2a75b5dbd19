"""Connections to a node: the one place where a token meets a header and a certificate is judged."""

from __future__ import annotations

import ssl

import aiohttp

CONNECTIONS = 16


def open_session(
    timeout: aiohttp.ClientTimeout,
    *,
    token: str | None = None,
    client: str | None = None,
    tls: ssl.SSLContext | None = None,
    connections: int = CONNECTIONS,
) -> aiohttp.ClientSession:
    """Belongs to the running loop. `client` names this one for fair sharing; without `tls` the
    certificates that the system knows are trusted."""
    headers = {"Accept-Encoding": "identity"}  # a proxy must not compress what is counted here
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if client:
        headers["Kdn-Client"] = client
    connector = aiohttp.TCPConnector(limit=connections, ssl=True if tls is None else tls)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, auto_decompress=False,
        raise_for_status=False,
    )  # fmt: skip
