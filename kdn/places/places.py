"""Where knowledge lives, opened from strings: a folder, the URL of a node, or several of both.

One string may name several nodes that share a store, and answer alike: URLs separated by commas, or
a name that has several addresses (`store/many_nodes.py`). A URL with a path is an export (`kdn
export`) on any web server: it is only read.

The URL of a store (`redis://…`, `s3://…`, see `store/opening.py`) is what nodes would put in front
of it: its objects and its names, without a node. Many processes may have it open.

A folder is a depot, as a node has one: the same stores, the same names, the same layout on disk.
What was learned into it can be served later, with `kdn node --data FOLDER`; one process at a time
may have it open. Everything is read from all places, folders first. What is new goes to one of
them: the first node, or, if there is none, the first folder.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kdn.checked import checked_urls, shown
from kdn.config import DepotSettings
from kdn.credentials import Credentials
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.depot.depot import Depot, open_depot
from kdn.depot.part import DepotPart
from kdn.errors import UnsupportedError
from kdn.places.names import FolderNames, Names, NodeNames
from kdn.places.static_names import LayeredNames, StaticNames
from kdn.store.base import Store
from kdn.store.many_nodes import ManyNodes, node_store, open_nodes
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.opening import check_store_url, is_store_url, without_password
from kdn.store.static import StaticProfiles, StaticStore
from kdn.store.static_client import StaticClient, is_export
from kdn.store.tls import client_tls

MEMORY_BYTES = 256 << 20
DISK_BYTES = 50 << 30
COLLECTIONS = ("chunks", "profiles", "objects")

Place = str | Path
Where = Place | Sequence[Place]


@dataclass(frozen=True)
class Places:
    """Valid while the context of `open_places` lasts."""

    endpoints: Endpoints
    """Of chunks: for `deliver`."""
    publish_to: Endpoint
    """The one among them that takes what is new: for `Publisher`."""
    profiles: tuple[Store, ...]
    """Profiles by profile id; the first is where new ones go."""
    names: Names
    """Of the place that takes what is new; what it does not have, exports may."""
    objects: Store | None = None
    """Whatever else is kept at the place that takes what is new; None at an export."""


@asynccontextmanager
async def open_places(
    where: Where,
    *,
    token: str | None = None,
    client: str | None = None,
    tls_ca: str | None = None,
    limits: HttpLimits | None = None,
    memory_bytes: int = MEMORY_BYTES,
    disk_bytes: int = DISK_BYTES,
) -> AsyncIterator[Places]:
    """`token` and `client` are told to nodes, whose certificates the authority in the PEM file
    `tls_ca` has signed (None: one that the system knows), and who are asked within `limits`; the
    sizes bound folders. Where no place is a node, `token` is the password of a Redis."""
    every = checked_places(where)
    tls = client_tls(tls_ca)
    node = partial(open_nodes, token=token, client=client, tls=tls, limits=limits)
    async with AsyncExitStack() as stack:
        opened = []
        for place in every:
            if is_url(place) and is_export(str(place)):
                export = StaticClient(str(place), limits=limits, tls=tls)
                opened.append(_open_export(stack, str(place), export))
            elif is_url(place):
                opened.append(_open_node(stack, str(place), node(str(place))))
            elif is_store_url(str(place)):
                own = None if any(map(is_url, every)) else token
                opened.append(await _open_store(stack, str(place), Credentials(own, None, tls_ca)))
            else:
                path = Path(place).expanduser()
                opened.append(await _open_folder(stack, path, memory_bytes, disk_bytes))
        first = min(opened, key=_rank)
        opened.sort(key=lambda one: one is not first)
        endpoints = Endpoints([one.endpoint for one in opened])
        profiles = tuple(one.profiles for one in opened)
        below = [one.names for one in opened[1:] if one.endpoint.store.read_only]
        names = LayeredNames(first.names, below) if below else first.names
        yield Places(endpoints, first.endpoint, profiles, names, first.objects)


def checked_places(where: Where) -> list[Place]:
    """Each a folder, or the URL of a node or store; what looks like another URL is not taken for a
    folder."""
    every = [where] if isinstance(where, str | Path) else where
    if not isinstance(every, Sequence) or not every:
        raise UnsupportedError("expected a folder or the URL of a node, found none")
    for place in every:
        if not isinstance(place, str | Path) or not str(place).strip() or "\0" in str(place):
            raise UnsupportedError(f"expected a folder or the URL of a node, found {shown(place)}")
        if isinstance(place, str) and is_store_url(place):
            check_store_url(place)
        elif is_url(place) or (isinstance(place, str) and "://" in place):
            checked_urls(str(place))
    return list(every)


def is_url(place: Place) -> bool:
    return str(place).startswith(("http://", "https://"))


def is_folder(place: Place) -> bool:
    return not is_url(place) and not (isinstance(place, str) and is_store_url(place))


def is_read_only(where: Sequence[Place]) -> bool:
    """Whether nothing can be written to any of them: all are exports."""
    return all(is_url(place) and is_export(str(place)) for place in where)


@dataclass(frozen=True)
class _Opened:
    endpoint: Endpoint
    profiles: Store
    names: Names
    objects: Store | None = None


def _rank(place: _Opened) -> tuple[bool, bool]:
    """What is new goes to the first of the best: one that can be written to, better a node."""
    return place.endpoint.store.read_only, place.endpoint.local


def _open_export(stack: AsyncExitStack, url: str, export: StaticClient) -> _Opened:
    """Nothing is asked of its server yet, either."""
    stack.push_async_callback(export.close)
    endpoint = Endpoint(StaticStore(export), name=url)
    return _Opened(endpoint, StaticProfiles(export), StaticNames(export))


def _open_node(stack: AsyncExitStack, url: str, node: NodeClient | ManyNodes) -> _Opened:
    """Nothing is asked of the node yet: one that is away now may be there later. Several nodes that
    answer alike are one endpoint: who of them is asked is their store's affair."""
    stack.push_async_callback(node.close)
    chunks, profiles, objects = (node_store(node, collection) for collection in COLLECTIONS)
    return _Opened(Endpoint(chunks, name=url), profiles, NodeNames(node), objects)


async def _open_folder(
    stack: AsyncExitStack, path: Path, memory_bytes: int, disk_bytes: int
) -> _Opened:
    settings = DepotSettings(data=path, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
    depot = await stack.enter_async_context(open_depot(settings))
    return _open_depot(depot, str(path), is_local=True)


async def _open_store(stack: AsyncExitStack, url: str, own: Credentials) -> _Opened:
    """Without caches: a session has its own, and nodes would have to tell it what was deleted."""
    settings = DepotSettings(
        store=url, store_token=own.token or "", store_tls_ca=own.tls_ca or "",
        memory_bytes=0, disk_bytes=0,
    )  # fmt: skip
    depot = await stack.enter_async_context(open_depot(settings))
    return _open_depot(depot, without_password(url), is_local=False)


def _open_depot(depot: Depot, name: str, *, is_local: bool) -> _Opened:
    [tenant] = depot.tenants
    chunks, profiles, objects = (
        DepotPart(depot, tenant.store_key(collection, b"")) for collection in COLLECTIONS
    )
    endpoint = Endpoint(chunks, name=name, local=is_local)
    return _Opened(endpoint, profiles, FolderNames(depot, tenant), objects)
