"""What a klt stream decodes to, in float64 and without any rounding on the way: the yardstick for
decoders that round differently."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, runs
from kdn.codec.klt.kinds import (
    KIND_DIGITS,
    KIND_ENTERING,
    KIND_MEANS,
    KIND_SINKS,
    KIND_TOKENS,
)
from kdn.codec.klt.profile import NUM_CLASSES, Group

Ints = npt.NDArray[np.int32]


def integers(codec: KltCodec, stream: Bitstream, chunk: Chunk, group: int, levels: int) -> Ints:
    """A group's components after so many levels."""
    classes = codec.coder.decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
    values = np.zeros((0, chunk.num_tokens), np.int32)
    for level, kind, _ in codec.coder.parts(group):
        if level >= levels or kind not in (KIND_DIGITS, KIND_ENTERING):
            break
        model = codec.coder.model(level, kind, group, classes)
        data = stream.section(level, group, kind)
        if kind == KIND_DIGITS:
            values = runs.decode(model, data, values, codec.profile.run_rows)
        else:
            entering = runs.decode(model, data, None, codec.profile.run_rows)
            values = np.concatenate([values, entering])
    return values


def decode(
    codec: KltCodec, stream: Bitstream, chunk: Chunk, levels: int, at: int | None = None
) -> KVCache:
    """The first levels, turned for positions from `at` on (None: where it was learned). At the
    last, components are bytes as writer and reader round them: that is part of the format."""
    spec, profile = codec.spec, codec.profile
    t = profile.tensors
    classes = codec.coder.decode_classes(stream.section(0, 0, KIND_TOKENS), chunk.num_tokens)
    latent = codec._predict(chunk)
    shape = (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)
    out = KVCache(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
    for index, group in enumerate(profile.groups):
        fine = latent.fine.numpy().astype(np.float64).T @ t["predict.fine"][:, group.columns]
        coarse = latent.codes.numpy().astype(np.float64).T @ t["predict.out"][:, group.columns]
        values = t["predict.bias"][group.columns] + fine
        values = values + coarse * latent.unit[:, None] * t["predict.out_scale"][group.columns]
        if levels == codec.num_levels:
            values += corrected(codec, stream, index, classes)
        else:
            q = integers(codec, stream, chunk, index, levels)
            values += components(codec, q, index, levels, classes)
            if codec.profile.num_means(levels - 1, index):
                values += means(codec, stream, index, levels, chunk.num_tokens)
        if chunk.start == 0:
            count = min(profile.num_sinks, chunk.num_tokens)
            data = stream.section(0, index, KIND_SINKS)
            values[:count] = codec._sinks[index].decode(data, count).numpy()
        (first, last), width = group.layers, values.shape[1] // 2
        for side, part in ((out.keys, values[:, :width]), (out.values, values[:, width:])):
            rows = part.reshape(chunk.num_tokens, last - first, *shape[2:]).swapaxes(0, 1)
            side[first:last] = torch.from_numpy(np.ascontiguousarray(rows))
    keys = turn(codec, out.keys, chunk.start if at is None else at)
    return KVCache(keys, out.values, 0)


def corrected(
    codec: KltCodec, stream: Bitstream, index: int, classes: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float64]:
    """Components and what the last level adds to them."""
    group, t = codec.profile.groups[index], codec.profile.tensors
    packed, error = codec.coder.decode(stream, index, codec.num_levels, classes)
    assert error is not None
    large = packed.large.astype(np.float64).T @ group.fine[: len(packed.large)]
    coarse = packed.codes.astype(np.float64).T @ group.basis[: len(packed.codes)]
    coarse *= packed.token_scale[:, None]
    if group.rows is not None:
        coarse = second_stage(group, coarse, rounded=True)
    summed = (large + coarse) / group.weight
    steps = 2.0 ** (-(classes.astype(np.float64) - NUM_CLASSES // 2) / 2)
    return summed + error.T * steps[:, None] * t["fix.step"][group.columns]


def components(
    codec: KltCodec, q: Ints, index: int, levels: int, classes: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float64]:
    group = codec.profile.groups[index]
    halvings = classes.astype(np.int64) - NUM_CLASSES // 2
    kind = np.clip(group.scale[: len(q)].astype(np.int64)[:, None] + 2 * halvings, 0, 63)
    offsets = np.pad(
        codec.profile.levels[levels - 1].centroids.astype(np.float64), ((0, 0), (1, 0))
    )
    size = np.abs(q) + offsets[kind, np.minimum(np.abs(q), 3)]
    step = codec.profile.finest_step * 3.0 ** (codec.num_levels - 1 - levels)
    sizes = np.sign(q) * size * step * 2.0 ** (-halvings / 2)
    large, others = sizes[: len(group.fine)].T, sizes[len(group.fine) :].T
    rows = group.basis * group.basis_scale.astype(np.float64)[:, None]
    coarse = others @ rows[: others.shape[1]]
    if group.rows is not None:
        coarse = second_stage(group, coarse)
    return (large @ group.fine[: large.shape[1]].astype(np.float64) + coarse) / group.weight


def means(
    codec: KltCodec, stream: Bitstream, index: int, levels: int, num_tokens: int
) -> npt.NDArray[np.float64]:
    """What they add to each column, for all tokens alike."""
    group, level = codec.profile.groups[index], levels - 1
    whole = codec.means.decode(level, index, stream.section(level, index, KIND_MEANS))
    step = codec.profile.finest_step * 3.0 ** (codec.num_levels - 2 - level)
    every = np.zeros(len(group.scale))
    every[len(every) - len(whole) :] = whole * step / num_tokens**0.5
    large, others = every[: len(group.fine)], every[len(group.fine) :]
    coarse = (others * group.basis_scale) @ group.basis.astype(np.float64)
    if group.rows is not None:
        coarse = second_stage(group, coarse[None])[0]
    found: npt.NDArray[np.float64] = large @ group.fine.astype(np.float64) + coarse
    return found / group.weight


def second_stage(
    group: Group, leading: npt.NDArray[np.float64], *, rounded: bool = False
) -> npt.NDArray[np.float64]:
    """From all layers' leading components [tokens, K] to weighted columns; rounded in
    between as writer and reader do."""
    assert group.rows is not None
    assert group.rows_scale is not None
    sides = np.empty((len(leading), 2, len(group.leading), group.rows.shape[1] // 2))
    for layer, k in enumerate(group.leading):
        first = sum(group.leading[:layer])
        own = leading[:, first : first + k] * group.rows_scale[first : first + k]
        if rounded:
            unit = np.abs(own).max(axis=1, keepdims=True).clip(min=1e-30) / 127
            own = np.rint(own / unit) * unit
        sides[:, :, layer] = (own @ group.rows[first : first + k]).reshape(len(own), 2, -1)
    return sides.reshape(len(leading), -1)


def turn(codec: KltCodec, keys: torch.Tensor, start: int) -> torch.Tensor:
    """RoPE in float64."""
    out = keys.clone()
    for layer, found in enumerate(codec.spec.ropes):
        if found is None:
            continue
        positions = torch.arange(start, start + keys.shape[1], dtype=torch.float64)
        angles = positions[:, None] * torch.tensor(found.inv_freq, dtype=torch.float64)
        cos, sin = angles.cos()[:, None] * found.amplitude, angles.sin()[:, None] * found.amplitude
        first, second = rope._pair_channels(found)
        a, b = keys[layer, ..., first], keys[layer, ..., second]
        out[layer, ..., first] = a * cos - b * sin
        out[layer, ..., second] = b * cos + a * sin
    return out
