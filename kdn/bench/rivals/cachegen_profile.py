"""What CacheGen profiles offline for a model: delta steps, and one table per (layer, channel).

A profile is a safetensors file, taken as hostile when read:

    model         u8  [16]                         fingerprint
    steps         f32 [levels, 2, layers]          delta step per quality, K and V, layer
    anchor_freqs  u16 [2, layers, channels, 255]   rANS frequencies of anchor symbols
    delta_freqs_i u16 [2, layers, channels, 2 reach_i + 2]   of delta symbols, quality i

Steps: the paper's relative bins 0.5, 1, 1.5 for the first, middle and last third of the layers,
times a factor per quality, times the root mean square of the layer's deltas. The paper gives its
bins in plain units; the root mean square makes them fit any model, and V of SmolLM2 grows 40-fold
from the first layer to the last. Measured there for a divergence of 0.01 (ideal entropies, two
contexts of 1,024 tokens of WikiText): one scale per layer 3.41 bits a value, one for all layers
3.36, one per token 3.52, one per channel 4.03.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import torch
from safetensors.numpy import save

from kdn.bench.rivals.cachegen_quantise import (
    ANCHOR_ALPHABET,
    Floats,
    check_finite,
    delta_alphabet,
    is_delta,
    quantise_anchors,
    quantise_deltas,
    restore_anchors,
    spread_anchors,
)
from kdn.cache.spec import FINGERPRINT_BYTES, ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.header import PROFILE_ID_BYTES
from kdn.codec.rans import PROB_TOTAL, Tables, normalise
from kdn.errors import FormatError, LimitError, MismatchError

LAYER_BINS = (0.5, 1.0, 1.5)
LEVEL_FACTORS = (2.0, 1.0, 0.5, 0.25)
MIN_STEP, MAX_STEP = 1e-30, 1e30
MAX_QUALITIES = 16
MAX_PROFILE_BYTES = 2**30
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
}

Freqs = npt.NDArray[np.uint16]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CacheGenProfile:
    """A validated profile. `data` are the bytes it was made from: they name it."""

    data: bytes
    model: bytes
    steps: Floats
    anchor_freqs: Freqs
    delta_freqs: tuple[Freqs, ...]

    @property
    def num_qualities(self) -> int:
        """Delta levels, from coarse to fine."""
        return len(self.steps)

    @cached_property
    def profile_id(self) -> bytes:
        return blake2b(self.data, digest_size=PROFILE_ID_BYTES).digest()

    @cached_property
    def anchor_tables(self) -> Tables:
        """Table (kind * layers + layer) * channels + channel; so for the deltas."""
        return Tables.from_freqs(self.anchor_freqs.reshape(-1, ANCHOR_ALPHABET))

    @cached_property
    def delta_tables(self) -> tuple[Tables, ...]:
        return tuple(Tables.from_freqs(f.reshape(-1, f.shape[-1])) for f in self.delta_freqs)

    def reach(self, quality: int) -> int:
        """Largest |q| of a delta that is no escape."""
        return int(self.delta_freqs[quality].shape[-1] - 2) // 2

    def to_bytes(self) -> bytes:
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> CacheGenProfile:
        """Read and validate a profile from anywhere."""
        arrays = _read_arrays(data)
        model = _pop(arrays, "model", np.uint8, 1)
        steps = _pop(arrays, "steps", np.float32, 3)
        anchor_freqs = _pop(arrays, "anchor_freqs", np.uint16, 4)
        if not 1 <= len(steps) <= MAX_QUALITIES:
            raise FormatError(f"expected 1 to {MAX_QUALITIES} qualities, found {len(steps)}")
        names = [f"delta_freqs_{i}" for i in range(len(steps))]
        delta_freqs = tuple(_pop(arrays, name, np.uint16, 4) for name in names)
        if arrays:
            raise FormatError(f"expected no more tensors in the profile, found {sorted(arrays)}")
        profile = cls(data, model.tobytes(), steps, anchor_freqs, delta_freqs)
        _check(profile)
        return profile

    def check_for(self, spec: ModelSpec) -> None:
        """That this profile is of this model."""
        if self.model != spec.fingerprint:
            raise MismatchError(
                f"expected a profile of model {spec.fingerprint.hex()}, found {self.model.hex()}"
            )
        expected = (2, spec.num_layers, spec.num_kv_heads * spec.head_dim)
        if self.anchor_freqs.shape[:3] != expected:
            raise MismatchError(
                f"expected a profile of shape {expected}, found {self.anchor_freqs.shape[:3]}"
            )

    @classmethod
    def fit(cls, spec: ModelSpec, caches: Sequence[KVCache]) -> CacheGenProfile:
        """Measure steps and tables on caches of this model; read twice, one layer at a time."""
        if not caches:
            raise MismatchError("expected at least one cache to profile")
        channels = spec.num_kv_heads * spec.head_dim
        reaches = [round(8 / (LAYER_BINS[0] * factor)) for factor in LEVEL_FACTORS]
        shape = (2, spec.num_layers, channels)
        steps = np.zeros((len(LEVEL_FACTORS), 2, spec.num_layers), np.float32)
        anchor_freqs = np.zeros((*shape, ANCHOR_ALPHABET), np.uint16)
        delta_freqs = [np.zeros((*shape, delta_alphabet(r)), np.uint16) for r in reaches]
        for kind in range(2):
            for layer in range(spec.num_layers):
                symbols, deltas = _measure(caches, kind, layer, channels)
                anchor_freqs[kind, layer] = _table_freqs(symbols, ANCHOR_ALPHABET)
                bin_size = LAYER_BINS[3 * layer // spec.num_layers]
                rms = float(np.sqrt(np.mean(deltas**2))) if deltas.size else 0.0
                for i, factor in enumerate(LEVEL_FACTORS):
                    step = np.float32(np.clip(rms * bin_size * factor, MIN_STEP, MAX_STEP))
                    steps[i, kind, layer] = step
                    q = quantise_deltas(deltas, float(step), reaches[i])
                    delta_freqs[i][kind, layer] = _table_freqs(q, delta_alphabet(reaches[i]))
        arrays: dict[str, npt.NDArray[Any]] = {
            "model": np.frombuffer(spec.fingerprint, np.uint8),
            "steps": steps,
            "anchor_freqs": anchor_freqs,
        }
        arrays |= {f"delta_freqs_{i}": freqs for i, freqs in enumerate(delta_freqs)}
        return cls.from_bytes(save(arrays))


def layer_values(cache: KVCache, kind: int, layer: int) -> Floats:
    """The tokens a layer holds as float32 [tokens, channels]."""
    tensor = cache.values if kind else cache.keys
    held = tensor[layer, cache.valid_from[layer] - cache.start :]
    values: Floats = held.detach().to("cpu", torch.float32).flatten(1).numpy()
    return values


def _measure(
    caches: Sequence[KVCache], kind: int, layer: int, channels: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Anchor symbols [anchors, channels] and deltas [tokens, channels] of all caches."""
    all_symbols, all_deltas = [], []
    for cache in caches:
        values = layer_values(cache, kind, layer)
        if values.shape[1] != channels:
            raise MismatchError(f"expected {channels} channels, found {values.shape[1]}")
        check_finite(values)
        symbols, scales = quantise_anchors(values)
        near = spread_anchors(restore_anchors(symbols, scales), len(values))
        all_symbols.append(symbols)
        all_deltas.append((values.astype(np.float64) - near)[is_delta(len(values))])
    return np.concatenate(all_symbols), np.concatenate(all_deltas)


