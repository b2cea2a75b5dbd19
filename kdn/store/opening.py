"""A store by its URL: the one place that knows which scheme means what.

    redis://… rediss://… valkey://… valkeys://…         Redis and Valkey; also +sentinel, +cluster
    s3://… gs://… az://… file://…                       objects in buckets
    http://… https://…                                  a node; with a path, an export

What a scheme needs is imported only when it is used; what is not installed is named.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from kdn.checked import shown
from kdn.credentials import Credentials
from kdn.errors import UnsupportedError
from kdn.store.base import Store

REDIS = frozenset(
    name + kind
    for name in ("redis", "rediss", "valkey", "valkeys")
    for kind in ("", "+sentinel", "+cluster")
)
OBJECTS = frozenset({"s3", "gs", "az", "file"})
HTTP = frozenset({"http", "https"})
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


def scheme_of(text: str) -> str:
    """In lower case; empty if this is no URL (a folder)."""
    found = _SCHEME.match(text.lower())
    return found.group(1) if found else ""


def is_store_url(text: str) -> bool:
    """Whether this names a store that many processes share without a node: of Redis, or of
    objects. The URLs of nodes and of exports are not among them."""
    return scheme_of(text) in REDIS | OBJECTS


def check_store_url(url: str) -> None:
    """UnsupportedError if this is not the whole URL of a store. Nothing is opened."""
    if scheme_of(url) in REDIS:
        from kdn.store.redis_address import parse_redis_url

        parse_redis_url(url, Credentials())
    else:
        from kdn.store.object_location import parse_location

        parse_location(url)


def without_password(url: str) -> str:
    """For messages."""
    return re.sub(r"(?<=://)[^/?]*@", "", url)


def open_remote(url: str, credentials: Credentials) -> Store:
    """The store at a URL. Nothing is asked of it yet: one that is away now may be there later.

    UnsupportedError for a scheme that nobody knows, and for what is not installed.
    """
    scheme = scheme_of(url)
    if scheme in REDIS:
        _need("redis", "redis")
        from kdn.store.redis import open_redis_store

        return open_redis_store(url, credentials)
    if scheme in OBJECTS:
        _need("obstore", "s3")
        from kdn.store.object import open_object_store

        return open_object_store(url, credentials)
    if scheme in HTTP:
        return _open_http(url, credentials)
    known = ", ".join(sorted(REDIS | OBJECTS | HTTP))
    raise UnsupportedError(f"expected the URL of a store ({known}), found {shown(url)}")


def _need(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise UnsupportedError(f"expected the package {package}: pip install 'kdn[{extra}]'")


def _open_http(url: str, credentials: Credentials) -> Store:
    from kdn.store.many_nodes import node_store, open_nodes
    from kdn.store.static import open_static_store
    from kdn.store.static_client import is_export
    from kdn.store.tls import client_tls

    tls = client_tls(credentials.tls_ca)
    if is_export(url):  # no token is sent there
        return open_static_store(url, tls=tls)
    return node_store(open_nodes(url, token=credentials.token, tls=tls))
