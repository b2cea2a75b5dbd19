"""The addresses of a node's name. Several of one family are several nodes that answer alike."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import defaultdict
from urllib.parse import urlsplit

MAX_ADDRESSES = 256
"""Of one name; more are not used."""


def is_fixed(url: str) -> bool:
    """Whether it says an address instead of a name."""
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True


def at_address(url: str, address: str) -> str:
    """What the node at this address of a URL's name is called, by all clients alike."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{address}]" if ":" in address else address
    return f"{parts.scheme}://{host}:{port}{parts.path}"


async def addresses_of(url: str) -> list[str]:
    """All that its name has now, in one family: a host with both an IPv4 and an IPv6 address is one
    node, not two. OSError if the name is not known."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    families: dict[int, set[str]] = defaultdict(set)
    for family, _, _, _, address in found:  # the system puts those first that can be reached
        families[family].add(str(address[0]))
    most = max(families.values(), key=len, default=set())
    return sorted(most)[:MAX_ADDRESSES]
