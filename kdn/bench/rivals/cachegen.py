"""CacheGen as its paper describes it (arXiv 2310.07240), in the layered container.

Groups of 10 tokens, an 8-bit anchor each, deltas to the anchor with bins that grow with depth, and
an entropy coder with one static table per (layer, channel), profiled offline. K is coded as the
engine has it. See `cachegen_quantise.py` and `cachegen_profile.py`.

Level 0 holds the anchors, level i >= 1 the deltas of quality i, from coarse to fine. Delta levels
are alternatives: each needs the anchors alone. So a prefix of levels decodes with its finest
deltas, a client may fetch the anchors and any one delta level, and anchors alone give a coarse
cache in which every token has its anchor's values.

    anchor section = scale of each (layer, anchor) (f32) | rANS stream of anchor symbols
    delta section  = number of escapes (u32) | their values (f32) | rANS stream of delta symbols

One section for K and one for V per third of the layers. A rANS step is a (layer, channel), its
lanes are that layer's anchors or other tokens, in order. No parameters.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from kdn.bench.rivals import cachegen_quantise as quant
from kdn.bench.rivals.cachegen_profile import LAYER_BINS, CacheGenProfile, layer_values
from kdn.bench.rivals.cachegen_quantise import Floats, Symbols
from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rans_numba, rope
from kdn.codec.base import Codec, check_input, output_cache
from kdn.codec.format import (
    KIND_KEYS,
    KIND_VALUES,
    Bitstream,
    CodecId,
    DType,
    Header,
    Section,
    StreamInfo,
    write,
)
from kdn.codec.rans import Ints, Tables
from kdn.codec.threads import parallel_map
from kdn.errors import FormatError, MismatchError, TruncatedError

_COUNT = struct.Struct("<I")
_NUM_GROUPS = len(LAYER_BINS)
Job = tuple[int, range, int]
"""Group, its layers, K or V."""


class CacheGenCodec(Codec):
    """The paper's codec, with a profile of the same model."""

    name: ClassVar[str] = "cachegen"
    codec_id = CodecId.CACHEGEN

    def __init__(self, spec: ModelSpec, profile: CacheGenProfile) -> None:
        profile.check_for(spec)
        self.spec = spec
        self.profile = profile
        self.num_levels = 1 + profile.num_qualities
        self.profile_id = profile.profile_id

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        check_input(self.spec, chunk, cache)
        info = StreamInfo.for_chunk(
            chunk,
            self.spec,
            codec=self.codec_id,
            dtype=DType.of(cache.dtype),
            num_levels=self.num_levels,
            valid_from=cache.valid_from,
            profile=self.profile_id,
        )
        parts = parallel_map(partial(_encode_group, self.profile, cache), _jobs(info))
        sections = [section for part in parts for section in part]
        return write(info, sections, chunk.seal_key)

    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype = torch.float32,
        at: int | None = None,
    ) -> KVCache:
        """As the base says: with the anchors and the finest delta level below `levels` at hand."""
        stream.check_for(chunk, self.spec, self.profile_id, self.codec_id)
        if stream.info.num_levels != self.num_levels or stream.info.params:
            raise FormatError(f"expected {self.num_levels} levels and no parameters")
        level = _finest_level(stream, levels)
        cache = output_cache(stream.info, out, dtype, at)
        parallel_map(partial(_decode_group, self.profile, stream, cache, level), _jobs(stream.info))
        rope.move(cache.keys, self.spec, cache.start - chunk.start)
        return cache


def fetch_bytes(header: Header, level: int) -> int:
    """What a client reads to decode at `level`: header, anchors, and that delta level alone."""
    return header.size_bytes + sum(e.length for e in header.entries if e.level in (0, level))


def _finest_level(stream: Bitstream, levels: int | None) -> int:
    limit = stream.info.num_levels if levels is None else min(levels, stream.info.num_levels)
    if limit < 1:
        raise MismatchError(f"expected to decode at least 1 level, found {levels}")
    return max((level for level in range(1, limit) if stream.has_level(level)), default=0)


