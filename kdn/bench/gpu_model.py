"""A model of Llama-3.1's cache shape that never ran, for `kdn bench gpu`: its profile and caches.

Not trained, and said so in the output: bases, predictor and weights are random. What decides how
long coding takes is not: component c of n columns deviates as the component of the same relative
rank does in the profile calibrated for SmolLM2-135M (`SPECTRUM`, its scale classes), at a step that
a `Rate` chooses; tokens differ in importance and activity; tables, thresholds and the number of
components per level are counted on caches drawn from this model, by the code that calibration uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.cache.tensors import KVCache
from kdn.calibrate import tables
from kdn.calibrate.sizes import ROWS_OF_RUNS
from kdn.codec import rope
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.duals import dense_rows
from kdn.codec.klt.profile import FORMAT, VERSION, VERSION_OF_RUNS
from kdn.codec.threads import parallel_map

SPECTRUM = (
    43, 32, 29, 28, 27, 26, 25, 25, 24, 23, 23, 22, 22, 21, 21, 20, 20, 19,
    19, 19, 18, 18, 18, 17, 17, 16, 16, 16, 15, 15, 15, 15, 14, 14, 14,
)  # fmt: skip
"""Scale class of every 64th of SmolLM2's 5,760 components in its first group of layers."""
SPECTRUM_STEP, SPECTRUM_COLUMNS = 64, 5760
COARSEST = 27.0
"""Finest steps in the step that scale classes refer to."""
LEVELS, FINE, RANK, FINE_LATENTS, EMBED, METRIC, SINKS = 4, 64, 256, 16, 448, 32, 4
FINEST_STEP = 6e-4

Arrays = dict[str, npt.NDArray[Any]]
PREDICTED = 5e-5
"""Next to nothing is predicted from token ids, so that values of a model which this profile was not
made for are coded, too, and not all of them escaped."""


@dataclass(frozen=True)
class Rate:
    """How many bits the levels take, and whose these are."""

    coarser: float
    """Quarter octaves by which the step is coarser than that of SmolLM2's profile."""
    kept: float
    """Of all components: those coded at the finest level."""
    told: str
    layers: int = 0
    """Coded together; 0: as many as are asked for."""
    leading: float = 0.0
    """Of a layer's columns: its leading components on average, in two stages."""


RATES = {
    "grouped": Rate(
        1.9, 0.25, "0.06 / 0.23 / 0.58 bits a value after 1 / 2 / 3 levels, as SmolLM2 takes whose "
        "layers are coded in groups of 15",
    ),
    "pairs": Rate(
        -6.55, 49 / 128, "0.38 / 0.88 / 1.45 bits: SmolLM2 in groups of 2 layers, as this shape is "
        "cut, needs 0.37 / 0.88 / 1.45 for a KLD of .031 / .0069 / .0042",
    ),
}  # fmt: skip
"""Found numerically, on groups of 1,536 columns."""
GROUPED = RATES["grouped"]
STAGES = Rate(
    1.9, 1511 / 16384, "the components of `grouped` that 1,088 multiplications a value allow in "
    "two stages and groups of 8 layers (kdn calibrate --operations 1088)", 8, 600 / 2048,
)  # fmt: skip
UNEVEN = (0.75, 1.25, 1.0, 1.0)
"""Leading components of a layer, beside those of the average layer: layers differ."""


def llama_spec(num_layers: int, vocab_size: int = 128256) -> ModelSpec:
    """Eight KV heads of 128, as in Llama-3.1-8B (32 layers) and -70B (80 layers)."""
    turns = RopeSpec(tuple(500000.0 ** (-i / 64) for i in range(64)))
    none = (None,) * num_layers
    name = blake2b(f"synthetic llama {num_layers}".encode(), digest_size=16).digest()
    return ModelSpec(num_layers, 8, 128, vocab_size, (turns,) * num_layers, none, name)


