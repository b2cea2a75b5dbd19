"""What a GPU does of decoding: all that it can, where the cache lies on one and Triton is there.

The kernels know chunks of up to 256 tokens, and memory in which a head's channels lie side by side.
The rest, and chunks in which they found something wrong, is for the reference: it is the one that
says what is wrong.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.rows import NOWHERE, TokenRows
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import Coded, output_cache
from kdn.codec.format import Bitstream
from kdn.codec.klt.gpu_tables import MAX_SINKS
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.streams import own_stream
from kdn.errors import KdnError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from kdn.codec.klt.decoder_triton import GpuDecoder
    from kdn.codec.klt.gpu_input import Job
    from kdn.codec.klt.gpu_launch import Launched


REFUSED_S = 5.0
"""For so long a device that had too little memory is not asked again: it takes long, and fails."""
WARN_EVERY_S = 60.0
EVERY = np.zeros(CHUNK_TOKENS, np.int64)
"""Slots of a chunk of which every token is wanted."""


class BegunRows:
    """Chunks that are being decoded into an engine's memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.slabs: list[tuple[Launched, list[int]]] = []
        """Each with the numbers of all jobs that it was launched with."""

    def left(self) -> list[int]:
        """Waits, and says which are left to do: nothing of them is written."""
        failed = {numbers[i] for slab, numbers in self.slabs for i in slab.failed()}
        done = {numbers[i] for slab, numbers in self.slabs for i in slab.jobs}
        return sorted((set(range(self._count)) - done) | failed)


