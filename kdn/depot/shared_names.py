"""Names of a store that many nodes share, by the store's URL."""

from __future__ import annotations

from kdn.credentials import Credentials
from kdn.depot.names import SharedNames
from kdn.errors import UnsupportedError
from kdn.store.opening import OBJECTS, REDIS, scheme_of


def open_shared_names(url: str, credentials: Credentials) -> SharedNames:
    """Nothing is asked yet: a store that is away now may be there later."""
    scheme = scheme_of(url)
    if scheme in REDIS:
        from kdn.depot.redis_names import RedisNames

        return RedisNames(url, credentials)
    if scheme in OBJECTS:
        from kdn.depot.object_names import ObjectNames
        from kdn.depot.small_objects import SmallObjects
        from kdn.store.object import open_object_store

        return ObjectNames(SmallObjects(open_object_store(url, credentials).bucket))
    raise UnsupportedError(f"{scheme}:// holds no names: expected a store of Redis or of objects")
