"""Settings: one TOML file, environment `KDN_*`, flags; each default is written once, here.

A later source wins: default, file, environment, flag. Every setting remembers where it came from,
which `kdn config` shows. What is unknown or of the wrong kind is refused by name: a setting that
is silently ignored is worse than an error.

The file is the one given, else `KDN_CONFIG`, else `kdn.toml` in the current folder if there is one.

    [node]                       # KDN_NODE_HOST, KDN_NODE_PORT, ...
    host = "127.0.0.1"
    [client]                     # KDN_CLIENT_URL, KDN_CLIENT_TOKEN
    url = "http://127.0.0.1:8470"
    [tenants.research]           # only in the file; see `kdn config --new-token`
    tokens = ["sha256:..."]      # may publish; also read_tokens, operate_tokens
    weight = 2.0
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kdn.cache.folder import cache_folder
from kdn.errors import UnsupportedError

DEFAULT_FILE = "kdn.toml"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?(?:b|bit)?", re.IGNORECASE)
_TOKEN = re.compile(r"sha256:[0-9a-f]{64}")
TOKEN_LISTS = ("read_tokens", "tokens", "operate_tokens")
"""Of a tenant, by what they may do."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class NodeSettings:
    """Settings of `kdn node`. 0 means "no limit" where a limit is optional."""

    host: str = "127.0.0.1"
    port: int = 8470
    data: Path = field(default_factory=lambda: cache_folder() / "node")
    insecure: bool = False
    """Listen beyond loopback although there are no tokens."""
    tls_cert: str = ""
    tls_key: str = ""
    memory_bytes: int = 2**30
    disk_bytes: int = 50 * 2**30
    policy: str = "cost"
    upstream: str = ""
    """URL of a node behind this one."""
    upstream_token: str = ""
    egress_bits_per_s: int = 0
    egress_trace: str = ""
    """A recorded trace that shapes egress, for tests and benchmarks."""
    egress_order: str = "fair"
    """Whose frame goes out next; "fifo" and "inverse" are there to be compared with."""
    frame_bytes: int = 0
    """Bytes sent in one turn of the fair scheduler; 0: 8 to 64 KiB under a limit, else 1 MiB."""
    max_sends: int = 64
    """Frames on their way at once."""
    max_connections: int = 4096
    max_requests: int = 2048
    """Requests in progress at once; more are answered with 503."""
    max_chunk_bytes: int = 256 * 2**20
    max_profile_bytes: int = 2 * 2**30
    max_bodies_bytes: int = 4 * 2**30
    """Memory for all objects being received."""
    max_questions_bytes: int = 256 * 2**20
    """Memory for all requests in JSON (lookups, reads, manifests) being received and served."""
    max_answers_bytes: int = 256 * 2**20
    """Memory for what they found, on its way out. What reads send comes on top, frame by frame."""
    idle_timeout_s: float = 60.0
    """For the next request on a connection, and for its head to arrive."""
    body_timeout_s: float = 600.0
    """For a whole request body, however steadily it comes."""
    body_window_s: float = 10.0
    """So much of a body must come in each such time as `min_body_bytes_per_s` makes of it; also how
    long a request waits for memory."""
    min_body_bytes_per_s: int = 50_000
    store_timeout_s: float = 60.0
    """For one operation of the store."""
    write_timeout_s: float = 30.0
    """For a reader to take one frame; then it is cut."""
    shutdown_timeout_s: float = 30.0
    """For responses in flight to finish when the node is told to stop."""
    log_level: str = "info"


@dataclass(frozen=True)
class ClientSettings:
    """Settings of commands that talk to a node."""

    url: str = "http://127.0.0.1:8470"
    """Or, for `kdn learn`, `ask` and `explain`, a folder."""
    token: str = ""
    secret: str = ""
    """Names chunks so that only those who have it find them; never sent to a node."""
    timeout_s: float = 30.0


@dataclass(frozen=True)
class TenantSettings:
    """One tenant, as the file tells. Tokens are kept as hashes only. 0 means "no limit of its own":
    what the node has is shared among its tenants anyway (`kdn/node/shares.py`)."""

    name: str
    tokens: tuple[str, ...] = ()
    """May read and publish: chunks, profiles, objects, names."""
    read_tokens: tuple[str, ...] = ()
    """May only read."""
    operate_tokens: tuple[str, ...] = ()
    """May do all of that, and read /metrics."""
    weight: float = 1.0
    quota_bytes: int = 0
    requests_per_s: float = 0.0
    max_requests: int = 0
    """In progress at once."""
    max_connections: int = 0
    max_names: int = 10_000
    max_names_bytes: int = 2**30
    """Of all versions of all manifests."""
    max_named_chunks: int = 200_000
    """Chunks of all names, each counted once for every name: a node keeps them all in memory."""


@dataclass(frozen=True)
class Config:
    node: NodeSettings
    client: ClientSettings
    tenants: tuple[TenantSettings, ...]
    sources: Mapping[str, str]
    """"node.port" to "default", a file, "KDN_NODE_PORT" or a flag."""


