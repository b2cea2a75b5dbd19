"""How fast this machine reads with a model and decodes a codec's chunks: measured once, and kept.

Reading n tokens takes a n + b n^2: two pieces tell a and b, one at the beginning of a context and
one further on. Decoding takes as long for each token. A GPU is measured on longer pieces and on
several chunks at a time: with less it waits for its host. What is measured is written to the cache
folder, under the model, the codec and the machine it is true of.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache, PreTrainedModel

from kdn.cache.folder import cache_folder
from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut
from kdn.codec.base import Codec, Coded
from kdn.codec.format import Bitstream
from kdn.delivery.sink import GPU_BATCH_CHUNKS
from kdn.engines.growing import Room, is_written_by_rows
from kdn.engines.reading import forward, last_tokens, new_cache

FURTHER_ON = 1024
GPU_PIECE, GPU_FURTHER_ON = 2048, 8192
REPEATS = 2
Clock = Callable[[], float]


@dataclass(frozen=True)
class MeasuredSpeeds:
    """`kdn.delivery.plan.Speeds` of one model and codec on one machine."""

    prefill_s_per_token: float
    prefill_s_per_token2: float
    decode_s_per_token: tuple[float, ...]
    """By levels - 1."""

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return self.decode_s_per_token[levels - 1] * num_tokens

    def prefill_s(self, start: int, end: int) -> float:
        linear_s = self.prefill_s_per_token * (end - start)
        return linear_s + self.prefill_s_per_token2 * (end**2 - start**2)


def measured_speeds(
    model: PreTrainedModel,
    codec: Codec,
    *,
    folder: Path | None = None,
    clock: Clock = time.perf_counter,
) -> MeasuredSpeeds:
    """What was measured before, else what is measured now: some seconds on a CPU."""
    path = (folder or cache_folder() / "speeds") / f"{_identity(model, codec)}.json"
    known = _read(path, codec.num_levels)
    if known is None:
        known = measure(model, codec, clock=clock)
        _write(path, known)
    return known


def measure(
    model: PreTrainedModel, codec: Codec, *, clock: Clock = time.perf_counter
) -> MeasuredSpeeds:
    on_gpu = model.device.type == "cuda"
    further_on, piece = (GPU_FURTHER_ON, GPU_PIECE) if on_gpu else (FURTHER_ON, CHUNK_TOKENS)
    vocabulary, limit = codec.spec.vocab_size, _max_positions(model)
    tokens = np.random.default_rng(0).integers(0, vocabulary, min(further_on, limit // 2))
    size = min(piece, len(tokens) // 2)
    forward(model, tokens[:size], new_cache(model))  # the first run of all allocates
    near_s = min(_timed(model, tokens[:size], new_cache(model), clock) for _ in range(REPEATS))
    past, far = new_cache(model), len(tokens) - size
    forward(model, tokens[:far], past)
    if on_gpu:  # kernels of this shape are loaded on first use
        forward(model, tokens[far:], past)
        past = new_cache(model)  # what layers with windows have dropped, no cropping brings back
        forward(model, tokens[:far], past)
    far_s = _timed(model, tokens[far:], past, clock)
    square = max(0.0, (far_s - near_s) / (2 * far * size))
    linear = max(1e-9, near_s / size - square * size)
    first = tokens[: min(size, CHUNK_TOKENS)]
    return MeasuredSpeeds(linear, square, _decode_s_per_token(codec, first, model, clock))


def _timed(
    model: PreTrainedModel, tokens: npt.NDArray[np.int64], past: Cache, clock: Clock
) -> float:
    _synchronise(model)
    begin_s = clock()
    forward(model, tokens, past)
    _synchronise(model)
    return clock() - begin_s


def _decode_s_per_token(
    codec: Codec,
    tokens: npt.NDArray[np.int64],
    model: PreTrainedModel,
    clock: Clock,
) -> tuple[float, ...]:
    past = new_cache(model)
    forward(model, tokens, past)
    cache = last_tokens(past, 0)
    [chunk, *_] = cut(tokens, Namespace(codec.spec.fingerprint, codec.profile_id))
    part = cache.slice(chunk.start, chunk.end)
    stream = Bitstream.parse(codec.encode(chunk, part))
    count, decode = _decoding(codec, stream, chunk, model)
    decode(codec.num_levels)  # kernels are compiled on first use
    times = []
    for levels in range(1, codec.num_levels + 1):
        took_s = []
        for _ in range(REPEATS):
            begin_s = clock()
            decode(levels)
            took_s.append(clock() - begin_s)
        times.append(min(took_s) / (count * chunk.num_tokens))
    return tuple(times)


def _decoding(
    codec: Codec, stream: Bitstream, chunk: Chunk, model: PreTrainedModel
) -> tuple[int, Callable[[int], object]]:
    """As deliveries do it: how many chunks at a time, and what decodes them to so many levels."""
    if not is_written_by_rows(codec.spec, model.device):
        return 1, lambda levels: codec.decode(stream, chunk, levels=levels)
    size = chunk.num_tokens
    room = Room.of(codec.spec, GPU_BATCH_CHUNKS * size, model.dtype, model.device)
    rows = room.rows()
    places = [np.arange(at * size, (at + 1) * size) for at in range(GPU_BATCH_CHUNKS)]

    def decode(levels: int) -> None:
        batch = [Coded(stream, chunk, levels, to) for to in places]
        for error in codec.decode_rows(batch, rows, after=room.after):
            if error is not None:
                raise error

    return GPU_BATCH_CHUNKS, decode


def _identity(model: PreTrainedModel, codec: Codec) -> str:
    device = str(model.device)
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = (platform.node(), platform.machine(), cores, torch.get_num_threads(), device)
    parts = (codec.spec.fingerprint.hex(), codec.name, codec.profile_id.hex(), model.dtype, machine)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _read(path: Path, num_levels: int) -> MeasuredSpeeds | None:
    """None if there is nothing, or nothing that makes sense: then it is measured again."""
    try:
        told = json.loads(path.read_bytes())
        decode = tuple(float(one) for one in told["decode_s_per_token"])
        linear, square = (
            float(told[name]) for name in ("prefill_s_per_token", "prefill_s_per_token2")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sensible = linear > 0 <= square and len(decode) == num_levels and min(decode) > 0
    return MeasuredSpeeds(linear, square, decode) if sensible else None


def _write(path: Path, speeds: MeasuredSpeeds) -> None:
    """Aside and renamed. A folder that cannot be written costs a measurement next time."""
    aside = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(asdict(speeds)))
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)


def _max_positions(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or 2 * FURTHER_ON)


def _synchronise(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
