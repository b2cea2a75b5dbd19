"""Layers with a sliding window: which tokens of them a continuation still reads.

A layer with a window of w tokens lets each token attend to itself and the w - 1 before it. After a
context of n tokens a continuation reads of such a layer the last w - 1 tokens alone, and of all
others everything. So codecs put the layers with windows last, into a part of their own
(`kdn/codec/windowed.py`), and readers fetch that part only where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec

Held = tuple[int, ...] | None
"""Of one chunk, the first position that each layer holds of it; None: nothing is held."""
Windows = Sequence[int | None]


def layer_order(spec: ModelSpec) -> tuple[int, ...]:
    """The model's layers: those that attend to everything first, then those with a window."""
    layers = range(spec.num_layers)
    return tuple(sorted(layers, key=lambda layer: spec.windows[layer] is not None))


def num_unbounded(spec: ModelSpec) -> int:
    """How many layers attend to everything."""
    return sum(window is None for window in spec.windows)


def ordered(spec: ModelSpec) -> ModelSpec:
    """The same model with its layers in that order."""
    order = layer_order(spec)
    return replace(
        spec,
        ropes=tuple(spec.ropes[layer] for layer in order),
        windows=tuple(spec.windows[layer] for layer in order),
    )


def needed_from(windows: Windows, end: int) -> int:
    """The first token that a continuation after `end` tokens reads of any layer with a window;
    0 if there is no such layer."""
    found = [window for window in windows if window is not None]
    return max(0, end - (max(found) - 1)) if found else 0


def chunks_to_read(chunks: Sequence[Chunk], held: Sequence[Held], windows: Windows) -> set[int]:
    """Which of a context's chunks a model must read so that it can go on from their end: those that
    are not held, and those of which a layer lacks tokens that the model attends to in reading
    others, or in going on."""
    read = {number for number, one in enumerate(held) if one is None}
    # From the back: what a chunk needs lies before it.
    for number in range(len(chunks), 0, -1):
        if number == len(chunks) or number in read:
            read |= _lacking(chunks[:number], held, windows)
    return read


def resumable(chunks: Sequence[Chunk], held: Sequence[Held], windows: Windows) -> int:
    """After how many of these chunks, the first of which are held, a model can go on at once: as
    many as possible."""
    count = next((number for number, one in enumerate(held) if one is None), len(chunks))
    while count and _lacking(chunks[:count], held, windows):
        count -= 1
    return count


def _lacking(chunks: Sequence[Chunk], held: Sequence[Held], windows: Windows) -> set[int]:
    """Those of these chunks in which a layer lacks tokens that are attended to after them."""
    end = chunks[-1].end
    both = zip(chunks, held, strict=False)
    return {
        number
        for number, (chunk, own) in enumerate(both)
        if own is not None and _lacks(chunk, own, windows, end)
    }


def _lacks(chunk: Chunk, held: tuple[int, ...], windows: Windows, end: int) -> bool:
    for position, window in zip(held, windows, strict=True):
        needed = chunk.start if window is None else max(chunk.start, end - (window - 1))
        if needed < chunk.end and position > needed:
            return True
    return False