def load_config(
    path: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """`flags` maps "node.port" and the like to values; None is a flag that was not given."""
    environ = os.environ if environ is None else environ
    path = _find_file(path, environ)
    tables = _read_toml(path) if path else {}
    _check_names("section", tables, ("node", "client", "tenants"))
    sources: dict[str, str] = {}
    sections: dict[str, Any] = {}
    for name, kind in (("node", NodeSettings), ("client", ClientSettings)):
        known = {item.name: item.type for item in fields(kind)}
        given = dict.fromkeys((f"{name}.{key}" for key in known), "default")
        values: dict[str, Any] = {}
        table = _table(name, tables.get(name, {}))
        _check_names(f"setting in [{name}]", table, known)
        layers = [(str(path), table), *_from_environment(name, known, environ)]
        layers.append(("flag", _from_flags(name, flags or {})))
        for source, layer in layers:
            for key, value in layer.items():
                values[key] = _convert(f"{name}.{key}", value, str(known[key]))
                given[f"{name}.{key}"] = source if source != "flag" else f"--{key}"
        sections[name] = kind(**values)
        sources |= given
    tenants = tuple(
        _tenant(name, table) for name, table in _table("tenants", tables.get("tenants", {})).items()
    )
    _check_tokens_differ(tenants)
    return Config(sections["node"], sections["client"], tenants, sources)


def _find_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is None and environ.get("KDN_CONFIG"):
        path = Path(environ["KDN_CONFIG"])
    if path is None:
        return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None
    return path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UnsupportedError(f"configuration file {path}: {error}") from error


def _from_environment(
    section: str, known: Mapping[str, Any], environ: Mapping[str, str]
) -> list[tuple[str, dict[str, str]]]:
    prefix = f"KDN_{section.upper()}_"
    found = {name: value for name, value in environ.items() if name.startswith(prefix)}
    names = {name: name.removeprefix(prefix).lower() for name in found}
    for variable, name in names.items():
        if name not in known:
            raise UnsupportedError(f"environment variable {variable}: there is no such setting")
    return [(variable, {name: found[variable]}) for variable, name in names.items()]


def _from_flags(section: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{section}."
    return {
        name.removeprefix(prefix): value
        for name, value in flags.items()
        if name.startswith(prefix) and value is not None
    }


def _convert(name: str, value: Any, kind: str) -> Any:
    """`kind` is the annotation: settings have few, so no more is needed."""
    try:
        if kind == "bool":
            return _to_bool(value)
        if kind == "int":
            return _to_int(value)
        if kind == "float":
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number) or number < 0:
                raise ValueError
            return number
        if not isinstance(value, str | Path):
            raise ValueError
        return Path(value) if kind == "Path" else str(value)
    except (TypeError, ValueError):
        raise UnsupportedError(f"{name}: expected {_KINDS[kind]}, found {value!r}") from None


_KINDS = {
    "bool": "true or false",
    "int": "a whole number, or a size such as 20GiB",
    "float": "a number that is not negative",
    "str": "text",
    "Path": "a path",
    "tuple[str, ...]": "a list of texts",
}


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if not isinstance(value, str) or value.lower() not in known:
        raise ValueError
    return known[value.lower()]


def _to_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "").lower()]) if unit else int(number)


def _tenant(name: str, table: Any) -> TenantSettings:
    if not _TENANT.fullmatch(name):
        raise UnsupportedError(f"tenant {name!r}: expected 1 to 64 letters, digits, '.', '_', '-'")
    table = _table(f"tenants.{name}", table)
    kinds = {item.name: str(item.type) for item in fields(TenantSettings) if item.name != "name"}
    _check_names(f"setting in [tenants.{name}]", table, kinds)
    values: dict[str, Any] = {
        key: _tokens(f"tenants.{name}.{key}", value)
        if key in TOKEN_LISTS
        else _convert(f"tenants.{name}.{key}", value, kinds[key])
        for key, value in table.items()
    }
    if not any(values.get(key) for key in TOKEN_LISTS):
        raise UnsupportedError(f"tenants.{name}.tokens: expected at least one hash")
    if values.get("weight", 1.0) <= 0:
        raise UnsupportedError(f"tenants.{name}.weight: expected more than 0")
    return TenantSettings(name, **values)


def _tokens(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UnsupportedError(f"{name}: expected {_KINDS['tuple[str, ...]']}, found {value!r}")
    for token in value:
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise UnsupportedError(
                f"{name}: expected 'sha256:' and 64 hex digits; "
                "make one with `kdn config --new-token`"
            )
    return tuple(value)


def _check_tokens_differ(tenants: tuple[TenantSettings, ...]) -> None:
    owner: dict[str, str] = {}
    for tenant in tenants:
        for kind in TOKEN_LISTS:
            for token in getattr(tenant, kind):
                if token in owner:
                    where = f"{tenant.name}.{kind}"
                    raise UnsupportedError(f"{owner[token]} and {where} have the same token")
                owner[token] = f"{tenant.name}.{kind}"


def _check_names(what: str, found: Mapping[str, Any], known: Any) -> None:
    for name in found:
        if name not in known:
            raise UnsupportedError(f"{what}: there is no {name!r}; known are {', '.join(known)}")


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedError(f"[{name}]: expected a table, found {value!r}")
    return value
