"""Settings: one TOML file, environment `KDN_*`, flags; each default is written once, here.

A later source wins: default, file, environment, flag. Every setting remembers where it came from,
which `kdn config` shows. What is unknown or of the wrong kind is refused by name: a setting that
is silently ignored is worse than an error.

The file is the one given, else `KDN_CONFIG`, else `kdn.toml` in the current folder if there is one.

    [node]                       # KDN_NODE_HOST, KDN_NODE_PORT, ...
    host = "127.0.0.1"
    [client]                     # KDN_CLIENT_URL, KDN_CLIENT_TOKEN, KDN_CLIENT_TOKEN_FILE, ...
    url = "http://127.0.0.1:8470"
    token_file = "/etc/kdn/token"
    [tenants.research]           # only in the file; see `kdn config --new-token`
    tokens = ["sha256:..."]      # may publish; also read_tokens, operate_tokens
    weight = 2.0

A token or secret is given as it is or as the path of a file that holds it; a later source replaces
it, in whichever way. `find_credentials` does the same for `kdn.connect` and vLLM, without a file.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kdn.cache.folder import cache_folder
from kdn.checked import shown
from kdn.credentials import Credentials, secret_from, token_from, warn_if_shared
from kdn.defaults import REQUEST_LOG_BYTES, STORED_QUALITY
from kdn.errors import UnsupportedError
from kdn.protocol.limits import MAX_CHUNK_BYTES, MAX_PROFILE_BYTES

T = TypeVar("T")

DEFAULT_FILE = "kdn.toml"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?(?:b|bit)?", re.IGNORECASE)
_TOKEN = re.compile(r"sha256:[0-9a-f]{64}")
TOKEN_LISTS = ("read_tokens", "tokens", "operate_tokens")
"""Of a tenant, by what they may do."""
SECRETS = ("token", "secret", "upstream_token", "store_token")
"""Settings that are never shown. Each has a twin that names a file: `token_file`, ..."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class DepotSettings:
    """What is kept in a data folder, and how much."""

    data: Path = field(default_factory=lambda: cache_folder() / "node")
    """The folder for everything that is kept."""
    memory_bytes: int = 2**30
    """RAM for objects, as a cache in front of the disk."""
    disk_bytes: int = 50 * 2**30
    """Disk for objects. When it is full, objects are evicted."""
    policy: str = "cost"
    """What is evicted first: `cost`, `lru`, `s3fifo`, or `graded`, which cuts levels off before it
    drops chunks."""
    upstream: str = ""
    """URL of the centre: the node behind this one, which makes this one a region."""
    upstream_token: str = field(default="", repr=False)
    """This node's token at the centre."""
    upstream_token_file: str = ""
    """A file that holds it."""
    upstream_tls_ca: str = ""
    """A PEM file: the authority that signed the upstream's certificate, if a private one did."""
    outbox_bytes: int = 10 * 2**30
    """Of a region, on disk: what was put here and is not yet at the centre; 0: a put waits for the
    centre."""
    max_stale_s: float = 5.0
    """Of a region: the age of what it says of names without asking the centre."""
    upstream_timeout_s: float = 5.0
    """For the centre to answer a question about names."""
    store_timeout_s: float = 60.0
    """For one operation of the store."""
    store: str = ""
    """URL of a store that many nodes share (`redis://…`, `s3://…`): it has objects and names, and
    `memory_bytes` and `disk_bytes` are caches. `kdn node` then has no disk unless it is given."""
    store_token: str = field(default="", repr=False)
    """The password of a Redis, if not in the URL."""
    store_token_file: str = ""
    """A file that holds it."""
    store_tls_ca: str = ""
    """A PEM file: the authority that signed the store's certificate, if a private one did."""

    @property
    def upstream_credentials(self) -> Credentials:
        """Read from their files now."""
        token = token_from(
            self.upstream_token or None, self.upstream_token_file or None, "upstream_token"
        )
        return Credentials(token, tls_ca=self.upstream_tls_ca or None)

    @property
    def store_credentials(self) -> Credentials:
        """Read from their files now."""
        token = token_from(self.store_token or None, self.store_token_file or None, "store_token")
        return Credentials(token, tls_ca=self.store_tls_ca or None)