def _table_freqs(symbols: npt.NDArray[np.uint8], alphabet: int) -> Freqs:
    """One table per channel from symbols [samples, channels]; every symbol stays possible.

    Few samples make ragged histograms, so each is smoothed with a kernel as wide as the rule of
    Silverman says, and mixed with a little of the layer's own (the tails) and of one count each.
    """
    samples, channels = symbols.shape
    flat = symbols.astype(np.int64) + alphabet * np.arange(channels)
    counts = np.bincount(flat.ravel(), minlength=channels * alphabet).reshape(channels, alphabet)
    smooth = _smooth(counts.astype(np.float64), samples)
    layer = smooth.mean(axis=0) * (8 / max(samples, 1))
    return normalise(np.rint((smooth + layer) * 1024).astype(np.int64) + 1)


def _smooth(hist: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.float64]:
    """Each row [1 2 1] / 4 as often as suits its spread: a pass adds 0.5 to the variance."""
    place = np.arange(hist.shape[1])
    total = np.maximum(hist.sum(axis=1), 1)
    mean = hist @ place / total
    variance = np.maximum(hist @ place**2 / total - mean**2, 0)
    passes = np.minimum(2 * 1.06**2 * variance * max(samples, 1) ** -0.4, 64).astype(np.int64)
    for i in range(passes.max(initial=0)):
        rows = passes > i
        padded = np.pad(hist[rows], ((0, 0), (1, 1)), mode="edge")
        hist[rows] = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    return hist


def _read_arrays(data: bytes) -> dict[str, npt.NDArray[Any]]:
    if len(data) > MAX_PROFILE_BYTES:
        raise LimitError(f"expected a profile of at most {MAX_PROFILE_BYTES} bytes")
    try:
        tensors = safetensors.deserialize(bytes(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise FormatError(f"expected a safetensors profile: {error}") from error
    arrays = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in _DTYPES:
            raise FormatError(f"expected U8, U16 or F32, found {name} of {tensor['dtype']}")
        flat = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]])
        arrays[name] = flat.reshape(tensor["shape"])
    return arrays


def _pop(
    arrays: dict[str, npt.NDArray[Any]], name: str, dtype: type, ndim: int
) -> npt.NDArray[Any]:
    array = arrays.pop(name, None)
    if array is None or array.dtype != dtype or array.ndim != ndim:
        found = "nothing" if array is None else f"{array.dtype} of {array.shape}"
        raise FormatError(f"expected {name} in the profile as {dtype.__name__}, found {found}")
    return array


def _check(profile: CacheGenProfile) -> None:
    shape = profile.anchor_freqs.shape
    if len(profile.model) != FINGERPRINT_BYTES or shape[0] != 2 or shape[3] != ANCHOR_ALPHABET:
        raise FormatError(f"expected a fingerprint and anchor tables of 255, found {shape}")
    if profile.steps.shape[1:] != shape[:2]:
        raise FormatError(f"expected steps per {shape[:2]}, found {profile.steps.shape[1:]}")
    if not np.all((profile.steps >= np.float32(MIN_STEP)) & (profile.steps <= MAX_STEP)):
        raise FormatError(f"expected steps of {MIN_STEP} to {MAX_STEP}")
    for freqs in profile.delta_freqs:
        if freqs.shape[:3] != shape[:3] or freqs.shape[3] % 2 or not 4 <= freqs.shape[3] <= 256:
            raise FormatError(f"expected delta tables of {shape[:3]}, found {freqs.shape}")
    for freqs in (profile.anchor_freqs, *profile.delta_freqs):
        sums = freqs.sum(axis=-1, dtype=np.int64)
        if freqs.size and (freqs.min() < 1 or np.any(sums != PROB_TOTAL)):
            raise FormatError(f"expected tables without zeros that sum to {PROB_TOTAL}")
