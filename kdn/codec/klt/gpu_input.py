"""From streams to what the GPU decoder reads: the sections at hand in one buffer, and where each
token's values go. Plain torch; the copies to the device are not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.codec.format import Bitstream, Buffer
from kdn.codec.klt.gpu_tables import SectionTables, Tensor
from kdn.codec.klt.kinds import KIND_SINKS, KIND_TOKENS
from kdn.codec.klt.profile import CONTEXT_TOKENS
from kdn.errors import FormatError, MismatchError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Slab:
    """Chunks on the device, ready to be decoded: `words` of all sections; `places` [part, chunk,
    group, 2], `class_places` [chunk, 2] and `sink_places` [group, 2] say where each begins and how
    many words it has; `ids` [tokens, 3] of each token and of those before it; `slots` and
    `positions` [tokens]. Every chunk has 256 tokens here: those that it lacks have slot -1. Only
    the first chunk may have sinks; `skipped` [chunk] counts them. `is_full`: no chunk lacks any."""

    words: Tensor
    places: Tensor
    class_places: Tensor
    sink_places: Tensor
    tokens_of: Tensor
    skipped: Tensor
    ids: Tensor
    slots: Tensor
    positions: Tensor
    num_chunks: int
    num_sinks: int
    is_full: bool

    @property
    def num_tokens(self) -> int:
        return self.num_chunks * CHUNK_TOKENS

    @property
    def size_bytes(self) -> int:
        tensors = [v for v in vars(self).values() if isinstance(v, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


class Words:
    """Sections one after the other, as 16-bit words."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self._size = 0

    def add(self, data: Buffer) -> tuple[int, int]:
        """Where it begins and how many words it has."""
        if len(data) % 2:
            raise FormatError(f"expected a section of whole 16-bit words, found {len(data)} bytes")
        place = self._size, len(data) // 2
        self._parts.append(data)
        self._size += place[1]
        return place

    def upload(self, device: torch.device, spare: int) -> Tensor:
        """With room for as many words after them: a damaged section may read beyond its end."""
        size = self._size + spare
        buffer = torch.empty(size, dtype=torch.int16, pin_memory=device.type == "cuda")
        view, at = buffer.numpy().view(np.uint8), 0
        for part in self._parts:
            view[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        return buffer.to(device, non_blocking=True)


def make_slab(
    streams: Sequence[Bitstream],
    chunks: Sequence[Chunk],
    slots: Sequence[npt.NDArray[np.int64]],
    parts: Sequence[SectionTables],
    *,
    levels: int,
    num_groups: int,
    spare_words: int,
    num_sinks: int,
    vocab_size: int,
    device: torch.device,
) -> Slab:
    """Of chunks of which only the first may begin a context; `slots` has a row for each."""
    words, count = Words(), len(chunks)
    places = np.zeros((len(parts), count, num_groups, 2), np.int64)
    class_places = np.zeros((count, 2), np.int64)
    for c, stream in enumerate(streams):
        class_places[c] = words.add(stream.section(0, 0, KIND_TOKENS))
        for p, part in enumerate(parts):
            for g in range(num_groups if part.level < levels else 0):
                if part.sizes[g]:
                    places[p, c, g] = words.add(stream.section(part.level, g, part.kind))
    sinks = min(num_sinks, chunks[0].num_tokens) if chunks[0].start == 0 else 0
    sink_places = np.zeros((num_groups, 2), np.int64)
    for g in range(num_groups if sinks else 0):
        sink_places[g] = words.add(streams[0].section(0, g, KIND_SINKS))
    skipped = np.zeros(count, np.int32)
    skipped[0] = sinks

    def put(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Slab(
        words.upload(device, spare_words), put(places), put(class_places), put(sink_places),
        put(np.array([chunk.num_tokens for chunk in chunks], np.int32)), put(skipped),
        put(_padded([token_rows(chunk, vocab_size) for chunk in chunks], vocab_size)),
        put(_padded(slots, -1)),
        put(_padded([np.arange(chunk.start, chunk.end) for chunk in chunks], 0)),
        count, sinks, all(chunk.num_tokens == CHUNK_TOKENS for chunk in chunks),
    )  # fmt: skip


def token_rows(chunk: Chunk, vocab_size: int) -> Ids:
    """Of each token: its id and those of the tokens before it, [tokens, 3]; `vocab_size` stands for
    none."""
    before = CONTEXT_TOKENS - 1
    history = chunk.history[-before:]
    none = np.full(before - len(history), vocab_size, np.int64)
    ids = np.concatenate([none, history, chunk.tokens]).astype(np.int64)
    real = ids[len(none) :]
    if len(real) and int(real.max()) >= vocab_size:
        raise MismatchError(f"expected token ids below {vocab_size}, found {int(real.max())}")
    count = chunk.num_tokens
    return np.stack([ids[before - i : before - i + count] for i in range(before + 1)], axis=1)


def _padded(rows: Sequence[npt.NDArray[np.int64]], filling: int) -> npt.NDArray[np.int64]:
    """One after the other, each of a whole chunk's length."""
    shape = (len(rows), CHUNK_TOKENS, *rows[0].shape[1:])
    out = np.full(shape, filling, np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out.reshape(-1, *shape[2:])


def split_slabs(chunks: Sequence[Chunk], most: int) -> list[range]:
    """Runs of at most so many chunks; one that begins a context begins a run."""
    runs: list[range] = []
    for index, chunk in enumerate(chunks):
        if not runs or chunk.start == 0 or len(runs[-1]) == most:
            runs.append(range(index, index))
        runs[-1] = range(runs[-1].start, index + 1)
    return runs