@dataclass(frozen=True)
class Synthetic:
    """A model's codec, and caches drawn from what its profile describes."""

    codec: KltCodec
    deviations: npt.NDArray[np.float32]
    device: torch.device

    @classmethod
    def build(
        cls, spec: ModelSpec, group_layers: int, seed: int, device: torch.device,
        sample_chunks: int = 6, rate: Rate = GROUPED, expected_kld: Sequence[float] = (),
    ) -> Synthetic:  # fmt: skip
        """`expected_kld`: what the profile is to say of its levels, for deliveries to plan with;
        nothing of that was measured."""
        rng = torch.Generator(device).manual_seed(seed)
        meta, tensors = _parts(spec, rate.layers or group_layers, rng, rate)
        deviations = spectrum(len(tensors["g0.scale"]), tensors["g0.weight"].size, rate)
        draft = cls(KltCodec(spec, tables.draft_profile(meta, tensors)), deviations, device)
        chunks = draft.context(256 * (sample_chunks + 1), seed + 1)[1:]
        caches = draft.caches(chunks, seed + 2)
        samples = [tables.quantise(draft.codec, *both) for both in zip(chunks, caches, strict=True)]
        counts = tables.components_per_level(samples)
        tensors |= tables.count_tables(draft.codec, samples, counts)
        meta["num_components"] = counts
        profile = tables.draft_profile(meta, tensors)
        if expected_kld:
            expected = [{"kld": kld} for kld in expected_kld]
            profile = Profile.build({**profile.meta, "expected": expected}, profile.tensors)
        return cls(KltCodec(spec, profile), deviations, device)

    def context(self, num_tokens: int, seed: int) -> list[Chunk]:
        spec = self.codec.spec
        ids = np.random.default_rng(seed).integers(0, spec.vocab_size, num_tokens)
        return cut(ids, Namespace(spec.fingerprint, self.codec.profile_id))

    def caches(
        self, chunks: Sequence[Chunk], seed: int, dtype: torch.dtype = torch.float32
    ) -> list[KVCache]:
        """Of each chunk, on the CPU."""
        rng = torch.Generator(self.device).manual_seed(seed)
        return [self._cache(chunk, rng, dtype) for chunk in chunks]

    def _cache(self, chunk: Chunk, rng: torch.Generator, dtype: torch.dtype) -> KVCache:
        spec, profile, count = self.codec.spec, self.codec.profile, chunk.num_tokens
        latent = self.codec._predict(chunk)
        shape = (spec.num_layers, count, spec.num_kv_heads, spec.head_dim)
        keys, values = torch.empty(shape), torch.empty(shape)
        activity = torch.exp(0.3 * _normal((count, 1), rng))
        for index, group in enumerate(profile.groups):
            columns = torch.as_tensor(self.codec._transforms[index].predict(latent))
            columns = columns.to(self.device)
            columns += self._residual(index, activity, rng)
            if chunk.start == 0:
                mean = torch.from_numpy(profile.tensors["sink.mean"][:, group.columns])
                noise = _normal((SINKS, columns.shape[1]), rng)
                columns[:SINKS] = mean.to(self.device).float() + noise
            (first, last), half = group.layers, columns.shape[1] // 2
            for side, part in ((keys, columns[:, :half]), (values, columns[:, half:])):
                split = part.reshape(count, last - first, *shape[2:]).transpose(0, 1)
                side[first:last] = split.cpu()
        rope.redo(keys, spec, chunk.start, out=keys)
        return KVCache(keys.to(dtype), values.to(dtype), chunk.start)

    def _residual(self, index: int, activity: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Components of random size, and a little that no component holds."""
        group = self.codec.profile.groups[index]
        rows = dense_rows(group.basis_tensors, self.device, group.leading)
        sizes = torch.from_numpy(self.deviations).to(self.device) * FINEST_STEP
        drift = torch.exp(0.2 * _normal((len(activity), len(sizes) // 64 + 1), rng))
        drift = drift.repeat_interleave(64, dim=1)[:, : len(sizes)]
        amounts = _normal((len(activity), len(sizes)), rng) * sizes * activity * drift
        noise = _normal((len(activity), rows.shape[1]), rng) * (0.1 * FINEST_STEP)
        return (amounts @ rows + noise) / torch.from_numpy(group.weight).to(self.device)


def spectrum(count: int, num_columns: int, rate: Rate) -> npt.NDArray[np.float32]:
    """Deviations of the first components in finest steps."""
    places = np.arange(len(SPECTRUM)) * SPECTRUM_STEP / SPECTRUM_COLUMNS
    classes = np.interp(np.arange(count) / num_columns, places, SPECTRUM) - rate.coarser
    return (COARSEST * 2.0 ** ((classes - tables.SCALE_ORIGIN) / 4)).astype(np.float32)


def _parts(
    spec: ModelSpec, group_layers: int, rng: torch.Generator, rate: Rate
) -> tuple[dict[str, Any], Arrays]:
    """Meta data and tensors of a draft profile."""
    per_layer = 2 * spec.num_kv_heads * spec.head_dim
    columns = per_layer * spec.num_layers
    groups = [[a, min(a + group_layers, spec.num_layers)]
              for a in range(0, spec.num_layers, group_layers)]  # fmt: skip
    out_scale = torch.exp(0.5 * _normal((columns,), rng)) * PREDICTED
    tensors: Arrays = {
        "embed.codes": _bytes((spec.vocab_size, EMBED), rng),
        "predict.mix": _bytes((3 * EMBED, RANK), rng),
        "predict.mix_scale": np.geomspace(1e-4, 2e-6, RANK).astype(np.float32),
        "predict.fine": _numpy(_normal((FINE_LATENTS, columns), rng) * PREDICTED, np.float16),
        "predict.out": _bytes((RANK - FINE_LATENTS, columns), rng),
        "predict.out_scale": _numpy(out_scale, np.float32),
        "predict.bias": _numpy(_normal((columns,), rng) * PREDICTED, np.float32),
        "sink.mean": _numpy(3 * _normal((SINKS, columns), rng), np.float16),
        "sink.step": np.full(columns, 0.5, np.float32),
        "sink.scale": np.full(columns, 44, np.uint8),
        "sink.freqs": tables.laplace_tables(),
        "fix.step": np.full(columns, 0.2, np.float32),
        "fix.scale": np.full(columns, 40, np.uint8),
        "importance": _numpy(_normal((columns,), rng) * (0.5 / columns**0.5), np.float32),
    }
    for index, (first, last) in enumerate(groups):
        tensors |= _group(index, (last - first) * per_layer, rng, rate)
        if rate.leading:
            tensors |= _stages(
                index, _leading(rate, last - first, per_layer), per_layer, tensors, rng
            )
    meta = {
        "format": FORMAT, "version": VERSION, "model": spec.fingerprint.hex(),
        "num_layers": spec.num_layers, "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "vocab_size": spec.vocab_size, "groups": groups,
        "levels": LEVELS, "finest_step": FINEST_STEP, "importance_bias": 0.0,
    }  # fmt: skip
    if rate.leading:
        leading = [_leading(rate, last - first, per_layer) for first, last in groups]
        meta |= {
            "version": VERSION_OF_RUNS, "leading": leading, "run_rows": ROWS_OF_RUNS,
            "windowed_from": None,
        }  # fmt: skip
    return meta, tensors


def _leading(rate: Rate, num_layers: int, per_layer: int) -> list[int]:
    """Of each layer of a group, in runs of 8."""
    each = [rate.leading * UNEVEN[i % len(UNEVEN)] * per_layer for i in range(num_layers)]
    return [max(8, round(count / 8) * 8) for count in each]


def _stages(
    index: int, leading: list[int], per_layer: int, tensors: Arrays, rng: torch.Generator
) -> Arrays:
    """In place of a group's rows of one stage; as many components."""
    count, key = len(tensors[f"g{index}.basis"]), f"g{index}."
    rows = [torch.linalg.qr(_normal((per_layer, k), rng))[0].T for k in leading]
    inner = torch.linalg.qr(_normal((sum(leading), count), rng))[0].T
    found: Arrays = {}
    for name, matrix in (("rows", torch.cat(rows)), ("basis", inner)):
        scale = matrix.abs().amax(dim=1) / 127
        found[key + name] = _numpy((matrix / scale[:, None]).round(), np.int8)
        found[f"{key}{name}_scale"] = _numpy(scale, np.float32)
    return found


def _group(index: int, width: int, rng: torch.Generator, rate: Rate) -> Arrays:
    count, key = round(rate.kept * width), f"g{index}."
    rows = torch.linalg.qr(_normal((width, count), rng))[0].T
    fine, rest = rows[:FINE], rows[FINE:]
    scale = rest.abs().amax(dim=1) / 127
    directions = torch.linalg.qr(_normal((width, METRIC), rng))[0]
    weight = 1e-3 * torch.exp(0.5 * _normal((width,), rng))
    deviations = torch.from_numpy(spectrum(count, width, rate)).double()
    return {
        key + "weight": _numpy(weight, np.float32),
        key + "metric": _numpy(directions, np.float16),
        key + "gain": np.full(METRIC, 0.5, np.float32),
        key + "fine": _numpy(fine, np.float16),
        key + "basis": _numpy((rest / scale[:, None]).round(), np.int8),
        key + "basis_scale": _numpy(scale, np.float32),
        key + "scale": tables.scale_class(deviations, COARSEST),
    }


def _normal(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def _bytes(shape: tuple[int, ...], rng: torch.Generator) -> npt.NDArray[Any]:
    return _numpy((_normal(shape, rng) * 40).clamp(-127, 127).round(), np.int8)


def _numpy(tensor: torch.Tensor, dtype: Any) -> npt.NDArray[Any]:
    return np.ascontiguousarray(tensor.cpu().numpy().astype(dtype))


def encode_many(synthetic: Synthetic, chunks: Sequence[Chunk], seed: int) -> list[bytes]:
    """Streams of many chunks, drawn and encoded one after the other on all cores."""
    codec = synthetic.codec
    caches = synthetic.caches(chunks, seed)
    return parallel_map(lambda job: codec.encode(*job), zip(chunks, caches, strict=True))


__all__ = [
    "RATES", "STAGES", "Profile", "Rate", "Synthetic", "encode_many", "llama_spec", "spectrum",
]  # fmt: skip
