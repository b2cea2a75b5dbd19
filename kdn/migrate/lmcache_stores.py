"""LMCache's `remote_url`, as a store of kdn: which ones there are, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from kdn.checked import shown
from kdn.store.opening import check_store_url, without_password

LM_PORT = 8470
_AMAZON = re.compile(
    r"(?P<bucket>[a-z0-9.-]+?)\.s3(?:express[a-z0-9-]*)?[.-][a-z0-9.-]*amazonaws\.com"
)
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[[0-9a-fA-F:.]+\]")
SENTINEL_SERVICE = "redismaster"
"""What LMCache takes where REDIS_SERVICE_NAME is not set."""
WITHOUT = {
    "infinistore": "RDMA stores are not supported",
    "mooncakestore": "Mooncake is not supported",
    "hf3fs": "3FS is not supported; if it is mounted, use a folder of it (node.data)",
    "eic": "EIC is not supported",
    "bigtable": "Bigtable is not supported",
    "hfbucket": "buckets of the hub are not supported",
    "sagemaker": "SageMaker HyperPod's store is not supported",
    "blackhole": 'nothing is kept there: leave kdn out, or use "publish": false',
    "audit": "kdn has no store that only records requests; a node counts them (/metrics)",
    "mock": "it is for tests",
    "plugin": "kdn loads no code of others as a store",
}


@dataclass(frozen=True)
class Remote:
    """Where chunks go instead; all empty: there is no counterpart."""

    store: str = ""
    """Of a node: `node.store`."""
    node: str = ""
    """A node on another machine."""
    notes: list[str] = field(default_factory=list)


def remote_of(url: Any, extra: Mapping[str, Any]) -> Remote:
    """`extra`: LMCache's `extra_config`."""
    if not isinstance(url, str) or "://" not in url or not url.isprintable():
        return Remote(notes=[f"expected a URL, found {shown(type(url).__name__)}"])
    scheme, rest = url.split("://", 1)
    scheme = scheme.lower()
    if scheme == "lm":
        return _server(rest)
    try:
        store, notes = _store(scheme, rest, extra)
        if store:
            check_store_url(store)
    except Exception as error:  # whatever is in a URL of others
        return Remote(notes=[f"this URL cannot be used: {type(error).__name__}"])
    return Remote(store=store, notes=notes)


def _server(rest: str) -> Remote:
    """LMCache's own server: a node takes its place."""
    host = rest.split("/")[0].rpartition(":")[0] or rest.split("/")[0]
    if not _HOST.fullmatch(host):
        return Remote(notes=["expected lm://HOST:PORT"])
    return Remote(node=f"http://{host}:{LM_PORT}", notes=[f"run `kdn node` on {host}"])


def _store(scheme: str, rest: str, extra: Mapping[str, Any]) -> tuple[str, list[str]]:
    if scheme in ("redis", "rediss", "valkey", "redis-cluster", "redis-sentinel"):
        return _redis(scheme, rest, extra)
    if scheme == "s3":
        return _bucket(rest, extra)
    if scheme == "azure":
        account = urlsplit(str(extra.get("azure_account_url", ""))).netloc.split(".")[0]
        query = f"?account={quote(account)}" if account else ""
        return f"az://{rest.strip('/')}{query}", [_CHAIN]
    if scheme == "fs":
        path = "/" + rest.partition("/")[2].split(",")[0].lstrip("/")
        return f"file://{path}", ["all nodes must see this folder; a node's own disk is faster"]
    return "", [WITHOUT.get(scheme.split("-")[0], f"kdn knows no store {shown(scheme)}")]


_CHAIN = "credentials come from the cloud's usual chain (environment, identity), never from a file"
_PASSWORD = "the password is not repeated here: put it into a file and set store_token_file"


def _redis(scheme: str, rest: str, extra: Mapping[str, Any]) -> tuple[str, list[str]]:
    notes = ["kdn's keys begin with `kdn:`, so both systems may use one server for a while"]
    hosts, slash, path = rest.partition("/")
    if "@" in hosts:
        hosts = hosts.rpartition("@")[2]
        notes.append(_PASSWORD)
    if scheme == "redis-sentinel":
        notes.append(f"the service is called {SENTINEL_SERVICE} here: is that its name?")
        return f"redis+sentinel://{hosts}/{SENTINEL_SERVICE}", notes
    is_cluster = scheme == "redis-cluster" or extra.get("valkey_mode") == "cluster"
    if is_cluster:
        return f"{scheme.split('-')[0]}+cluster://{hosts}", notes
    return without_password(f"{scheme}://{hosts}{slash}{path}"), notes


def _bucket(rest: str, extra: Mapping[str, Any]) -> tuple[str, list[str]]:
    """LMCache writes the host of the bucket; kdn the bucket, and where it is."""
    host = rest.split("/")[0]
    options = {}
    if region := extra.get("s3_region"):
        options["region"] = str(region)
    if amazon := _AMAZON.fullmatch(host):
        bucket = amazon["bucket"]
    else:
        bucket, _, endpoint = host.partition(".")
        if endpoint:
            scheme = "http" if extra.get("disable_tls") else "https"
            options["endpoint"] = f"{scheme}://{endpoint}"
    query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options.items())
    return f"s3://{bucket}/kdn" + (f"?{query}" if query else ""), [_CHAIN]