class Refusals:
    """Devices that had too little memory a moment ago."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused_s: dict[torch.device, float] = {}
        self._warned_s = -math.inf

    def note(self, device: torch.device) -> None:
        self._refused_s[device] = now_s = self._clock()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "too little memory on %s to decode there: cores do it, which takes far longer; "
                "leave more of it free (with vLLM, lower --gpu-memory-utilization)", device,
            )  # fmt: skip

    def has(self, device: torch.device) -> bool:
        return self._clock() - self._refused_s.get(device, -math.inf) < REFUSED_S


class GpuDecoding:
    """A codec's decoders, one for each device and share of heads, made when first used."""

    def __init__(
        self,
        spec: ModelSpec,
        profile: Profile,
        clock: Callable[[], float] = time.monotonic,
        *,
        unrepaired: GpuDecoding | None = None,
    ) -> None:
        """`unrepaired`: what decodes the same streams with rows that nothing is folded into. Both
        take turns, and share memory. No kernel repairs sinks: chunks whose sinks are wanted are
        left to the reference then."""
        self._spec, self._profile, self._unrepaired = spec, profile, unrepaired
        self._refusals: Refusals = Refusals(clock) if unrepaired is None else unrepaired._refusals
        # Guards what follows, and who may launch with a decoder.
        self._lock: threading.Lock = threading.Lock() if unrepaired is None else unrepaired._lock
        self._decoders: dict[tuple[torch.device, range], GpuDecoder] = {}

    def memory_bytes(self) -> tuple[int, int]:
        """What decoders take by now: on devices, and pinned in main memory."""
        with self._lock:
            found = [decoder.memory() for decoder in self._decoders.values()]
        return sum(sum(one[:3]) for one in found), sum(one.pinned for one in found)

    def decode(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        levels: Sequence[int],
        out: KVCache,
        *,
        at: int | None = None,
    ) -> list[int]:
        """Decodes what it can, each chunk into its place in `out`; returns which are left to do.
        `at` is where a single chunk's first token comes to stand, if not where it was learned."""
        assert at is None or len(chunks) == 1
        shift = 0 if at is None else at - chunks[0].start
        if not self._suits(out.keys, out.values):
            return list(range(len(chunks)))
        left = [i for i, chunk in enumerate(chunks) if not self._can(chunk, EVERY, levels[i])]
        with self._lock:
            decoder = self._decoder(out.keys.device, range(self._spec.num_kv_heads))
            for count in sorted(set(levels)):
                todo = [i for i, n in enumerate(levels) if n == count and i not in left]
                if todo:
                    failed = self._run(decoder, streams, chunks, todo, count, out, shift)
                    left += failed
        for i in set(range(len(chunks))) - set(left):
            # Zeroes what layers do not hold.
            start = chunks[i].start + shift
            own = out.slice(start, start + chunks[i].num_tokens)
            output_cache(streams[i].info, own, out.dtype, start)
        return sorted(left)

    def suits(self, rows: TokenRows) -> bool:
        """Whether an engine's memory is one that kernels write to."""
        return self._suits(rows.keys[0], rows.values[0])

    def begin_rows(
        self, batch: Sequence[Coded], rows: TokenRows, after: torch.cuda.Event | None = None
    ) -> BegunRows:
        """Launches decoding of what it can of checked chunks into an engine's memory that suits.
        Until `BegunRows.left` has returned, that memory is not the engine's."""
        begun = BegunRows(len(batch))
        if self._refusals.has(rows.device):
            return begun
        try:
            # One load launches at a time. Those that wait for theirs have let the lock go.
            with self._lock:
                decoder = self._decoder(rows.device, rows.heads)
                target, jobs = decoder.target(rows), self._jobs(decoder, batch)
                for count, own in jobs.items():
                    slabs = decoder.launch([job for _, job in own], count, target, after)
                    begun.slabs += [(slab, [i for i, _ in own]) for slab in slabs]
        except torch.OutOfMemoryError:
            self._refusals.note(rows.device)
        except BaseException:
            begun.left()
            raise
        return begun

    def _jobs(
        self, decoder: GpuDecoder, batch: Sequence[Coded]
    ) -> dict[int, list[tuple[int, Job]]]:
        """By levels: those that kernels can do, and their numbers. A chunk that wants its sinks
        begins a slab, so it comes first."""
        found: dict[int, list[tuple[int, Job]]] = {}
        for i, one in enumerate(batch):
            if self._can(one.chunk, one.slots, one.levels):
                with suppress(KdnError):  # the reference says what is wrong
                    job = decoder.job(one.stream, one.chunk, one.levels, one.slots, one.at)
                    found.setdefault(one.levels, []).append((i, job))
        return {
            levels: sorted(jobs, key=lambda one: not one[1].wants_sinks)
            for levels, jobs in found.items()
        }

    def _suits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        plain = keys.stride(-1) == values.stride(-1) == 1 and keys.shape[-1] % 2 == 0
        known = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        return keys.is_cuda and find_spec("triton") is not None and plain and keys.dtype in known

    def _can(self, chunk: Chunk, slots: npt.NDArray[np.int64], levels: int) -> bool:
        if self._profile.has_two_stages and levels == self._profile.num_levels:
            return False  # kernels lack the rounding between stages that the last level corrects
        count = self._profile.num_sinks_of(chunk)
        if self._unrepaired is not None and bool((slots[:count] != NOWHERE).any()):
            return False
        return self._profile.num_sinks <= MAX_SINKS and chunk.num_tokens <= CHUNK_TOKENS

    def _decoder(self, device: torch.device, heads: range) -> GpuDecoder:
        from kdn.codec.klt.decoder_triton import GpuDecoder

        key = (device, heads)
        if key not in self._decoders:
            other = None if self._unrepaired is None else self._unrepaired._decoder(device, heads)
            with own_stream(device):  # its tables: no stream of an engine waits for them
                self._decoders[key] = GpuDecoder(
                    self._spec, self._profile, device, heads, beside=other
                )
        return self._decoders[key]

    @staticmethod
    def _run(
        decoder: GpuDecoder,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        todo: Sequence[int],
        levels: int,
        out: KVCache,
        shift: int,
    ) -> list[int]:
        from kdn.codec.klt.gpu_target import Target

        target = Target.of_cache(out, [chunks[i] for i in todo])
        first = out.start - shift
        slots = [np.arange(chunks[i].start, chunks[i].end) - first for i in todo]
        failed = decoder.decode(
            [streams[i] for i in todo], [chunks[i] for i in todo], levels, target, slots, shift
        )
        return [todo[i] for i in failed]
