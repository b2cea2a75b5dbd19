"""What an operator may set, in `kv_connector_extra_config`; a request, in `kv_transfer_params`.

What is unknown or of the wrong kind is refused by name when vLLM starts. In a request it is
refused too, by not using any cache for it: a request must not bring an engine down.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kdn.cache.keys import PUBLIC_SECRET
from kdn.checked import checked_client
from kdn.codec import CODECS
from kdn.config import find_credentials
from kdn.errors import UnsupportedError

logger = logging.getLogger(__name__)

REQUEST_KEY = "kdn"
"""Under which `kv_transfer_params` holds the settings of one request."""
MAX_FLOAT = 3600.0
"""An hour to wait, or more nats than any difference: nothing waits for ever."""
_CREDENTIALS = ("token", "token_file", "secret", "secret_file", "tls_ca")
_PER_REQUEST = ("quality", "deadline_s", "load", "publish")


@dataclass(frozen=True)
class Settings:
    url: str | tuple[str, ...]
    """A node, a folder (for one process only), or several of both."""
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    """Holds the token. Without either it is KDN_CLIENT_TOKEN or KDN_CLIENT_TOKEN_FILE."""
    secret: bytes = field(default=PUBLIC_SECRET, repr=False)
    """Names chunks: engines with the same secret share them, nobody else can find them."""
    secret_file: str | None = None
    """Holds the secret. Without either it is KDN_CLIENT_SECRET or KDN_CLIENT_SECRET_FILE."""
    tls_ca: str | None = None
    """A PEM file: the authority that signed the nodes' certificates, if a private one did."""
    client: str | None = None
    """Names this engine to nodes, for fair sharing."""
    codec: str = "klt"
    profile: str | None = None
    """A profile's file, if not the one that was shipped or calibrated here."""
    quality: float = 0.001
    """Mean KL divergence in nats that is good enough; levels beyond it are not fetched."""
    allow_coarser: bool = False
    """Lets a request with a cache salt of its own ask for less quality than this."""
    deadline_s: float = 5.0
    """For a load; what has not arrived by then is computed."""
    lookup_s: float = 0.5
    """For a lookup; then nothing is known of the prompt."""
    load: bool = True
    publish: bool = True
    queue_bytes: int = 1 << 30
    """Copied out of vLLM's memory and not encoded yet; what does not fit is not published."""
    host_bytes: int = 2 << 30
    """Of decoded chunks, in memory that all engines of this host share; 0: none."""
    host_folder: str | None = None
    """Where they are, if not in the system's shared memory."""
    load_failure: str = "recompute"
    """Sets vLLM's `kv_load_failure_policy`; "fail" fails a request whose load failed."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        values = {**given}
        if "url" not in values:
            raise UnsupportedError('kdn needs "url" in kv_connector_extra_config: a node or folder')
        url = values["url"]
        values["url"] = tuple(url) if isinstance(url, list | tuple) else url
        if isinstance(values.get("secret"), str):
            values["secret"] = values["secret"].encode()
        settings = cls(**_checked(cls, values | _credentials(values)))
        if settings.queue_bytes == 0:
            raise UnsupportedError(
                'queue_bytes: expected more than 0; "publish": false publishes nothing'
            )
        if settings.lookup_s == 0 or settings.deadline_s == 0:
            raise UnsupportedError(
                'lookup_s and deadline_s: expected more than 0; "load": false loads nothing'
            )
        if settings.client is not None:
            checked_client(settings.client)
        if settings.codec not in CODECS:
            raise UnsupportedError(f"no codec {settings.codec!r}; there are {', '.join(CODECS)}")
        if settings.load_failure not in ("recompute", "fail"):
            raise UnsupportedError(f"load_failure is recompute or fail: {settings.load_failure!r}")
        return settings

    def for_request(self, params: Mapping[str, Any] | None, *, has_salt: bool = False) -> Settings:
        """With what one request wants otherwise, which may only be stricter.

        Loads share their slots, and vLLM's prefix cache hands blocks on to whoever has the same
        salt: what is longer or coarser than the operator set becomes what the operator set.
        """
        own = (params or {}).get(REQUEST_KEY)
        if not own:
            return self
        if not isinstance(own, Mapping) or set(own) - set(_PER_REQUEST):
            raise UnsupportedError(f"a request may set {', '.join(_PER_REQUEST)}: found {own!r}")
        wanted = replace(self, **_checked(type(self), own))
        may_be_coarser = self.allow_coarser and has_salt
        return replace(
            wanted,
            quality=wanted.quality if may_be_coarser else min(wanted.quality, self.quality),
            deadline_s=min(wanted.deadline_s, self.deadline_s),
            load=self.load and wanted.load,
            publish=self.publish and wanted.publish,
        )


def _credentials(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the settings and the environment come to, checked without being shown."""
    given = {name: values.get(name) for name in _CREDENTIALS}
    for name in ("token", "secret"):
        if given[name] is not None:
            logger.warning(
                "%s is in vLLM's settings, which show in `ps` and in its log: set %s_file to the "
                "path of a file that holds it, or KDN_CLIENT_%s in the environment",
                name, name, name.upper(),
            )  # fmt: skip
    found = find_credentials(**given)
    secret = found.secret or PUBLIC_SECRET
    return {"token": found.token, "secret": secret, "tls_ca": found.tls_ca}


def _checked(cls: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {item.name: str(item.type) for item in fields(cls)}
    for name, value in values.items():
        if name not in kinds:
            raise UnsupportedError(f"kdn has no setting {name!r}; there are {', '.join(kinds)}")
        if not _fits(value, kinds[name]):
            raise UnsupportedError(f"{name}: expected {kinds[name]}, found {value!r}")
    return {n: float(v) if kinds[n] == "float" else v for n, v in values.items()}


def _fits(value: Any, kind: str) -> bool:
    if kind == "str | tuple[str, ...]":
        every = value if isinstance(value, tuple) else (value,)
        return bool(every) and all(isinstance(one, str) and one for one in every)
    if kind == "float":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and 0 <= value <= MAX_FLOAT
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if kind == "str | None":
        return value is None or (isinstance(value, str) and bool(value))
    return type(value).__name__ == kind
