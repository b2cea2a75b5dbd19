"""Seams: what a piece's values would have become behind other pieces, as a linear map.

    keys and values without rotation, as learned  ->  what to add to them

One map for each block of layers, of low rank, fitted on joins that the model read in full. Nothing
is computed by the model when they are applied, and the first piece of a join needs none.

As bytes they are a safetensors file: of each block, down and up in float16 and the bias in float32;
the rest is JSON in its metadata. Readers leave fields alone that they do not know; intervals came
later, and are missing in older files. Seams come from outside, like a profile: everything is
checked on reading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from kdn.cache.spec import FINGERPRINT_BYTES, ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.errors import FormatError, MismatchError

T = TypeVar("T")

FORMAT = "kdn seams"
VERSION = 1
MAX_SEAMS_BYTES = 256 << 20
MAX_BLOCKS = 1024
MAX_EXPECTED = 64
"""Shares of recomputed tokens that a report may name."""
_MALFORMED = (
    SafetensorError, LookupError, ValueError, TypeError, AttributeError, OverflowError,
    RecursionError,
)  # fmt: skip
"""What reading raises on bytes that are something else."""


Interval = tuple[float, float]
Intervals = tuple[Interval, Interval]
"""Of the divergence at the first token, and of that over 16."""


@dataclass(frozen=True)
class Block:
    """Of layers [first, last). Columns are keys of these layers, then their values, each
    `[layer, head, channel]`, as in a profile. Adds `x @ down @ up + bias` to x [tokens, columns].
    """

    layers: tuple[int, int]
    down: torch.Tensor
    """[columns, rank], float32."""
    up: torch.Tensor
    """[rank, columns], float32."""
    bias: torch.Tensor
    """[columns], float32."""

    def added(self, columns: torch.Tensor) -> torch.Tensor:
        bias, down, up = (one.to(columns.device) for one in (self.bias, self.down, self.up))
        return torch.addmm(bias, columns @ down, up)


@dataclass(frozen=True)
class Seams:
    """Of one model. Blocks follow each other and cover all layers."""

    model: bytes
    """Fingerprint of the model."""
    blocks: Sequence[Block]
    expected: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    """By share of recomputed tokens: KLD at the first token and over 16, where nothing of a join
    was fitted on."""
    joined: tuple[float, float] | None = None
    """The same where nothing is repaired or recomputed."""
    intervals: Mapping[float, Intervals] = field(default_factory=dict)
    """How sure `expected` is, if that is known: by share, where the mean over very many questions
    lies in nine of ten cases."""
    joined_intervals: Intervals | None = None

    @classmethod
    def from_bytes(cls, data: bytes) -> Seams:
        """What `to_bytes` wrote; FormatError for anything else."""
        if len(data) > MAX_SEAMS_BYTES:
            raise FormatError(
                f"expected seams of at most {MAX_SEAMS_BYTES} bytes, found {len(data)}"
            )
        try:
            tensors = load_tensors(data)
            size = int.from_bytes(data[:8], "little")
            meta = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["kdn"])
            return _checked(meta, tensors)
        except _MALFORMED as error:
            raise FormatError(f"expected {FORMAT}: {error}") from None

    def to_bytes(self) -> bytes:
        """Deterministic: equal seams give equal bytes."""
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model.hex(),
            "blocks": [list(block.layers) for block in self.blocks],
            "expected": [[share, *klds] for share, klds in sorted(self.expected.items())],
            "joined": [] if self.joined is None else list(self.joined),
        }
        if self.intervals:
            meta["intervals"] = [
                [share, *map(list, both)] for share, both in sorted(self.intervals.items())
            ]
        if self.joined_intervals is not None:
            meta["joined_intervals"] = list(map(list, self.joined_intervals))
        tensors = {}
        for index, block in enumerate(self.blocks):
            tensors[f"b{index}.down"] = block.down.half().contiguous()
            tensors[f"b{index}.up"] = block.up.half().contiguous()
            tensors[f"b{index}.bias"] = block.bias.float().contiguous()
        ordered = {name: tensors[name].cpu() for name in sorted(tensors)}
        text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
        return bytes(save_tensors(ordered, metadata={"kdn": text}))

    def check_for(self, spec: ModelSpec) -> None:
        if self.model != spec.fingerprint:
            raise MismatchError(
                f"these seams are of the model {self.model.hex()}, not of {spec.fingerprint.hex()}"
            )
        per_layer = 2 * spec.num_kv_heads * spec.head_dim
        for block in self.blocks:
            expected = (block.layers[1] - block.layers[0]) * per_layer
            if len(block.bias) != expected:
                raise MismatchError(
                    f"these seams are of another shape: layers {block.layers} expected "
                    f"{expected} columns, found {len(block.bias)}"
                )
        if self.blocks[-1].layers[1] != spec.num_layers:
            raise MismatchError(
                f"these seams are of {self.blocks[-1].layers[1]} layers, not {spec.num_layers}"
            )

    def repair(self, cache: KVCache, spec: ModelSpec, at: int | None = None) -> KVCache:
        """A complete cache as it would be behind other pieces, its first token at position `at`
        (None: where it is): the reference, in float32 and in new memory."""
        keys, values = rope.undo(cache.keys, spec, cache.start), cache.values.float().clone()
        count = cache.num_tokens
        for block in self.blocks:
            own = slice(*block.layers)
            sides = [side[own].transpose(0, 1).reshape(count, -1) for side in (keys, values)]
            both = block.added(torch.cat(sides, 1)).view(count, 2, own.stop - own.start, -1)
            for side, added in zip((keys, values), both.unbind(1), strict=True):
                side[own] += added.transpose(0, 1).reshape(side[own].shape)
        start = cache.start if at is None else at
        return KVCache(rope.redo(keys, spec, start, out=keys), values, start)


def _checked(meta: Any, tensors: Mapping[str, torch.Tensor]) -> Seams:
    """Seams that pass can at worst repair to nonsense."""
    if meta["format"] != FORMAT or meta["version"] != VERSION:
        raise FormatError(
            f"expected {FORMAT} of version {VERSION}, "
            f"found {meta['format']!r} of version {meta['version']!r}"
        )
    model = bytes.fromhex(meta["model"])
    if len(model) != FINGERPRINT_BYTES:
        raise FormatError(f"expected a model fingerprint of {FINGERPRINT_BYTES} bytes")
    layers = [_span(one) for one in meta["blocks"][: MAX_BLOCKS + 1]]
    ends = [0, *(last for _, last in layers)]
    if not 1 <= len(layers) <= MAX_BLOCKS or [first for first, _ in layers] != ends[:-1]:
        raise FormatError("expected blocks that cover all layers in order")
    if len(tensors) != 3 * len(layers):
        raise FormatError(f"expected {3 * len(layers)} tensors, found {len(tensors)}")
    blocks = tuple(_block(index, one, tensors) for index, one in enumerate(layers))
    joined = _klds(meta["joined"]) if meta["joined"] else None
    sure = meta.get("joined_intervals")
    return Seams(
        model, blocks, _by_share(meta["expected"], _klds), joined,
        _by_share(meta.get("intervals", []), _intervals), _intervals(sure) if sure else None,
    )  # fmt: skip


def _span(layers: Any) -> tuple[int, int]:
    first, last = layers
    if type(first) is not int or type(last) is not int or not 0 <= first < last:
        raise FormatError(f"expected a block of at least one layer, found {layers!r:.80}")
    return first, last


def _block(index: int, layers: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> Block:
    down, up, bias = (tensors[f"b{index}.{part}"] for part in ("down", "up", "bias"))
    columns, rank = (bias.shape[0], up.shape[0]) if bias.ndim == 1 and up.ndim == 2 else (0, 0)
    fits = down.shape == (columns, rank) and up.shape == (rank, columns)
    if not fits or not 0 < rank <= columns or columns % (layers[1] - layers[0]):
        raise FormatError(
            f"block {index}: shapes {tuple(down.shape)}, {tuple(up.shape)} and "
            f"{tuple(bias.shape)} are of no map of a rank on some columns"
        )
    if (down.dtype, up.dtype, bias.dtype) != (torch.float16, torch.float16, torch.float32):
        raise FormatError(f"block {index}: expected maps in float16 and a bias in float32")
    if not all(bool(torch.isfinite(one).all()) for one in (down, up, bias)):
        raise FormatError(f"block {index}: expected finite numbers")
    return Block(layers, down.float(), up.float(), bias)


def _by_share(rows: Any, read: Callable[[Any], T]) -> dict[float, T]:
    found: dict[float, T] = {}
    for share, *told in rows[: MAX_EXPECTED + 1]:
        if not 0 <= float(share) <= 1:
            raise FormatError("expected a share of tokens from 0 to 1")
        found[float(share)] = read(told)
    if len(found) != len(rows) or len(found) > MAX_EXPECTED:
        raise FormatError(f"expected at most {MAX_EXPECTED} shares, each once")
    return found


def _intervals(told: Any) -> Intervals:
    first, mean = (_klds(one) for one in told)
    if first[0] > first[1] or mean[0] > mean[1]:
        raise FormatError("expected intervals that begin before they end")
    return first, mean


def _klds(told: Any) -> tuple[float, float]:
    first, mean = (float(number) for number in told)
    if not all(math.isfinite(one) and one >= 0 for one in (first, mean)):
        raise FormatError("expected two divergences, none of them negative")
    return first, mean
