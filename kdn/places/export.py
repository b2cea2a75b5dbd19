"""`kdn export`: what a place holds, as files that any web server can serve.

Names are exported with the chunks and profiles that they use; without a choice of names, all chunks
are. Every chunk is verified before it is written. A second export to the same folder adds what is
new and updates what changed; with `prune` it also removes what it did not find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kdn.checked import shown
from kdn.depot.names import Version
from kdn.errors import ChecksumError, KdnError, StoreError
from kdn.places.export_folder import ExportFolder
from kdn.places.manifests import Manifest
from kdn.places.places import Places
from kdn.protocol.limits import MAX_PROFILE_BYTES, MAX_SPANS
from kdn.store.base import Entry, Hints, Store
from kdn.store.static_layout import KEY_BYTES

AT_ONCE = 4
"""Chunks that are read and written side by side."""
MODEL_NAMES = ("profile-", "seams-")
"""What the names begin with that say which profile a model's caches are coded with, and which seams
repair them in joins."""

OnChunk = Callable[[int, int, int], None]
"""Called with how many chunks of how many are done, and their bytes."""


@dataclass(frozen=True)
class Streams:
    """What is to be known of bitstreams, which nothing here can read."""

    verify: Callable[[bytes, bytes, bytes], None]
    """Of key, etag and data: KdnError if these are not the whole of that very stream."""
    header_bytes: Callable[[bytes], int]


@dataclass
class Exported:
    """What an export did."""

    names: int = 0
    chunks: int = 0
    """All that are in the export now."""
    new_chunks: int = 0
    new_bytes: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    """By name: chunks that the place does not have any more. Models compute them."""
    damaged: list[str] = field(default_factory=list)
    """Keys of chunks that did not verify, and were left out."""
    pruned_files: int = 0


@dataclass
class _Wanted:
    versions: dict[str, tuple[Version, Manifest]] = field(default_factory=dict)
    entries: dict[bytes, Entry] = field(default_factory=dict)
    profiles: set[bytes] = field(default_factory=set)
    missing: dict[str, int] = field(default_factory=dict)


async def export(
    places: Places,
    path: Path,
    streams: Streams,
    *,
    names: Sequence[str] = (),
    prune: bool = False,
    on_chunk: OnChunk = lambda done, total, num_bytes: None,
) -> Exported:
    """`names`: those to export, or patterns ("docs-*"); none: all, and all chunks."""
    store = places.publish_to.store
    wanted = await _find(places, store, names)
    folder = await asyncio.to_thread(ExportFolder, path, streams.header_bytes)
    try:
        return await _Export(folder, streams, wanted, on_chunk).run(store, places.profiles, prune)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    finally:
        folder.close()


async def _find(places: Places, store: Store, patterns: Sequence[str]) -> _Wanted:
    """What there is to export. StoreError if a name is not there."""
    every = {about.name: about async for about in places.names.list()}
    chosen = {name for name in every if not patterns or _matches(name, patterns)}
    unknown = [one for one in patterns if not any(fnmatchcase(name, one) for name in every)]
    if unknown:
        raise StoreError(f"there is no name {shown(unknown[0])} at {places.publish_to.name}")
    wanted = _Wanted()
    for name in sorted(chosen):
        await _add_name(wanted, places, store, every[name])
    models = {model for _, manifest in wanted.versions.values() for model in _models(manifest)}
    for name in sorted(set(every) - chosen):
        if name.startswith(MODEL_NAMES) and any(model in name for model in models):
            await _add_name(wanted, places, store, every[name])
    if not patterns:
        async for entry in store.list():
            if len(entry.key) == KEY_BYTES:
                wanted.entries.setdefault(entry.key, entry)
    return wanted


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


async def _add_name(wanted: _Wanted, places: Places, store: Store, about: Version) -> None:
    found = await places.names.get(about.name)
    if found is None:
        return  # it was deleted meanwhile
    about = replace(about, version=found.version, etag=found.etag)
    wanted.versions[about.name] = about, found.manifest
    for model in _models(found.manifest).values():
        keys = _keys(model.get("chunks"))
        for start in range(0, len(keys), MAX_SPANS):
            some = keys[start : start + MAX_SPANS]
            parents = [None, *keys][start : start + len(some)]
            for parent, key, entry in zip(parents, some, await store.lookup(some), strict=True):
                if entry is None:
                    wanted.missing[about.name] = wanted.missing.get(about.name, 0) + 1
                else:
                    hints = Hints(parent, entry.hints.saved_s)
                    wanted.entries[key] = replace(entry, hints=hints, head=b"")
        wanted.profiles.update(_keys([model.get("profile")]))


def _models(manifest: Manifest) -> dict[str, dict[str, Any]]:
    models = manifest.get("models")
    told = models if isinstance(models, dict) else {}
    return {key: one for key, one in told.items() if isinstance(one, dict)}


def _keys(told: object) -> list[bytes]:
    """Those that are keys."""
    keys = []
    for one in told if isinstance(told, list) else ():
        try:
            key = bytes.fromhex(one)
        except (TypeError, ValueError):
            continue
        if len(key) == KEY_BYTES:
            keys.append(key)
    return keys


class _Export:
    def __init__(
        self, folder: ExportFolder, streams: Streams, wanted: _Wanted, on_chunk: OnChunk
    ) -> None:
        self._folder, self._streams, self._wanted = folder, streams, wanted
        self._on_chunk = on_chunk
        self._done = Exported(missing=wanted.missing)
        self._num_done = 0

    async def run(self, store: Store, profiles: Sequence[Store], prune: bool) -> Exported:
        folder, wanted, done = self._folder, self._wanted, self._done
        entries = await asyncio.to_thread(folder.entries)
        versions = await asyncio.to_thread(folder.versions)
        kept_profiles = [key for key in wanted.profiles if await self._profile(key, profiles)]
        written = await self._write_chunks(store)
        entries = written if prune else {**entries, **written}
        await asyncio.to_thread(folder.write_index, entries)
        for about, manifest in wanted.versions.values():
            await asyncio.to_thread(folder.write_name, about, manifest)
        own = {name: about for name, (about, _) in wanted.versions.items()}
        versions = own if prune else {**versions, **own}
        await asyncio.to_thread(folder.finish, entries, versions)
        if prune:
            done.pruned_files = await asyncio.to_thread(
                folder.prune, entries, list(versions), kept_profiles
            )
        done.names, done.chunks = len(versions), len(entries)
        return done

    async def _write_chunks(self, store: Store) -> dict[bytes, Entry]:
        """Those of the wanted chunks that are in the folder now."""
        todo = list(self._wanted.entries.values())
        written: dict[bytes, Entry] = {}
        queue = iter(todo)

        async def work() -> None:
            for entry in queue:
                if await self._write_chunk(store, entry):
                    written[entry.key] = entry
                self._num_done += 1
                self._on_chunk(self._num_done, len(todo), self._done.new_bytes)

        workers = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:  # where one failed, the others end before the folder is given up
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return written

    async def _write_chunk(self, store: Store, entry: Entry) -> bool:
        if await asyncio.to_thread(self._folder.has_chunk, entry):
            return True
        span = await store.get(entry.key, etag=entry.etag)
        if span is None:  # evicted or replaced meanwhile
            self._done.missing["(meanwhile)"] = self._done.missing.get("(meanwhile)", 0) + 1
            return False
        data = bytes(span.data)
        try:
            await asyncio.to_thread(self._streams.verify, entry.key, entry.etag, data)
        except KdnError:
            self._done.damaged.append(entry.key.hex())
            return False
        await asyncio.to_thread(self._folder.write_chunk, entry, data)
        self._done.new_chunks += 1
        self._done.new_bytes += len(data)
        return True

    async def _profile(self, key: bytes, stores: Iterable[Store]) -> bool:
        """Whether the folder has it now. One that comes with kdn is at no place."""
        if await asyncio.to_thread(self._folder.has_profile, key):
            return True
        for store in stores:
            span = await store.get(key, 0, MAX_PROFILE_BYTES)
            if span is not None:
                data = bytes(span.data)
                if blake2b(data, digest_size=KEY_BYTES).digest() != key:
                    raise ChecksumError(f"the profile {key.hex()} arrived with other bytes")
                await asyncio.to_thread(self._folder.write_profile, key, data)
                return True
        return False
