"""A codec for a model with sliding windows: its streams are in two parts, of which a reader may
leave out the second.

Within such a stream layers stand in another order than in the model: first those that attend to
everything, then those with a window. Every level of it is in two parts along that border, each with
a digest of its own. Whoever reads a chunk that lies before the last window of its context fetches
the first parts alone, and nothing is lost: no continuation reads the others there.

The codec inside knows the model with its layers in the stream's order; here they are put into it,
and back. Where that is the model's own order there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.cache.windows import layer_order, ordered
from kdn.codec.base import Codec, Coded, check_input
from kdn.codec.format import Bitstream, StreamInfo
from kdn.errors import KdnError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from kdn.codec.repair import Repair


def in_order(spec: ModelSpec, make: Callable[[ModelSpec], Codec]) -> Codec:
    """What `make` makes for the model with its layers in the order of streams, to be used for the
    model itself."""
    inner = make(ordered(spec))
    return inner if inner.spec == spec else WindowedCodec(spec, inner)


class WindowedCodec(Codec):
    """`inner`, whose layers stand in the stream's order, for a model that has them in its own."""

    def __init__(self, spec: ModelSpec, inner: Codec) -> None:
        if inner.spec != ordered(spec):
            raise MismatchError("expected a codec for the layers in the order of streams")
        self.spec, self.inner = spec, inner
        self.name, self.codec_id = inner.name, inner.codec_id  # type: ignore[misc]
        self.is_lossless = inner.is_lossless  # type: ignore[misc]
        self.shares_profile = inner.shares_profile  # type: ignore[misc]
        self.num_levels, self.profile_id = inner.num_levels, inner.profile_id
        self.windowed_from = inner.windowed_from
        self._order = layer_order(spec)
        self._back = tuple(self._order.index(layer) for layer in range(spec.num_layers))

    @property
    def expected_kld(self) -> tuple[float, ...]:
        return self.inner.expected_kld

    def decodes_to(self, info: StreamInfo, dtype: torch.dtype) -> bool:
        return self.inner.decodes_to(info, dtype)

    def decodes_on(self, device: torch.device) -> bool:
        return self.inner.decodes_on(device)

    def gpu_memory_bytes(self) -> tuple[int, int]:
        return self.inner.gpu_memory_bytes()

    def repaired(self, repair: Repair) -> Codec:
        raise UnsupportedError("a model with sliding windows has no joins, and so no repairs")

    # encoding

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        check_input(self.spec, chunk, cache)
        return self.inner.encode(chunk, cache.of_layers(self._order))

    def encode_all(self, chunks: Sequence[Chunk], cache: KVCache) -> list[bytes]:
        self._check_layers(cache)
        return self.inner.encode_all(chunks, cache.of_layers(self._order))

    def encode_batch(self, items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        found: list[bytes | KdnError | None] = [self._why_not(*item) for item in items]
        sound = [i for i, error in enumerate(found) if error is None]
        given = [(items[i][0], items[i][1].of_layers(self._order)) for i in sound]
        for i, made in zip(sound, self.inner.encode_batch(given), strict=True):
            found[i] = made
        return [one for one in found if one is not None]

    def _why_not(self, chunk: Chunk, cache: KVCache) -> KdnError | None:
        try:
            check_input(self.spec, chunk, cache)
        except KdnError as error:
            return error
        return None

    def _check_layers(self, cache: KVCache) -> None:
        if cache.num_layers != self.spec.num_layers:
            raise MismatchError(f"expected {self.spec.num_layers} layers, found {cache.num_layers}")

    # decoding

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype | None = None,
        at: int | None = None,
    ) -> KVCache:
        wanted = dtype if out is None else out.dtype
        if wanted is None:
            found = self.inner.decode(stream, chunk, levels=levels, at=at)
        else:
            found = self.inner.decode(stream, chunk, levels=levels, dtype=wanted, at=at)
        return found.of_layers(self._back) if out is None else self._copied(found, out)

    def _copied(self, found: KVCache, out: KVCache) -> KVCache:
        """Into the tensors of `out`."""
        if out.keys.shape != found.keys.shape or out.start != found.start:
            raise MismatchError(
                f"expected to decode {tuple(found.keys.shape)} from {found.start}, "
                f"found a cache of {tuple(out.keys.shape)} from {out.start}"
            )
        for target, side in ((out.keys, found.keys), (out.values, found.values)):
            for place, layer in enumerate(self._order):
                target[layer].copy_(side[place])
        valid_from = tuple(found.valid_from[place] for place in self._back)
        return KVCache(out.keys, out.values, found.start, valid_from)

    def decode_all(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        out: KVCache,
        *,
        levels: int | None = None,
    ) -> None:
        self._check_layers(out)
        inside = KVCache(torch.zeros_like(out.keys), torch.zeros_like(out.values), out.start)
        self.inner.decode_all(streams, chunks, inside, levels=levels)
        for chunk in chunks:
            found, place = (one.slice(chunk.start, chunk.end) for one in (inside, out))
            self._copied(found, place)

    def decode_heads(
        self,
        stream: Bitstream,
        chunk: Chunk,
        heads: range,
        *,
        levels: int,
        dtype: torch.dtype,
        at: int | None = None,
    ) -> KVCache:
        found = self.inner.decode_heads(stream, chunk, heads, levels=levels, dtype=dtype, at=at)
        return found.of_layers(self._back)

    def decode_rows(
        self,
        batch: Sequence[Coded],
        rows: TokenRows,
        *,
        after: torch.cuda.Event | None = None,
    ) -> list[KdnError | None]:
        if rows.num_layers != self.spec.num_layers:
            error = MismatchError(f"expected {self.spec.num_layers} layers, found other memory")
            return [error] * len(batch)
        return self.inner.decode_rows(batch, rows.of_layers(self._order), after=after)
