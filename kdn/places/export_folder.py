"""The folder that `kdn export` writes and a web server serves (`kdn/store/static_layout.py`).

Every file is written aside and renamed, so readers see the old one or the new one. A chunk's file
is there before an index names it, and goes after no index does. One process at a time may write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import time
from typing import Any

from kdn.depot.names import Version
from kdn.errors import FormatError, StoreError, UnsupportedError
from kdn.files import lock_file, write_whole
from kdn.places.export_index import plan_pages
from kdn.places.manifests import Manifest
from kdn.places.static_names import version_of
from kdn.store.base import Entry
from kdn.store.static_layout import (
    FORMAT,
    LIST_FILE,
    MAX_HEAD_BYTES,
    NAMES_FILE,
    ROOT_FILE,
    VERSION,
    Page,
    chunk_path,
    index_path,
    name_path,
    pack_list,
    pack_page,
    pack_pointer,
    parse_list,
    parse_page,
    profile_path,
)

FILE_MODE = 0o644
"""As the umask allows: a web server is to read it."""
LOCK_FILE, ASIDE_FILE = ".lock", ".aside"
PARTS = ("chunks", "index", "names", "profiles")


class ExportFolder:
    """Close it to let others write. Its methods are for threads, one at a time unless said."""

    def __init__(self, path: Path, header_bytes: Callable[[bytes], int]) -> None:
        """UnsupportedError if there are other things than an export. `header_bytes` says how long
        the header is that a stream begins with."""
        self.path, self._header_bytes = path, header_bytes
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (told := self._read(ROOT_FILE)) is not None:
                _check_version(path, told)
            elif strange := [name for name in os.listdir(path) if not _is_ours(name)]:
                raise UnsupportedError(
                    f"{path}: expected an empty folder or an export, found {min(strange)!r}"
                )
            self._lock = lock_file(path / LOCK_FILE)
        except BlockingIOError:
            raise StoreError(f"{path}: another process is exporting there") from None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._lock)

    def entries(self) -> dict[bytes, Entry]:
        """All chunks that were exported before, and are still whole."""
        told = self._read(LIST_FILE)
        try:
            every = [] if told is None else parse_list(told)
        except FormatError as error:
            raise StoreError(
                f"{self.path / LIST_FILE} is damaged ({error}): export into an empty folder"
            ) from error
        return {one.key: one for one in every if self.has_chunk(one)}

    def has_chunk(self, entry: Entry) -> bool:
        """Of files, only whole ones have a chunk's name. For any thread."""
        with suppress(OSError):
            return (self.path / chunk_path(entry.key, entry.etag)).stat().st_size == (
                entry.size_bytes
            )
        return False

    def write_chunk(self, entry: Entry, data: bytes) -> None:
        """For any thread, of different chunks."""
        self._write(chunk_path(entry.key, entry.etag), data)

    def has_profile(self, key: bytes) -> bool:
        return (self.path / profile_path(key)).exists()

    def write_profile(self, key: bytes, data: bytes) -> None:
        self._write(profile_path(key), data)

    def write_name(self, about: Version, manifest: Manifest) -> bool:
        """False if this version is there already."""
        data = _dump({**asdict(about), "manifest": manifest})
        return self._write_changed(name_path(about.name), data)

    def versions(self) -> dict[str, Version]:
        """Names that were exported before."""
        told = self._read(NAMES_FILE)
        every = [] if told is None else _parsed(NAMES_FILE, told).get("names", [])
        found = [version_of(one) for one in every]
        return {one.name: one for one in found if (self.path / name_path(one.name)).exists()}

    # the index

    def write_index(self, entries: Mapping[bytes, Entry]) -> int:
        """For these chunks, whose files are there; how many of its files changed. Pages come before
        those that lead to them, and pointers last: whoever reads meanwhile finds what was there
        before."""
        changed = 0
        pointers: dict[bytes, bytes] = {}
        for plan in plan_pages(entries):
            name = plan.members[0]
            before = self._page(name)
            told = [self._with_head(entries[key], before) for key in plan.members]
            changed += self._write_changed(index_path(name), pack_page(told, plan.onward))
            pointers |= {key: pack_pointer(key, name) for key in plan.members[1:]}
        for key, data in pointers.items():
            changed += self._write_changed(index_path(key), data, durable=False)
        self._write_changed(LIST_FILE, pack_list([entries[key] for key in sorted(entries)]))
        return changed

    def _page(self, name: bytes) -> Page:
        try:
            told = self._read(index_path(name))
            return Page() if told is None else parse_page(name, told, complete=True)
        except FormatError:
            return Page()  # it is written anew

    def _with_head(self, entry: Entry, before: Page) -> Entry:
        known = before.entries.get(entry.key)
        if known is not None and known.etag == entry.etag and known.head:
            return replace(entry, head=known.head)
        with (self.path / chunk_path(entry.key, entry.etag)).open("rb") as file:
            head = file.read(MAX_HEAD_BYTES)
        return replace(entry, head=head[: self._header_bytes(head)])

    def finish(self, entries: Mapping[bytes, Entry], versions: Mapping[str, Version]) -> None:
        """The files that say what there is."""
        names = [asdict(versions[name]) for name in sorted(versions)]
        self._write_changed(NAMES_FILE, _dump({"names": names}))
        told = {
            "format": FORMAT,
            "version": VERSION,
            "written_s": time(),
            "names": len(versions),
            "chunks": len(entries),
            "chunk_bytes": sum(one.size_bytes for one in entries.values()),
        }
        self._write(ROOT_FILE, _dump(told))

    # what is not needed any more

    def prune(
        self, entries: Mapping[bytes, Entry], names: Sequence[str], profiles: Sequence[bytes]
    ) -> int:
        """Remove all that neither these chunks nor these names are; how many files that were."""
        kept = {chunk_path(one.key, one.etag) for one in entries.values()}
        kept |= {index_path(key) for key in entries}
        kept |= {name_path(name) for name in names} | {profile_path(key) for key in profiles}
        gone = [path for path in self._files() if path not in kept]
        for path in gone:
            (self.path / path).unlink(missing_ok=True)
        return len(gone)

    def _files(self) -> Iterator[str]:
        for part in PARTS:
            for folder, _, names in os.walk(self.path / part):
                for name in names:
                    yield (Path(folder) / name).relative_to(self.path).as_posix()

    # files

    def _read(self, path: str) -> bytes | None:
        try:
            return (self.path / path).read_bytes()
        except FileNotFoundError:
            return None

    def _write_changed(self, path: str, data: bytes, durable: bool = True) -> bool:
        """What every export compares need not be durable: the next one writes it again."""
        if self._read(path) == data:
            return False
        self._write(path, data, durable)
        return True

    def _write(self, path: str, data: bytes, durable: bool = True) -> None:
        whole = self.path / path
        aside = whole.with_name(f"{ASIDE_FILE}-{whole.name}")
        whole.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            write_whole(whole, data, aside, FILE_MODE)
        else:
            aside.write_bytes(data)
            aside.rename(whole)


def _is_ours(name: str) -> bool:
    """Of what a first export left that was interrupted."""
    return name in (*PARTS, LIST_FILE, NAMES_FILE, LOCK_FILE) or name.startswith(ASIDE_FILE)


def _check_version(path: Path, data: bytes) -> None:
    told = _parsed(path / ROOT_FILE, data)
    if told.get("format") != FORMAT or told.get("version") != VERSION:
        raise UnsupportedError(
            f"{path}: expected {FORMAT!r} of version {VERSION}, found "
            f"{told.get('format')!r}, {told.get('version')!r}"
        )


def _parsed(path: str | Path, data: bytes) -> dict[str, Any]:
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: expected JSON: {error}") from error
    if not isinstance(told, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return told


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