@dataclass(frozen=True)
class NodeSettings(DepotSettings):
    """Settings of `kdn node`. 0 means "no limit" where a limit is optional."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 8470
    """The port to listen on; 0: any that is free."""
    workers: int = 1
    """Processes that answer requests, each on a core of its own."""
    insecure: bool = False
    """Listen beyond loopback although there are no tokens."""
    tls_cert: str = ""
    """A PEM file: the certificate. Without one, tokens are sent in the clear."""
    tls_key: str = ""
    """A PEM file: its key."""
    egress_bits_per_s: int = 0
    """The most that this node sends."""
    egress_trace: str = ""
    """A recorded trace that shapes egress, for tests and benchmarks."""
    frame_bytes: int = 0
    """Bytes sent in one turn of the fair scheduler; 0: 8 to 64 KiB under a limit, else 1 MiB."""
    max_sends: int = 64
    """Frames on their way at once."""
    max_connections: int = 4096
    """Open at once. A quarter is for clients that have not shown a token yet."""
    max_requests: int = 2048
    """Requests in progress at once; more are answered with 503."""
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    """The largest chunk that is accepted."""
    max_profile_bytes: int = MAX_PROFILE_BYTES
    """The largest profile that is accepted."""
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
    """The least pace of a request body."""
    write_timeout_s: float = 30.0
    """For a reader to take one frame; then it is cut."""
    shutdown_timeout_s: float = 30.0
    """For responses in flight to finish when the node is told to stop."""
    log_level: str = "info"
    """debug, info, warning or error."""
    tracing: bool = False
    """Record traces with OpenTelemetry, and send them where its OTEL_* variables say."""


@dataclass(frozen=True)
class ClientSettings:
    """Settings of commands that talk to a node."""

    url: str = "http://127.0.0.1:8470"
    """Or, for `kdn learn`, `ask` and `explain`, a folder."""
    token: str = field(default="", repr=False)
    """Of the tenant."""
    token_file: str = ""
    """A file that holds the token."""
    secret: str = field(default="", repr=False)
    """Names chunks so that only those who have it find them; never sent to a node."""
    secret_file: str = ""
    """A file that holds the secret."""
    tls_ca: str = ""
    """A PEM file: the authority that signed the nodes' certificates, if a private one did."""
    timeout_s: float = 30.0
    """For one request."""
    stored_quality: str = STORED_QUALITY
    """`kdn learn` stores no more levels than this quality needs; `exact`: all of them."""
    request_log_bytes: int = REQUEST_LOG_BYTES
    """For what was decided for each request, which `kdn explain --request` shows; 0: no log."""
    tracing: bool = False
    """Record traces with OpenTelemetry, and send them where its OTEL_* variables say."""

    @property
    def credentials(self) -> Credentials:
        """Read from their files now."""
        secret = self.secret.encode("utf-8", "surrogateescape")  # any bytes of the environment
        return Credentials(
            token_from(self.token or None, self.token_file or None),
            secret_from(secret or None, self.secret_file or None),
            self.tls_ca or None,
        )


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
    """May do all of that, and see /metrics and the status of all tenants."""
    weight: float = 1.0
    """Its part of egress, RAM and disk, beside those of the other tenants."""
    quota_bytes: int = 0
    """Of objects and manifests. Beyond it, puts are refused."""
    requests_per_s: float = 0.0
    """On average; short bursts may be faster."""
    max_requests: int = 0
    """In progress at once."""
    max_connections: int = 0
    """Open at once."""
    max_names: int = 10_000
    """Names that the tenant may have."""
    max_names_bytes: int = 2**30
    """Of all versions of all manifests."""
    max_named_chunks: int = 200_000
    """Chunks of all names, each counted once for every name: a node keeps them all in memory."""
    max_levels: int = 0
    """Levels of a chunk that are stored: finer ones are cut off what is put."""
    upstream_token: str = field(default="", repr=False)
    """Of a region: this tenant's token at the centre."""
    upstream_token_file: str = ""
    """A file that holds it."""


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
        table = _table(name, tables.get(name, {}))
        layers = [
            {key: (value, str(path)) for key, value in table.items()},
            _from_environment(name, kind, environ),
            _from_flags(name, flags or {}),
        ]
        sections[name], given = _section(name, kind, layers)
        sources |= given
    if sections["node"].store and sources["node.disk_bytes"] == "default":
        sections["node"] = replace(sections["node"], disk_bytes=0)
    if path and any(sources.get(f"{s}.{key}") == str(path) for s in sections for key in SECRETS):
        warn_if_shared(path.stat().st_mode, "configuration file", path)
    tenants = tuple(
        _tenant(name, table) for name, table in _table("tenants", tables.get("tenants", {})).items()
    )
    _check_tokens_differ(tenants)
    return Config(sections["node"], sections["client"], tenants, sources)


