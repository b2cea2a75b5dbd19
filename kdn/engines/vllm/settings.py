"""What an operator may set, in `kv_connector_extra_config`; a request, in `kv_transfer_params`.

What is unknown or of the wrong kind is refused by name when vLLM starts. In a request it is
refused too, by not using any cache for it: a request must not bring an engine down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kdn.checked import (
    MAX_WAIT_S,
    checked_choice,
    checked_client,
    checked_count,
    checked_number,
    checked_text,
    shown,
)
from kdn.codec import CODECS
from kdn.config import client_of_environment, find_credentials
from kdn.credentials import Credentials
from kdn.defaults import ENGINE_QUALITY
from kdn.engines.vllm.event_publisher import checked_endpoint
from kdn.engines.vllm.piece_ranges import MAX_SEPARATOR_TOKENS
from kdn.errors import UnsupportedError
from kdn.places.places import Place, checked_places, is_read_only
from kdn.session.quality import MAX_KLD, QUALITIES, enough_kld
from kdn.session.seams import checked_tag
from kdn.session.settings import SessionSettings

logger = logging.getLogger(__name__)

REQUEST_KEY = "kdn"
"""Under which `kv_transfer_params` holds the settings of one request."""
PIECES_KEY = "pieces"
"""Among those: where its pieces are. They are checked apart (`piece_ranges.py`), and if they are
wrong the request is only not joined."""
BLEND = ("off", "ranges", "separator", "auto")
"""Who says where the pieces of a prompt are: nobody, its request, the operator, kdn."""
MAX_JOIN_KLD = 0.15
MAX_BYTES = 1 << 50
MIN_RESOLVE_S = 0.1
MAX_CONNECTIONS = 64
STAGING_BYTES = 5 << 28
"""1.25 GiB: 8,192 tokens of a model with 8 billion weights, and some more."""


@dataclass(frozen=True)
class Settings:
    session: SessionSettings
    quality: float = QUALITIES[ENGINE_QUALITY]
    """Mean KL divergence in nats that is good enough; levels beyond it are not fetched."""
    allow_coarser: bool = False
    """Lets a request with a cache salt of its own ask for less quality than this."""
    deadline_s: float = 5.0
    """For a load; what has not arrived by then is computed."""
    lookup_s: float = 0.5
    """For a lookup; then nothing is known of the prompt."""
    load: bool = True
    publish: bool = True
    load_failure: str = "recompute"
    """Sets vLLM's `kv_load_failure_policy`; "fail" fails a request whose load failed."""
    staging_bytes: int = STAGING_BYTES
    """GPU memory for chunks that wait to be encoded; what does not fit is published later, or not
    at all."""
    events_endpoint: str = ""
    """ZeroMQ's address for events of kdn's own; empty: vLLM publishes them among its own, if it
    publishes any."""
    events_topic: str = ""
    """Empty: kv@HOST@MODEL."""
    blend: str = "off"
    """Whether pieces that were learned apart are joined, and who says where they are: see `BLEND`.
    With all but "off", a request may name them itself."""
    separator: tuple[int, ...] | str = ()
    """What ends a head and each piece: tokens, or a text that stands for some."""
    seams: str | None = ""
    """The tag of the seams that repair joins; None: joins are not repaired."""
    join_kld: float = MAX_JOIN_KLD
    """Mean divergence over some tokens that seams may leave, as their report expects it: with worse
    ones, or with none, nothing is joined."""
    learn: bool = False
    """Only of a request: its prompt is a piece, whose last tokens are published too."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        if "url" not in given:
            raise UnsupportedError('kdn needs "url" in kv_connector_extra_config: a node or folder')
        known = ("url", *_CREDENTIALS, *_OF_SESSION, *_OWN)
        for name in given:
            if name not in known:
                raise UnsupportedError(f"kdn has no setting {name!r}; there are {', '.join(known)}")
        for name in ("deadline_s", "lookup_s"):
            if name in given and given[name] == 0:
                raise UnsupportedError(f'{name}: expected more than 0; "load": false loads nothing')
        if given.get("blend") == "separator" and not given.get("separator"):
            raise UnsupportedError('"blend": "separator" needs a "separator": tokens or a text')
        told = client_of_environment()
        of_session: dict[str, Any] = {
            "request_log_bytes": told.request_log_bytes, "tracing": told.tracing,
        }  # fmt: skip
        of_session |= _checked(given, _OF_SESSION)
        session = SessionSettings(_places(given["url"]), _credentials(given), **of_session)
        own = cls(session, **_checked(given, _OWN))
        stored = enough_kld(session.stored_quality)
        if own.load and own.publish and stored > own.quality:
            raise UnsupportedError(
                f"stored_quality: expected no coarser than the quality {own.quality:g}, found "
                f"{stored:g}: this engine would not use what it stores"
            )
        return own

    @property
    def is_remote(self) -> bool:
        """Whether some place is elsewhere: neither a folder nor the URL of one."""
        places = map(str, self.session.where)
        return any("://" in place and not place.startswith("file://") for place in places)

    def for_engine(
        self, *, consumes: bool, produces: bool, ranks: int = 1, rank: int | None = None
    ) -> Settings:
        """With what vLLM makes of this engine, for a rank of it (None: its scheduler). Of several
        ranks the first publishes for all; to exports nobody does. Who publishes nothing has no
        spool: it would take over what others left there."""
        publish = self.publish and produces and not is_read_only(self.session.where)
        has_spool = publish and (ranks == 1 or rank == 0)
        session = self.session if has_spool else replace(self.session, spool_bytes=0)
        return replace(self, session=session, load=self.load and consumes, publish=publish)

    def for_request(self, params: Mapping[str, Any] | None, *, has_salt: bool = False) -> Settings:
        """With what one request wants otherwise, which may only be stricter.

        Loads share their slots, and vLLM's prefix cache hands blocks on to whoever has the same
        salt: what is longer or coarser than the operator set becomes what the operator set.
        """
        own = (params or {}).get(REQUEST_KEY)
        if not own:
            return self
        may_set = (*_OF_REQUEST, *_ONLY_OF_REQUEST, PIECES_KEY)
        if not isinstance(own, Mapping) or set(own) - set(may_set):
            raise UnsupportedError(f"a request may set {', '.join(may_set)}: found {own!r}")
        wanted = replace(self, **_checked(own, {**_OF_REQUEST, **_ONLY_OF_REQUEST}))
        may_be_coarser = self.allow_coarser and has_salt
        return replace(
            wanted,
            quality=wanted.quality if may_be_coarser else min(wanted.quality, self.quality),
            deadline_s=min(wanted.deadline_s, self.deadline_s),
            join_kld=min(wanted.join_kld, self.join_kld),
            load=self.load and wanted.load,
            publish=self.publish and wanted.publish,
        )


Check = Callable[[str, Any], Any]
"""Name and value of a setting to what is meant by it; UnsupportedError if that is not known."""


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UnsupportedError(f"{name}: expected true or false, found {shown(value)}")
    return value


def _path(name: str, value: Any) -> Path | None:
    return None if value is None else Path(checked_text(name, value)).expanduser()


def _quality(name: str, value: Any) -> float:
    try:
        return enough_kld(value)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None


def _separator(name: str, value: Any) -> tuple[int, ...] | str:
    if isinstance(value, str):
        return checked_text(name, value, empty=True)
    is_row = isinstance(value, list | tuple) and len(value) <= MAX_SEPARATOR_TOKENS
    if not is_row or any(type(one) is not int or not 0 <= one < 1 << 32 for one in value):
        raise UnsupportedError(
            f"{name}: expected a text, or up to {MAX_SEPARATOR_TOKENS} token ids, "
            f"found {shown(value)}"
        )
    return tuple(value)


def _tag(name: str, value: Any) -> str | None:
    return None if value is None else checked_tag(checked_text(name, value, empty=True))


_seconds = partial(checked_number, least=0, most=MAX_WAIT_S)
_bytes = partial(checked_count, least=0, most=MAX_BYTES)

_CREDENTIALS = ("token", "token_file", "secret", "secret_file", "tls_ca")
_OF_SESSION: Mapping[str, Check] = {
    "client": lambda name, value: checked_client(value),
    "codec": partial(checked_choice, known=CODECS),
    "profile": _path,
    "stored_quality": _quality,
    "queue_bytes": partial(checked_count, most=MAX_BYTES),
    "spool_bytes": _bytes,
    "spool_folder": _path,
    "host_bytes": _bytes,
    "host_folder": _path,
    "request_log_bytes": _bytes,
    "request_log": _path,
    "tracing": _flag,
    "resolve_s": partial(checked_number, least=MIN_RESOLVE_S, most=MAX_WAIT_S),
    "fetch_connections": partial(checked_count, least=0, most=MAX_CONNECTIONS),
}
_OF_REQUEST: Mapping[str, Check] = {
    "quality": _quality,
    "deadline_s": _seconds,
    "load": _flag,
    "publish": _flag,
    "join_kld": partial(checked_number, least=0, most=MAX_KLD),
}
_ONLY_OF_REQUEST: Mapping[str, Check] = {"learn": _flag}
_OWN: Mapping[str, Check] = {
    **_OF_REQUEST,
    "lookup_s": _seconds,
    "allow_coarser": _flag,
    "staging_bytes": _bytes,
    "events_endpoint": lambda name, value: checked_endpoint(name, value),
    "events_topic": checked_text,
    "blend": partial(checked_choice, known=BLEND),
    "separator": _separator,
    "seams": _tag,
    "load_failure": partial(checked_choice, known=("recompute", "fail")),
}


def _checked(given: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    return {name: check(name, given[name]) for name, check in checks.items() if name in given}


def _places(url: Any) -> tuple[Place, ...]:
    try:
        return tuple(checked_places(url))
    except UnsupportedError as error:
        raise UnsupportedError(f"url: {error}") from None


def _credentials(given: Mapping[str, Any]) -> Credentials:
    """What the settings and the environment come to, checked without being shown."""
    values = {name: given.get(name) for name in _CREDENTIALS}
    for name in ("token", "secret"):
        if values[name] is not None:
            logger.warning(
                "%s is in vLLM's settings, which show in `ps` and in its log: set %s_file to the "
                "path of a file that holds it, or KDN_CLIENT_%s in the environment",
                name, name, name.upper(),
            )  # fmt: skip
    if isinstance(values["secret"], str):
        values["secret"] = values["secret"].encode()
    return find_credentials(**values)
