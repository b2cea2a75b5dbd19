"""Where a Redis or Valkey is, from a URL: one server, one behind Sentinel, or a Cluster.

    redis://[user:password@]host[:port][/database]
    redis+sentinel://[user:password@]host[:port],host[:port]/service
    redis+cluster://[user:password@]host[:port],host[:port]

`valkey` means the same; `rediss` and `valkeys` are over TLS. What follows a `?` are `RedisOptions`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from kdn.checked import checked_count, checked_number, shown
from kdn.credentials import Credentials
from kdn.errors import UnsupportedError

SINGLE, SENTINEL, CLUSTER = "single", "sentinel", "cluster"
PORT, SENTINEL_PORT = 6379, 26379
SCHEME = re.compile(r"(?:redis|valkey)(s?)(?:\+(sentinel|cluster))?")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_WAIT_REPLICAS = 16
MAX_DATABASE = 10_000


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class RedisOptions:
    """Each may stand in a URL's query: `redis://host?wait=1&prefix=cache`."""

    prefix: str = "kdn"
    """Every key begins with it and a colon: several stores may share a server."""
    wait: int | None = None
    """A put is acknowledged when so many replicas have it. None: 1 where a server has a replica
    at that moment, otherwise 0."""
    wait_s: float = 2.0
    """A put that fewer replicas have after so long fails."""
    replicas: bool = False
    """Reads go to replicas, and to the master for what they lack."""
    ttl_s: float | None = None
    """Objects end after so long, read or not: what `volatile-*` policies evict needs an end."""
    deadline_s: float = 20.0
    """Of one operation with all its attempts: a failover should fit in."""
    connect_s: float = 2.0
    silence_s: float = 5.0
    """A connection on which nothing moves for so long is taken for dead."""


@dataclass(frozen=True)
class RedisAddress:
    kind: str
    hosts: tuple[Address, ...]
    """Of a Cluster, and of Sentinels: any that is known; the others are learnt from it."""
    tls: bool = False
    tls_ca: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    service: str = ""
    options: RedisOptions = RedisOptions()

    def __str__(self) -> str:
        """For messages: without a password."""
        scheme = ("rediss" if self.tls else "redis") + (
            "" if self.kind == SINGLE else f"+{self.kind}"
        )
        return f"{scheme}://{','.join(map(str, self.hosts))}"


def parse_redis_url(url: str, credentials: Credentials) -> RedisAddress:
    """The password is the URL's, or the token of the credentials if the URL has none."""
    scheme, _, rest = url.partition("://")
    named = SCHEME.fullmatch(scheme.lower())
    if named is None:
        raise UnsupportedError(f"expected redis:// or valkey://, found {shown(scheme)}")
    # By hand: Python's own way refuses several hosts of which one is in brackets.
    before, _, query = rest.partition("?")
    place, _, path = before.partition("/")
    user, _, hosts = place.rpartition("@")
    username, _, password = user.partition(":")
    kind = named[2] or SINGLE
    path = unquote(path)
    return RedisAddress(
        kind=kind,
        hosts=_hosts(hosts, kind),
        tls=bool(named[1]),
        tls_ca=credentials.tls_ca,
        username=unquote(username) or None,
        password=unquote(password) or credentials.token,
        database=_database(path, kind),
        service=_service(path) if kind == SENTINEL else "",
        options=_options(query),
    )


def _hosts(text: str, kind: str) -> tuple[Address, ...]:
    default = SENTINEL_PORT if kind == SENTINEL else PORT
    found = []
    for one in text.split(","):
        host = _HOST.fullmatch(one)
        if host is None:
            raise UnsupportedError(f"redis: expected host:port, found {shown(one)}")
        port = checked_count("redis port", int(host[3] or default), 1, 65_535)
        found.append(Address(host[1] or host[2], port))
    if kind == SINGLE and len(found) > 1:
        raise UnsupportedError(
            f"redis: {len(found)} hosts; several are redis+cluster:// or redis+sentinel://"
        )
    return tuple(found)


def _database(path: str, kind: str) -> int:
    if kind == SENTINEL or not path:
        return 0
    if not path.isdecimal() or not path.isascii():
        raise UnsupportedError(f"redis: expected the number of a database, found {shown(path)}")
    return checked_count("redis database", int(path[:9]), 0, 0 if kind == CLUSTER else MAX_DATABASE)


def _service(path: str) -> str:
    if not _SERVICE.fullmatch(path):
        raise UnsupportedError(
            f"redis+sentinel: expected /service after the hosts, found {shown(path)}"
        )
    return path


def _options(query: str) -> RedisOptions:
    given: dict[str, Any] = {}
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=32
        )
    except ValueError:
        raise UnsupportedError(
            f"redis: expected options as name=value, found {shown(query)}"
        ) from None
    for name, value in pairs:
        if name not in _READ or name in given:
            known = ", ".join(_READ)
            raise UnsupportedError(
                f"redis: expected options {known}, each once, found {shown(name)}"
            )
        given[name] = _READ[name](name, value)
    return RedisOptions(**given)


def _number(name: str, value: str) -> float:
    try:
        return checked_number(f"redis {name}", float(value), 0.001, 3600)
    except ValueError:
        raise UnsupportedError(f"redis {name}: expected seconds, found {shown(value)}") from None


def _count(most: int) -> Any:
    def read(name: str, value: str) -> int:
        number = int(value) if re.fullmatch("[0-9]{1,9}", value) else value
        return checked_count(f"redis {name}", number, 0, most)

    return read


def _prefix(name: str, value: str) -> str:
    if not _PREFIX.fullmatch(value):
        raise UnsupportedError(
            f"redis {name}: expected 1 to 64 letters, digits, '.', '_', ':', '-', "
            f"found {shown(value)}"
        )
    return value


_READ: dict[str, Any] = {
    "prefix": _prefix,
    "wait": _count(MAX_WAIT_REPLICAS),
    "wait_s": _number,
    "replicas": lambda name, value: bool(_count(1)(name, value)),
    "ttl_s": lambda name, value: float(_count(10**9)(name, value)) or None,
    "deadline_s": _number,
    "connect_s": _number,
    "silence_s": _number,
}
"""Option to what reads its text."""
