"""Streams for prompts that nobody has read: a few chunks drawn and encoded, and wrapped again under
the name of every chunk that is to be found.

A stream's sections say nothing of its tokens, so those of one chunk serve for all: they decode to
other values, in the same time, from the same number of bytes. The near-lossless last level is left
empty, as nobody asks for it here; how large it would be is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from kdn.bench.gpu_model import RATES, Synthetic, encode_many
from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.codec.format import Bitstream, CodecId, DType, Section, StreamInfo, write
from kdn.codec.klt.profile import Profile
from kdn.places.places import open_places
from kdn.store.base import Hints

EXPECTED_KLD = (100.0, 0.5, 5e-4, 0.0)
"""What the profile says of its levels. Nobody measured that: it is so that a quality asks for a
number of levels."""
QUALITIES = {3: 0.0035, 2: 4.0}
"""Number of levels to the quality that asks for exactly so many, of every chunk: for the last
tokens of a context a quarter of it is enough (`delivery.request`), and for none more than three
times it (`delivery.planner`)."""
GROUP_LAYERS = 2
DRAWN_CHUNKS = 4
PUTS_AT_ONCE = 8


@dataclass(frozen=True)
class Drawn:
    """A profile, and encoded chunks, of which the first begins a context."""

    spec: ModelSpec
    profile_file: Path
    profile_id: bytes
    streams: tuple[Bitstream, ...]

    @property
    def namespace(self) -> Namespace:
        """As engines without a secret of their own name chunks."""
        return Namespace(self.spec.fingerprint, self.profile_id)

    def chunks(self, tokens: Sequence[int]) -> list[Chunk]:
        return cut(tokens, self.namespace)

    def streams_of(self, tokens: Sequence[int]) -> Iterator[tuple[Chunk, bytes]]:
        """Of every full chunk of a context."""
        first, *others = self.streams
        chunks = [one for one in self.chunks(tokens) if one.num_tokens == CHUNK_TOKENS]
        sources = islice(cycle(others), len(chunks))
        for chunk, source in zip(chunks, sources, strict=True):
            yield chunk, self.wrapped(chunk, first if chunk.start == 0 else source)

    def wrapped(self, chunk: Chunk, source: Bitstream) -> bytes:
        """The sections of `source` as a stream of this chunk."""
        info = StreamInfo.for_chunk(
            chunk, self.spec, codec=CodecId.KLT, dtype=DType.BFLOAT16,
            num_levels=source.info.num_levels, profile=self.profile_id,
        )  # fmt: skip
        last = info.num_levels - 1
        sections = [
            Section(
                one.level, one.kind, one.group,
                source.section(one.level, one.group, one.kind) if one.level < last else b"",
            )
            for one in source.header.entries
        ]  # fmt: skip
        return write(info, sections, chunk.seal_key)

    def bits(self) -> list[float]:
        """A value, after each level; the last one as it was encoded."""
        values = self.spec.values_per_token * CHUNK_TOKENS
        every = range(self.streams[0].info.num_levels)
        sizes = [[one.level_end(level) for one in self.streams[1:]] for level in every]
        return [float(np.mean(size)) * 8 / values for size in sizes]


def draw(spec: ModelSpec, rate: str, folder: Path, device: torch.device, seed: int) -> Drawn:
    """Made on `device`, or read from the folder, if it was made there for this model before."""
    place = folder / f"{rate}-{spec.fingerprint.hex()}-{seed}"
    file = place / "profile.safetensors"
    paths = [place / f"{number}.chunk" for number in range(DRAWN_CHUNKS)]
    if not all(path.is_file() for path in paths):
        place.mkdir(parents=True, exist_ok=True)
        synthetic = Synthetic.build(
            spec, GROUP_LAYERS, seed, device, sample_chunks=2, rate=RATES[rate],
            expected_kld=EXPECTED_KLD,
        )  # fmt: skip
        file.write_bytes(synthetic.codec.profile.to_bytes())
        chunks = synthetic.context(DRAWN_CHUNKS * CHUNK_TOKENS, seed + 5)
        for path, data in zip(paths, encode_many(synthetic, chunks, seed + 9), strict=True):
            path.write_bytes(data)
    profile = Profile.load(file)
    profile.check_for(spec)
    streams = tuple(Bitstream.parse(path.read_bytes()) for path in paths)
    return Drawn(spec, file, profile.profile_id, streams)


def put_all(url: str, drawn: Drawn, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Store the streams of all chunks of these prompts at a node; bytes a prompt."""

    async def put() -> list[int]:
        async with open_places([url]) as places:
            store, limit = places.publish_to.store, asyncio.Semaphore(PUTS_AT_ONCE)

            async def one(chunk: Chunk, data: bytes) -> int:
                async with limit:
                    await store.put(
                        chunk.key, data, etag=Bitstream.parse(data).stream_id,
                        checksum=xxh3_64_intdigest(data), hints=Hints(chunk.parent),
                    )  # fmt: skip
                return len(data)

            return [
                sum(await asyncio.gather(*(one(*item) for item in drawn.streams_of(tokens))))
                for tokens in prompts
            ]

    return asyncio.run(put())
