"""Chunks that are decoded already, in shared memory, for all engines of one host.

Beside an engine that read a text, or that loaded it, another need not decode it again: it maps
what that one left. A chunk is a file of raw values, named by its key, with a header that tells its
shape, how far it is from what the model itself computed, and a checksum. Files appear whole, by
renaming, and are never written to again. When there is no room the least recently used go first,
and of one prompt its end before its beginning, without which the rest is of no use.

What lies here is believed: it is in a folder that only its user can open (host_folder.py). Keys
name the model, the tokens and the tenant's secret, as everywhere. It lies in memory: it outlives
engines, not the machine.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from kdn.delivery.request import worst_kld
from kdn.delivery.sink import Sink
from kdn.errors import ChecksumError, FormatError, UnsupportedError
from kdn.session.delivered import Grade
from kdn.session.host_folder import Here, HostFolder, OnChange

SHARED_MEMORY = Path("/dev/shm")
HEADER_BYTES = 512
"""Padded with spaces: so that values begin at a multiple of any element's size."""
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TOKEN_AGE_NS = 10_000_000
"""For each token before it, a chunk counts as used this much earlier."""
MAX_SHARE = 0.5
"""At most this share of the file system is used: other programs need shared memory, too."""
_NAME = re.compile(rf"(?:[0-9a-f]{{2}})+\.(?:{'|'.join(DTYPES.values())})")


@dataclass(frozen=True)
class HeldValues:
    """A chunk's values, mapped, not copied."""

    cache: KVCache
    kld: float
    """Expected KL divergence when the model continues from them; 0 if the model computed them."""
    exact: bool
    """Whether values that are computed on top of them may be published."""


