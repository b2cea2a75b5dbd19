"""What every engine sets: where knowledge lives, who asks, how much memory and disk that takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kdn.cache.keys import PUBLIC_SECRET
from kdn.credentials import Credentials
from kdn.defaults import (
    CODEC,
    HOST_BYTES,
    QUEUE_BYTES,
    REQUEST_LOG_BYTES,
    RESOLVE_S,
    SPOOL_BYTES,
    STORED_QUALITY,
)
from kdn.places.places import Place
from kdn.session.quality import Quality


@dataclass(frozen=True)
class SessionSettings:
    where: tuple[Place, ...]
    """Folders and nodes: see `open_places`."""
    credentials: Credentials = field(default_factory=Credentials, repr=False)
    client: str | None = None
    """Names this engine to nodes, for fair sharing."""
    codec: str = CODEC
    profile: Path | None = None
    """A profile's file, if not the one that was shipped, calibrated here or shared."""
    stored_quality: Quality = STORED_QUALITY
    """What is published has as many levels as this quality takes of a chunk; "exact": all."""
    queue_bytes: int = QUEUE_BYTES
    """Of chunks that wait to be encoded; what does not fit is not published."""
    spool_bytes: int = SPOOL_BYTES
    """Of encoded chunks that wait on disk for a node that is away; 0: they wait in memory."""
    spool_folder: Path | None = None
    """Where they wait, if not in the cache folder."""
    host_bytes: int = HOST_BYTES
    """Of chunks, in memory that all engines of this host share; 0: none."""
    host_folder: Path | None = None
    """Where they are, if not in the system's shared memory."""
    request_log_bytes: int = REQUEST_LOG_BYTES
    """For what was decided for each request (`kdn/request_log.py`); 0: it is not written down."""
    request_log: Path | None = None
    """The file for that, if not the one in the cache folder."""
    tracing: bool = False
    """Record traces with OpenTelemetry, and send them where its OTEL_* variables say. Where the
    process has configured it, that is done anyway."""
    resolve_s: float = RESOLVE_S
    """How long the addresses of a name are taken to be the same."""
    fetch_connections: int | None = None
    """Over so many a process of its own receives what is delivered; 0: there is none. None: as
    suits the machine (`connections_here`)."""

    @property
    def secret(self) -> bytes:
        return self.credentials.secret or PUBLIC_SECRET
