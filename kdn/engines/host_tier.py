"""Chunks that are decoded already, in shared memory, for all engines of one host.

Beside an engine that read a text, or that loaded it, another need not decode it again: it maps
what that one left. A chunk is a file of raw values, named by its key, with a header that tells its
shape, how far it is from what the model itself computed, and a checksum. Files appear whole, by
renaming, and never change; the least recently used go first when there is no room.

The folder belongs to one user and nobody else may look into it; keys name the model, the tokens and
the tenant's secret, as everywhere. It lies in memory: it outlives engines, not the machine.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.errors import ChecksumError, FormatError, UnsupportedError

SHARED_MEMORY = Path("/dev/shm")
HEADER_BYTES = 512
"""Padded with spaces: so that values begin at a multiple of any element's size."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_SHARE = 0.5
"""Of the file system: others keep things in shared memory, too."""


@dataclass(frozen=True)
class Held:
    """A chunk's values, mapped, not copied."""

    cache: KVCache
    kld: float
    """What is expected of going on from them, in nats; 0 if the model computed them."""
    exact: bool
    """Whether what is computed on top of them may be published."""


class HostTier:
    """Of one model on this host. Any thread and any process of its user may use it."""

    def __init__(self, folder: Path, spec: ModelSpec, max_bytes: int) -> None:
        _own(folder)
        self._folder, self._spec, self._max_bytes = folder, spec, max_bytes

    def has(self, chunk: Chunk, worst_kld: float) -> bool:
        """Whether it is held well enough; `get` may still find it gone or damaged."""
        header = self._header(chunk)
        return header is not None and header["kld"] <= worst_kld

    def get(self, chunk: Chunk, worst_kld: float) -> Held | None:
        """Values that diverge by no more than `worst_kld`."""
        try:
            with self._path(chunk).open("rb") as file:
                # Private, so that nobody can write to it by mistake; only what is read is mapped.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            held = self._parse(chunk, data)
        except FileNotFoundError:
            return None
        except (FormatError, OSError, ValueError):
            self._path(chunk).unlink(missing_ok=True)
            return None
        return held if held.kld <= worst_kld else None

    def put(self, chunk: Chunk, cache: KVCache, kld: float, *, exact: bool) -> bool:
        """Keep a copy, unless one as good is there or there is no room."""
        if not self._takes(chunk, cache):
            return False
        if self.has(chunk, kld) or not self._make_room(HEADER_BYTES + cache.size_bytes):
            return False
        try:
            self._write(chunk, cache, kld, exact)
        except OSError:  # others have filled the memory meanwhile
            return False
        return True

    def _takes(self, chunk: Chunk, cache: KVCache) -> bool:
        return (
            cache.is_complete
            and cache.start == chunk.start
            and tuple(cache.keys.shape) == self._shape(chunk)
            and cache.dtype in DTYPES.values()
        )

    def used(self, chunks: Sequence[Chunk]) -> None:
        """The chunks of one prompt, from the front on. The first goes last: without it the others
        are of no use."""
        for chunk in reversed(chunks):
            with suppress(FileNotFoundError):
                os.utime(self._path(chunk))

    def _path(self, chunk: Chunk) -> Path:
        return self._folder / chunk.key.hex()

    # files

    def _header(self, chunk: Chunk) -> dict[str, Any] | None:
        try:
            with self._path(chunk).open("rb") as file:
                return _parse_header(file.read(HEADER_BYTES))
        except (OSError, FormatError):
            return None

    def _parse(self, chunk: Chunk, data: mmap.mmap) -> Held:
        header = _parse_header(data[:HEADER_BYTES])
        dtype = DTYPES[header["dtype"]]
        shape = self._shape(chunk)
        size = 2 * math.prod(shape) * dtype.itemsize
        if len(data) != HEADER_BYTES + size:
            raise FormatError(f"a decoded chunk of {len(data)} bytes, expected {size} of values")
        values = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
        if _digest(chunk, header, values) != header["xxh3"]:
            raise ChecksumError("a decoded chunk is damaged")
        keys, values = torch.from_numpy(values).view(dtype).view(2, *shape)
        return Held(KVCache(keys, values, chunk.start), header["kld"], header["exact"])

    def _shape(self, chunk: Chunk) -> tuple[int, int, int, int]:
        spec = self._spec
        return (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)

    def _write(self, chunk: Chunk, cache: KVCache, kld: float, exact: bool) -> None:
        name = next(name for name, dtype in DTYPES.items() if dtype == cache.dtype)
        header = {"dtype": name, "kld": float(kld), "exact": exact}
        parts = [_bytes_of(cache.keys), _bytes_of(cache.values)]
        header["xxh3"] = _digest(chunk, header, *parts)
        handle, half_written = tempfile.mkstemp(dir=self._folder, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
                for part in parts:
                    file.write(part.data)
            os.rename(half_written, self._path(chunk))
        except OSError:
            os.unlink(half_written)
            raise

    # room

    def _make_room(self, size: int) -> bool:
        """Two who do this at once may keep a little more than allowed, or less."""
        disk = os.statvfs(self._folder)
        allowed = min(self._max_bytes, int(MAX_SHARE * disk.f_blocks * disk.f_frsize))
        if size > allowed:
            return False
        files = sorted(self._files())
        excess = sum(held for _, held, _ in files) + size - allowed
        for _, held, path in files:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= held
        return True

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size, path; what a process left half-written counts, too."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    yield about.st_mtime, about.st_size, Path(entry.path)


def default_folder() -> Path | None:
    """In this system's shared memory, if it has any."""
    if not SHARED_MEMORY.is_dir():
        return None
    return SHARED_MEMORY / f"kdn-{os.getuid()}"


def _own(folder: Path) -> None:
    """Made if absent; refused if others could read or fill it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise UnsupportedError(
            f"{folder} is not a folder that only this user can open: remove it, or name another"
        )


def _bytes_of(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    return values.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)


def _digest(chunk: Chunk, header: dict[str, Any], *values: npt.NDArray[np.uint8]) -> str:
    """Of everything: values of another chunk, or of another quality, do not pass for these."""
    told = (chunk.key.hex(), header["dtype"], header["kld"], header["exact"])
    digest = xxh3_64(repr(told).encode())
    for part in values:
        digest.update(part.data)
    return digest.hexdigest()


def _parse_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except ValueError as error:
        raise FormatError("a decoded chunk has no header") from error
    kinds = {"dtype": str, "kld": float, "exact": bool, "xxh3": str}
    if not isinstance(header, dict) or any(
        not isinstance(header.get(name), kind) for name, kind in kinds.items()
    ):
        raise FormatError("a decoded chunk has a header of another kind")
    if header["dtype"] not in DTYPES or not header["kld"] >= 0:
        raise FormatError(f"a decoded chunk of {header['dtype']} with {header['kld']} nats")
    return header