def find_credentials(
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    secret: bytes | None = None,
    secret_file: str | Path | None = None,
    tls_ca: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Credentials:
    """What was given; what was not, as the environment has it (KDN_CLIENT_TOKEN, ...)."""
    settings = client_of_environment(environ)
    own = Credentials(token_from(token, token_file), secret_from(secret, secret_file))
    if own.token is not None:  # files that are not needed need not be there
        settings = replace(settings, token="", token_file="")
    if own.secret is not None:
        settings = replace(settings, secret="", secret_file="")
    other = settings.credentials
    ca = other.tls_ca if tls_ca is None else _convert("tls_ca", tls_ca, "str")
    return Credentials(own.token or other.token, own.secret or other.secret, ca)


def client_of_environment(environ: Mapping[str, str] | None = None) -> ClientSettings:
    """What the environment alone says (KDN_CLIENT_TRACING, ...): for those who read no file."""
    environ = os.environ if environ is None else environ
    settings, _ = _section(
        "client", ClientSettings, [_from_environment("client", ClientSettings, environ)]
    )
    return settings


_Layer = Mapping[str, tuple[Any, str]]
"""Setting to (value, where it came from)."""


def _section(name: str, kind: type[T], layers: Sequence[_Layer]) -> tuple[T, dict[str, str]]:
    """A section of which later layers win, and where each setting came from."""
    known = {item.name: str(item.type) for item in fields(kind)}  # type: ignore[arg-type]
    sources = dict.fromkeys(known, "default")
    values: dict[str, Any] = {}
    for layer in layers:
        _check_names(f"setting in [{name}]", layer, known)
        for key, (value, source) in layer.items():
            values[key] = _convert(f"{name}.{key}", value, known[key])
            sources[key] = source
            if (twin := _twin(key)) in known:
                if twin in layer:
                    raise UnsupportedError(f"{name}: expected {key} or {twin}, found both")
                values.pop(twin, None)
                sources[twin] = "default"
    return kind(**values), {f"{name}.{key}": source for key, source in sources.items()}


def _twin(key: str) -> str:
    """The other way to give a token or secret; of other settings, no setting's name."""
    if key in SECRETS:
        return f"{key}_file"
    return key.removesuffix("_file") if key.removesuffix("_file") in SECRETS else ""


def _find_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is None and environ.get("KDN_CONFIG"):
        path = Path(environ["KDN_CONFIG"])
    if path is None:
        return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None
    return path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:  # of TOML and UTF-8, too
        raise UnsupportedError(f"configuration file {path}: {error}") from error


def _from_environment(section: str, kind: type, environ: Mapping[str, str]) -> _Layer:
    known = {item.name for item in fields(kind)}
    prefix = f"KDN_{section.upper()}_"
    found = {name: value for name, value in environ.items() if name.startswith(prefix)}
    names = {name: name.removeprefix(prefix).lower() for name in found}
    for variable, name in names.items():
        if name not in known:
            raise UnsupportedError(f"environment variable {variable}: there is no such setting")
    return {name: (found[variable], variable) for variable, name in names.items()}


def _from_flags(section: str, flags: Mapping[str, Any]) -> _Layer:
    prefix = f"{section}."
    given = {
        name.removeprefix(prefix): value
        for name, value in flags.items()
        if name.startswith(prefix) and value is not None
    }
    return {name: (value, f"--{name.replace('_', '-')}") for name, value in given.items()}


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
        found = type(value).__name__ if name.split(".")[-1] in SECRETS else shown(value)
        raise UnsupportedError(f"{name}: expected {_KINDS[kind]}, found {found}") from None


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


def check_tenant_name(name: str) -> None:
    if not _TENANT.fullmatch(name):
        raise UnsupportedError(
            f"tenant {shown(name)}: expected 1 to 64 letters, digits, '.', '_', '-'"
        )


def _tenant(name: str, table: Any) -> TenantSettings:
    check_tenant_name(name)
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
        raise UnsupportedError(f"[{name}]: expected a table, found {type(value).__name__}")
    return value
