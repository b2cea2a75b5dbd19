"""What a GPU does of decoding: all that it can, where the cache lies on one and Triton is there.

The kernels know chunks of up to 256 tokens, and caches whose tokens' rows lie whole. The rest, and
chunks in which they found something wrong, is for the reference: it is the one that says what is
wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import output_cache
from kdn.codec.format import Bitstream
from kdn.codec.klt.gpu_tables import MAX_SINKS
from kdn.codec.klt.profile import Profile

if TYPE_CHECKING:
    from kdn.codec.klt.decoder_triton import GpuDecoder


class GpuDecoding:
    """A codec's decoders, one for each device, made when first used."""

    def __init__(self, spec: ModelSpec, profile: Profile) -> None:
        self._spec, self._profile = spec, profile
        self._lock = threading.Lock()  # guards what follows, and the decoders' streams
        self._decoders: dict[torch.device, GpuDecoder] = {}

    def decode(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        levels: Sequence[int],
        out: KVCache,
    ) -> list[int]:
        """Decodes what it can, each chunk into its place in `out`; returns which are left to do."""
        if not self._suits(out):
            return list(range(len(chunks)))
        left = [i for i, chunk in enumerate(chunks) if not self._can(chunk)]
        with self._lock:
            decoder = self._decoder(out.keys.device)
            for count in sorted(set(levels)):
                todo = [i for i, n in enumerate(levels) if n == count and i not in left]
                if todo:
                    failed = self._run(decoder, streams, chunks, todo, count, out)
                    left += failed
        for i in set(range(len(chunks))) - set(left):
            # Zeroes what layers do not hold.
            output_cache(streams[i].info, out.slice(chunks[i].start, chunks[i].end), out.dtype)
        return sorted(left)

    def _suits(self, out: KVCache) -> bool:
        plain = all(side.stride()[2:] == (out.head_dim, 1) for side in (out.keys, out.values))
        known = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        on_gpu = out.keys.is_cuda and find_spec("triton") is not None
        return on_gpu and plain and out.dtype in known and out.head_dim % 2 == 0

    def _can(self, chunk: Chunk) -> bool:
        return self._profile.num_sinks <= MAX_SINKS and chunk.num_tokens <= CHUNK_TOKENS

    def _decoder(self, device: torch.device) -> GpuDecoder:
        from kdn.codec.klt.decoder_triton import GpuDecoder

        if device not in self._decoders:
            self._decoders[device] = GpuDecoder(self._spec, self._profile, device)
        return self._decoders[device]

    @staticmethod
    def _run(
        decoder: GpuDecoder,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        todo: Sequence[int],
        levels: int,
        out: KVCache,
    ) -> list[int]:
        from kdn.codec.klt.decoder_triton import Target

        target = Target.of_cache(out, [chunks[i] for i in todo])
        slots = [np.arange(chunks[i].start, chunks[i].end) - out.start for i in todo]
        failed = decoder.decode(
            [streams[i] for i in todo], [chunks[i] for i in todo], levels, target, slots
        )
        return [todo[i] for i in failed]
