"""Where a delivery writes the chunks of a context, and from where a model can go on with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.cache.windows import Held, chunks_to_read, resumable
from kdn.delivery.sink import HostSink, Sink
from kdn.session.delivered import Delivered


@dataclass(frozen=True)
class Landing:
    spec: ModelSpec
    sink: Sink
    until: Callable[[int], KVCache]
    """What the sink holds of the tokens before a position."""

    def to_read(self, got: Delivered) -> set[int]:
        """The chunks that the model has to read, for want of them or of what a layer with a window
        attends to there."""
        return chunks_to_read(got.chunks, self._held(got), self.spec.windows)

    def num_ready(self, got: Delivered) -> int:
        """After how many chunks a model can go on at once."""
        return resumable(got.chunks, self._held(got), self.spec.windows)

    def _held(self, got: Delivered) -> list[Held]:
        both = zip(got.chunks, got.grades, strict=True)
        return [None if grade is None else self._held_from(chunk) for chunk, grade in both]

    def _held_from(self, chunk: Chunk) -> Held:
        """Memory that is not of the host's cannot lack tokens of a chunk that it holds."""
        if isinstance(self.sink, HostSink):
            return self.sink.held_from(chunk)
        return (chunk.start,) * self.spec.num_layers
