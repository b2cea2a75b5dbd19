"""Where a session's spool lies: one for each place, token and secret of a user."""

from __future__ import annotations

import logging
from hashlib import blake2b

from kdn.cache.folder import cache_folder
from kdn.cache.keys import Namespace
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.spool import Spool
from kdn.errors import KdnError
from kdn.session.settings import SessionSettings

logger = logging.getLogger(__name__)


def open_spool(settings: SessionSettings, place: Endpoint, namespace: Namespace) -> Spool | None:
    """None if there is to be none, for a folder, which is as near as a spool, and for a place that
    takes nothing. What waits in it
    was named with a secret and is meant for a place and its tenant: others do not send it."""
    if place.local or place.store.read_only or not settings.spool_bytes:
        return None
    whose = f"{place.name.rstrip('/')}\n{settings.credentials.token or ''}"
    name = blake2b(whose.encode(), digest_size=16, key=namespace.seal_key).hexdigest()
    try:
        folder = settings.spool_folder or cache_folder() / "spool"
        return Spool.open(folder / name, settings.spool_bytes)
    except (KdnError, OSError, RuntimeError) as error:  # no home, for instance
        if settings.spool_folder is not None:
            raise
        logger.warning("chunks for a place that is away wait in memory, not on disk: %s", error)
        return None
