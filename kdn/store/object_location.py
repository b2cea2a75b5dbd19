"""Where objects are kept, by URL: which cloud, bucket and prefix, and how they are reached.

    s3://bucket/prefix    ?endpoint=URL  &region=NAME  &anonymous=true  &virtual_hosted=true
    gs://bucket/prefix    ?endpoint=URL  &anonymous=true
    az://container/prefix ?endpoint=URL  &account=NAME  &anonymous=true
    file:///absolute/path

Credentials are never part of a URL, which ends up in logs: they come from each cloud's usual chain
(environment, workload identity, instance metadata). An endpoint that begins with `http://` is asked
without TLS: whoever writes that down has decided so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kdn.checked import shown
from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

CONNECT_S = 5
REQUEST_S = 3600
"""Only a last resort: `object_bucket.py` has deadlines of its own, by the size of what is asked."""

_COMMON = ("endpoint", "allow_http", "anonymous")
OPTIONS = {
    "s3": (*_COMMON, "region", "virtual_hosted"),
    "gs": _COMMON,
    "az": (*_COMMON, "account"),
    "file": (),
}
_FLAGS = ("allow_http", "anonymous", "virtual_hosted")


@dataclass(frozen=True)
class Location:
    kind: str
    """`s3`, `gs`, `az` or `file`."""
    bucket: str
    """Of a file: its absolute path."""
    prefix: str
    """Without slashes at either end; may be empty."""
    options: dict[str, str]

    @property
    def name(self) -> str:
        """For messages."""
        rest = f"/{self.prefix}" if self.prefix else ""
        return f"{self.kind}://{self.bucket}{rest}"


def parse_location(url: str) -> Location:
    """UnsupportedError for what is none, or says more than can be kept to."""
    parts = urlsplit(url)
    kind = parts.scheme.lower()
    if kind not in OPTIONS:
        raise UnsupportedError(f"expected s3://, gs://, az:// or file://, found {shown(url)}")
    if "@" in parts.netloc:
        raise UnsupportedError(
            f"{kind}://: expected no user or password in the URL: credentials come from the "
            "environment"
        )
    path = unquote(parts.path)
    if kind == "file":
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query:
            raise UnsupportedError(f"expected file:///an/absolute/path, found {shown(url)}")
        return Location(kind, str(Path(path)), "", {})
    if not parts.netloc or parts.fragment:
        raise UnsupportedError(f"expected {kind}://BUCKET/PREFIX, found {shown(url)}")
    prefix = path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise UnsupportedError(f"expected a prefix without empty parts, found {shown(prefix)}")
    return Location(kind, parts.netloc, prefix, _checked_options(kind, parts.query))


def _checked_options(kind: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS[kind]:  # its value may be a secret
            known = ", ".join(OPTIONS[kind])
            raise UnsupportedError(f"{kind}://: expected one of {known}, found {shown(name)}")
        if name in _FLAGS and value.lower() not in ("true", "false"):
            raise UnsupportedError(f"{name}: expected true or false, found {shown(value)}")
        options[name] = value
    endpoint = options.get("endpoint", "")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise UnsupportedError(f"endpoint: expected an http:// or https:// URL, found {endpoint}")
    return options


def open_client(location: Location, tls_ca: str | None = None) -> Client:
    """obstore's client. Nothing is asked yet."""
    from obstore import store

    if location.kind == "file":
        try:
            return store.LocalStore(Path(location.bucket), mkdir=True)
        except OSError as error:
            raise UnsupportedError(f"{location.name}: {error}") from None
    options = location.options
    plain = options.get("endpoint", "").startswith("http://") or _flag(options, "allow_http")
    client: dict[str, Any] = {
        "allow_http": plain,
        "connect_timeout": f"{CONNECT_S}s",
        "timeout": f"{REQUEST_S}s",
    }
    if tls_ca is not None:
        client["root_certificate"] = _read_ca(tls_ca)
    config: dict[str, Any] = {"skip_signature": True} if _flag(options, "anonymous") else {}
    if location.kind == "s3":  # how copies take conditions there
        config["copy_if_not_exists"] = "multipart"
    for ours, theirs in _settings(location.kind).items():
        if ours in options:
            config[theirs] = _flag(options, ours) if ours in _FLAGS else options[ours]
    make: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[location.kind]
    # Tries are counted and bounded by whoever asks; so there are none in here.
    opened: Client = make(
        location.bucket,
        prefix=location.prefix or None,
        client_options=client,
        retry_config={"max_retries": 0},
        **config,
    )
    return opened


def _settings(kind: str) -> dict[str, str]:
    """Our options, and what obstore calls them."""
    return {
        "s3": {
            "endpoint": "endpoint",
            "region": "region",
            "virtual_hosted": "virtual_hosted_style_request",
        },
        "gs": {"endpoint": "base_url"},
        "az": {"endpoint": "endpoint", "account": "account_name"},
    }[kind]


def _flag(options: dict[str, str], name: str) -> bool:
    return options.get(name, "").lower() == "true"


def _read_ca(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UnsupportedError(f"tls_ca {path}: {error.strerror}") from None
