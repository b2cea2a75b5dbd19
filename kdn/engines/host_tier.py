"""Chunks that are decoded already, in shared memory, for all engines of one host.

Beside an engine that read a text, or that loaded it, another need not decode it again: it maps
what that one left. A chunk is a file of raw values, named by its key, with a header that tells its
shape, how far it is from what the model itself computed, and a checksum. Files appear whole, by
renaming, and are never written to again. When there is no room the least recently used go first,
and of one prompt its end before its beginning, without which the rest is of no use.

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
import time
from collections.abc import Callable, Iterator, Sequence
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
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TOKEN_AGE_NS = 10_000_000
"""A chunk counts as used so much earlier for each token before it."""
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

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_bytes: int,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`dtype`: the engine's; values that one of another dtype has rounded are not its own."""
        if dtype not in DTYPES:
            raise UnsupportedError(f"decoded chunks of {dtype}")
        _own(folder)
        self._folder, self._spec, self._dtype = folder, spec, dtype
        self._max_bytes, self._clock_ns = max_bytes, clock_ns

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
        try:
            _own(self._folder)  # it may have been removed, to free the memory
            used_ns = self._used_ns(chunk)
            if self.has(chunk, kld) or not self._make_room(
                HEADER_BYTES + cache.size_bytes, used_ns
            ):
                return False
            self._write(chunk, cache, kld, exact)
            os.utime(self._path(chunk), ns=(used_ns, used_ns))
        except OSError:  # no memory left, or the folder goes just now
            return False
        return True

    def _takes(self, chunk: Chunk, cache: KVCache) -> bool:
        return (
            cache.is_complete
            and cache.start == chunk.start
            and tuple(cache.keys.shape) == self._shape(chunk)
            and cache.dtype == self._dtype
        )

    def used(self, chunks: Sequence[Chunk]) -> None:
        """These were of use just now."""
        for chunk in chunks:
            with suppress(FileNotFoundError):
                os.utime(self._path(chunk), ns=(self._used_ns(chunk),) * 2)

    def _used_ns(self, chunk: Chunk) -> int:
        return self._clock_ns() - TOKEN_AGE_NS * chunk.start

    def _path(self, chunk: Chunk) -> Path:
        return self._folder / f"{chunk.key.hex()}.{DTYPES[self._dtype]}"

    # files

    def _header(self, chunk: Chunk) -> dict[str, Any] | None:
        try:
            with self._path(chunk).open("rb") as file:
                return _parse_header(file.read(HEADER_BYTES))
        except (OSError, FormatError):
            return None

    def _parse(self, chunk: Chunk, data: mmap.mmap) -> Held:
        header = _parse_header(data[:HEADER_BYTES])
        shape = self._shape(chunk)
        size = 2 * math.prod(shape) * self._dtype.itemsize
        if len(data) != HEADER_BYTES + size:
            raise FormatError(f"a decoded chunk of {len(data)} bytes, expected {size} of values")
        values = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
        if self._digest(chunk, header, values) != header["xxh3"]:
            raise ChecksumError("a decoded chunk is damaged")
        keys, values = torch.from_numpy(values).view(self._dtype).view(2, *shape)
        return Held(KVCache(keys, values, chunk.start), header["kld"], header["exact"])

    def _shape(self, chunk: Chunk) -> tuple[int, int, int, int]:
        spec = self._spec
        return (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)

    def _write(self, chunk: Chunk, cache: KVCache, kld: float, exact: bool) -> None:
        header = {"dtype": DTYPES[self._dtype], "kld": float(kld), "exact": exact}
        parts = [_bytes_of(cache.keys), _bytes_of(cache.values)]
        header["xxh3"] = self._digest(chunk, header, *parts)
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

    def _digest(self, chunk: Chunk, header: dict[str, Any], *values: npt.NDArray[np.uint8]) -> str:
        """Of everything: values of another chunk, dtype or quality do not pass for these."""
        told = (chunk.key.hex(), DTYPES[self._dtype], header["kld"], header["exact"])
        digest = xxh3_64(repr(told).encode())
        for part in values:
            digest.update(part.data)
        return digest.hexdigest()

    # room

    def _make_room(self, size: int, used_ns: int) -> bool:
        """By removing what was of use before that, if it is enough. Two who do this at once may
        keep a little more than allowed, or less."""
        disk = os.statvfs(self._folder)
        allowed = min(self._max_bytes, int(MAX_SHARE * disk.f_blocks * disk.f_frsize))
        if size > allowed:
            return False
        files = sorted(self._files())
        excess = sum(held for _, held, _ in files) + size - allowed
        older = [one for one in files if one[0] < used_ns]
        if excess > sum(held for _, held, _ in older):
            return False
        for _, held, path in older:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= held
        return True

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, size, path; what a process left half-written counts, too."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    yield about.st_mtime_ns, about.st_size, Path(entry.path)


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
    if header["dtype"] not in DTYPES.values() or not header["kld"] >= 0:
        raise FormatError(f"a decoded chunk of {header['dtype']} with {header['kld']} nats")
    return header