def _jobs(info: StreamInfo) -> list[Job]:
    bounds = [-(-info.num_layers * g // _NUM_GROUPS) for g in range(_NUM_GROUPS + 1)]
    groups = [(g, range(bounds[g], bounds[g + 1])) for g in range(_NUM_GROUPS)]
    return [
        (group, layers, kind)
        for group, layers in groups
        if layers
        for kind in (KIND_KEYS, KIND_VALUES)
    ]


def _steps_of(profile: CacheGenProfile, job: Job, widths: list[int]) -> tuple[Ints, Ints]:
    """Table and width of each rANS step of a group whose layers have so many lanes each."""
    _, layers, kind = job
    _, num_layers, channels, _ = profile.anchor_freqs.shape
    first = (kind * num_layers + layers.start) * channels
    tables = np.arange(first, first + len(layers) * channels, dtype=np.int32)
    return tables, np.repeat(np.array(widths, dtype=np.int32), channels)


def _encode_group(profile: CacheGenProfile, cache: KVCache, job: Job) -> list[Section]:
    """The anchor section and all delta sections of one group."""
    group, layers, kind = job
    all_symbols, all_scales, all_values, all_deltas = [], [], [], []
    for layer in layers:
        values = layer_values(cache, kind, layer)
        quant.check_finite(values)
        symbols, scales = quant.quantise_anchors(values)
        mask = quant.is_delta(len(values))
        near = quant.spread_anchors(quant.restore_anchors(symbols, scales), len(values))
        all_symbols.append(symbols)
        all_scales.append(scales)
        all_values.append(values[mask])
        all_deltas.append(values[mask].astype(np.float64) - near[mask])
    head = np.concatenate(all_scales).astype("<f4").tobytes()
    data = head + _code(profile, job, profile.anchor_tables, all_symbols)
    sections = [Section(0, kind, group, data)]
    for quality in range(profile.num_qualities):
        reach, steps = profile.reach(quality), profile.steps[quality, kind]
        coded = [
            quant.quantise_deltas(deltas, float(steps[layer]), reach)
            for layer, deltas in zip(layers, all_deltas, strict=True)
        ]
        # In the order of the symbols: layer, channel, token.
        escapes = np.concatenate(
            [v.T[quant.is_escape(c, reach).T] for v, c in zip(all_values, coded, strict=True)]
        )
        head = _COUNT.pack(len(escapes)) + escapes.astype("<f4").tobytes()
        data = head + _code(profile, job, profile.delta_tables[quality], coded)
        sections.append(Section(1 + quality, kind, group, data))
    return sections


def _code(profile: CacheGenProfile, job: Job, tables: Tables, layers: list[Symbols]) -> bytes:
    """The rANS stream of each layer's symbols [tokens, channels]."""
    table_of_step, width_of_step = _steps_of(profile, job, [len(s) for s in layers])
    flat = np.concatenate([symbols.T.ravel() for symbols in layers])
    return rans_numba.encode(flat, tables, table_of_step, width_of_step)


def _decode_group(
    profile: CacheGenProfile, stream: Bitstream, cache: KVCache, level: int, job: Job
) -> None:
    group, layers, kind = job
    tensor = cache.values if kind else cache.keys
    finite = torch.finfo(tensor.dtype)
    held = [stream.info.num_tokens - stream.info.absences[layer] for layer in layers]
    anchors = _decode_anchors(profile, job, stream.section(0, group, kind), held)
    near = [quant.spread_anchors(a, n) for a, n in zip(anchors, held, strict=True)]
    if level:
        data = stream.section(level, group, kind)
        _add_deltas(profile, job, data, level - 1, near)
    for layer, values in zip(layers, near, strict=True):
        # A finite source stays finite, also where an error of half a step leaves the dtype's range.
        part = torch.from_numpy(values).clamp_(finite.min, finite.max)
        absent = stream.info.absences[layer]
        tensor[layer, absent:] = part.view(len(values), *stream.info.shape[2:])


def _decode_anchors(
    profile: CacheGenProfile, job: Job, data: memoryview, held: list[int]
) -> list[Floats]:
    counts = [quant.num_anchors(n) for n in held]
    scales, data = _take_floats(data, sum(counts))
    if not np.all((scales >= 0) & (scales <= quant.MAX_SCALE)):
        raise FormatError(f"expected anchor scales of 0 to {quant.MAX_SCALE}")
    symbols = _decode_symbols(profile, job, profile.anchor_tables, data, counts)
    split = np.split(scales, np.cumsum(counts)[:-1])
    return [quant.restore_anchors(q, s) for q, s in zip(symbols, split, strict=True)]


def _add_deltas(
    profile: CacheGenProfile, job: Job, data: memoryview, quality: int, near: list[Floats]
) -> None:
    """Adds each token's delta to its anchor's values, in place."""
    _, layers, kind = job
    if len(data) < _COUNT.size:
        raise TruncatedError(f"expected a delta section of {_COUNT.size} bytes, found {len(data)}")
    escapes, rest = _take_floats(data[_COUNT.size :], _COUNT.unpack_from(data)[0])
    if not np.isfinite(escapes).all():
        raise FormatError("expected finite escapes")
    masks = [quant.is_delta(len(values)) for values in near]
    counts = [int(mask.sum()) for mask in masks]
    coded = _decode_symbols(profile, job, profile.delta_tables[quality], rest, counts)
    reach, used = profile.reach(quality), 0
    for layer, mask, symbols, values in zip(layers, masks, coded, near, strict=True):
        step = profile.steps[quality, kind, layer]
        restored = values[mask] + quant.restore_deltas(symbols, step, reach)
        escaped = quant.is_escape(symbols, reach).T
        count = int(escaped.sum())
        if used + count > len(escapes):
            raise FormatError(f"expected more than {len(escapes)} escapes")
        restored.T[escaped] = escapes[used : used + count]
        values[mask] = restored
        used += count
    if used != len(escapes):
        raise FormatError(f"expected {used} escapes, found {len(escapes)}")


def _decode_symbols(
    profile: CacheGenProfile, job: Job, tables: Tables, data: memoryview, counts: list[int]
) -> list[Symbols]:
    """Each layer's symbols, [tokens, channels]."""
    table_of_step, width_of_step = _steps_of(profile, job, counts)
    flat = rans_numba.decode(data, tables, table_of_step, width_of_step)
    channels = len(table_of_step) // len(counts)
    parts = np.split(flat, np.cumsum([n * channels for n in counts])[:-1])
    return [part.reshape(channels, n).T for part, n in zip(parts, counts, strict=True)]


def _take_floats(data: memoryview, count: int) -> tuple[Floats, memoryview]:
    if len(data) < 4 * count:
        raise TruncatedError(f"expected {count} float32 in a section, found {len(data)} bytes")
    return np.frombuffer(data, "<f4", count).astype(np.float32), data[4 * count :]
