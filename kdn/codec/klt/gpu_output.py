"""From sections that a GPU coded to streams: bytes to the host in one copy per kind of section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.codec.format import Section
from kdn.codec.klt.codec import KltCodec
from kdn.codec.klt.kinds import (
    KIND_CORRECTION,
    KIND_DIGITS,
    KIND_ENTERING,
    KIND_SINKS,
    KIND_TOKENS,
)

if TYPE_CHECKING:
    from kdn.codec.klt.encoder_triton import Encoded, Pushed


def to_host(pushed: Pushed) -> list[list[bytes]]:
    """Each chunk's and group's bytes."""
    begins = pushed.begins.cpu().numpy()
    chunks, groups, capacity = pushed.words.shape
    views = [
        pushed.words[c, g, begins[c, g] :] for c in range(chunks) for g in range(groups)
    ]  # fmt: skip
    whole = torch.cat(views).cpu().numpy().view(np.uint8)
    ends = np.cumsum(2 * (capacity - begins.astype(np.int64)).ravel())
    parts = [whole[end - 2 * len(view) : end] for end, view in zip(ends, views, strict=True)]
    return [
        [part.tobytes() for part in parts[c * groups : (c + 1) * groups]] for c in range(chunks)
    ]


def split_tokens(
    whole: npt.NDArray[np.uint8], counts: Sequence[int]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Consecutive runs of so many."""
    ends = np.cumsum(counts)
    for end, count in zip(ends, counts, strict=True):
        yield whole[end - count : end]


def sections_of(
    codec: KltCodec, chunks: Sequence[Chunk], batches: Sequence[Encoded]
) -> list[list[Section]]:
    """Each chunk's sections. Step classes and sinks, of which there are few, are coded here."""
    found: list[list[Section]] = []
    counts = [chunk.num_tokens for chunk in chunks]
    classes = np.concatenate([batch.classes.cpu().numpy() for batch in batches])
    for own in split_tokens(classes, counts):
        found.append([Section(0, KIND_TOKENS, 0, codec._encode_classes(own))])
    first = 0
    for batch in batches:
        for pushed in batch.parts:
            kind = KIND_DIGITS if pushed.is_digits else KIND_ENTERING
            kind = KIND_CORRECTION if pushed.level == codec.num_levels - 1 else kind
            for c, rows in enumerate(to_host(pushed)):
                found[first + c] += [
                    Section(pushed.level, kind, g, data)
                    for g, data in enumerate(rows)
                    if pushed.sizes[g]
                ]
        if len(batch.sinks):
            for g, group in enumerate(codec.profile.groups):
                whole = codec._sinks[g].quantise(batch.sinks[:, group.columns].cpu())
                found[first].append(Section(0, KIND_SINKS, g, codec._sinks[g].encode(whole)))
        first += len(batch.parts[0].begins)
    return found