class HostMemory:
    """Of one model on this host. Any thread and any process of its user may use it."""

    def __init__(
        self,
        place: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_bytes: int,
        expected_kld: Sequence[float],
        clock_ns: Callable[[], int] = time.time_ns,
        on_change: OnChange | None = None,
    ) -> None:
        """`dtype`: the engine's; values that one of another dtype has rounded are not its own.
        `expected_kld`: what the codec says of each level, to tell how many were decoded."""
        if dtype not in DTYPES:
            raise UnsupportedError(f"decoded chunks of {dtype}")
        self._folder = HostFolder(place, _NAME, on_change)
        self._spec, self._dtype = spec, dtype
        self._max_bytes, self._clock_ns = max_bytes, clock_ns
        self._expected_kld = expected_kld

    def has(self, chunk: Chunk, worst_kld: float) -> bool:
        """Whether it is held well enough; `get` may still find it gone or damaged."""
        try:
            with self._folder.opened() as here, here.open(self._name(chunk)) as file:
                return bool(_parse_header(os.read(file, HEADER_BYTES))["kld"] <= worst_kld)
        except (OSError, FormatError, UnsupportedError):
            return False

    def get(self, chunk: Chunk, worst_kld: float) -> HeldValues | None:
        """Values that diverge by no more than `worst_kld`."""
        try:
            with self._folder.opened() as here:
                held = self._get(here, chunk)
        except (OSError, UnsupportedError):
            return None
        return held if held is not None and held.kld <= worst_kld else None

    def _get(self, here: Here, chunk: Chunk) -> HeldValues | None:
        try:
            with here.open(self._name(chunk)) as file:
                # Private, so that nobody can write to it by mistake; only what is read is mapped.
                data = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
            return self._parse(chunk, data)
        except (FormatError, ValueError):
            here.remove(self._name(chunk))
            return None

    @contextmanager
    def looking(self, worst_kld: float) -> Iterator[Callable[[Chunk], bool]]:
        """`has`, for many chunks."""
        yield lambda chunk: self.has(chunk, worst_kld)

    def deliver(
        self,
        chunks: Sequence[Chunk],
        sink: Sink,
        end: int,
        enough_kld: float,
        is_late: Callable[[], bool] = lambda: False,
    ) -> tuple[Grade, ...]:
        """Write what is held, good enough for a context up to `end`, into the sink, as far as it
        goes without a gap and before it is late: the grades of these first chunks."""
        written: list[Grade] = []
        for chunk in chunks:
            if is_late():
                break
            held = self.get(chunk, worst_kld(chunk, end, enough_kld))
            if held is None:
                break
            sink.write(chunk, held.cache)
            written.append(Grade.of_values(held.kld, held.exact, self._expected_kld))
        self.used(chunks[: len(written)])
        return tuple(written)

    def put(self, chunk: Chunk, cache: KVCache, kld: float, *, exact: bool) -> bool:
        """Keep a copy, unless one as good is there or there is no room. UnsupportedError if the
        folder is another's by now."""
        if not self._takes(chunk, cache):
            return False
        try:
            self._folder.make()  # it may have been removed, to free the memory
            used_ns = self._used_ns(chunk)
            with self._folder.opened() as here:
                size = HEADER_BYTES + cache.size_bytes
                if self.has(chunk, kld) or not self._make_room(here, size, used_ns):
                    return False
                self._write(here, chunk, cache, kld, exact)
                here.touch(self._name(chunk), used_ns)
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
        with suppress(OSError, UnsupportedError), self._folder.opened() as here:
            for chunk in chunks:
                with suppress(FileNotFoundError):
                    here.touch(self._name(chunk), self._used_ns(chunk))

    def _used_ns(self, chunk: Chunk) -> int:
        return self._clock_ns() - TOKEN_AGE_NS * chunk.start

    def _name(self, chunk: Chunk) -> str:
        return f"{chunk.key.hex()}.{DTYPES[self._dtype]}"

    # files

    def _parse(self, chunk: Chunk, data: mmap.mmap) -> HeldValues:
        header = _parse_header(data[:HEADER_BYTES])
        shape = self._shape(chunk)
        size = 2 * math.prod(shape) * self._dtype.itemsize
        if len(data) != HEADER_BYTES + size:
            raise FormatError(f"a decoded chunk of {len(data)} bytes, expected {size} of values")
        values = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
        if self._digest(chunk, header, values) != header["xxh3"]:
            raise ChecksumError("a decoded chunk is damaged")
        keys, values = torch.from_numpy(values).view(self._dtype).view(2, *shape)
        return HeldValues(KVCache(keys, values, chunk.start), header["kld"], header["exact"])

    def _shape(self, chunk: Chunk) -> tuple[int, int, int, int]:
        spec = self._spec
        return (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)

    def _write(self, here: Here, chunk: Chunk, cache: KVCache, kld: float, exact: bool) -> None:
        header = {"dtype": DTYPES[self._dtype], "kld": float(kld), "exact": exact}
        values = [_bytes_of(cache.keys), _bytes_of(cache.values)]
        header["xxh3"] = self._digest(chunk, header, *values)
        told = json.dumps(header).encode().ljust(HEADER_BYTES)
        here.write(self._name(chunk), [told, *(part.data for part in values)])

    def _digest(self, chunk: Chunk, header: dict[str, Any], *values: npt.NDArray[np.uint8]) -> str:
        """Over key, dtype, grade and values: one chunk never passes for another."""
        told = (chunk.key.hex(), DTYPES[self._dtype], header["kld"], header["exact"])
        digest = xxh3_64(repr(told).encode())
        for part in values:
            digest.update(part.data)
        return digest.hexdigest()

    # room

    def _make_room(self, here: Here, size: int, used_ns: int) -> bool:
        """By removing what was of use before that, if it is enough. Two who do this at once may
        keep a little more than allowed, or less."""
        files = sorted(here.files())
        held_bytes = sum(held for _, held, _ in files)
        allowed = min(self._max_bytes, here.allowed_bytes(MAX_SHARE, held_bytes))
        if size > allowed:
            return False
        excess = held_bytes + size - allowed
        older = [one for one in files if one[0] < used_ns]
        if excess > sum(held for _, held, _ in older):
            return False
        for _, held, name in older:
            if excess <= 0:
                break
            here.remove(name)
            excess -= held
        return True


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
