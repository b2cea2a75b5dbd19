"""The model, its profile, and what the codec does to it, on this machine's cores or GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdn.codec.profiles import SHIPPED, local_profile, profile_name
from kdn.doctor.check import Finding, Situation, Skip, fail, note, ok
from kdn.errors import FormatError, KdnError, MismatchError

if TYPE_CHECKING:
    from kdn.cache.keys import Chunk
    from kdn.cache.spec import ModelSpec
    from kdn.cache.tensors import KVCache
    from kdn.codec.klt import KltCodec

MAX_KLD = 0.05
"""Nats a token, at the default quality, on a short text: ten times what it is on sound machines."""
MAX_GPU_ERROR = 1e-3
"""Relative to what the CPU decodes, in the Euclidean norm."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CONTEXT, CONTINUATION = 384, 48
GPU_TOKENS = 64


def check_gpu(situation: Situation) -> Finding:
    import torch

    if not torch.cuda.is_available():
        if NVIDIA_DRIVER.exists():
            return fail(
                "there is a driver for NVIDIA GPUs, but torch finds no GPU",
                "Install a torch for CUDA, or see the driver (nvidia-smi).",
            )
        return ok("none: cores decode")
    name = torch.cuda.get_device_name()
    if find_spec("triton") is None:
        return fail(f"{name}, but Triton is missing: cores decode", "pip install triton")
    if situation.quick:
        return note(f"{name}; decoding was not tried (--quick)")
    error = gpu_error(torch.device("cuda"))
    if not error <= MAX_GPU_ERROR:  # NaN, too
        told = f"{name} decodes otherwise than the CPU (error {error:.2g})"
        return fail(told, "Do not use it with kdn; please report it, with the versions above.")
    return ok(f"{name} decodes as the CPU does (error {error:.1g})")


def gpu_error(device: Any) -> float:
    """A few random tokens, encoded with the shipped profile and decoded by CPU and device."""
    import torch

    from kdn.codec.format import Bitstream
    from kdn.codec.klt import KltCodec, Profile

    path = next(iter(sorted(SHIPPED.glob("*.safetensors"))), None)
    if path is None:
        raise Skip("no profile is shipped with this kdn")
    profile = Profile.load(path)
    codec = KltCodec(_any_spec(dict(profile.meta)), profile)
    chunks, cache = _random_context(codec)
    streams = [Bitstream.parse(data) for data in codec.encode_all(chunks, cache)]
    found, expected = (_decoded(codec, streams, chunks, cache, to) for to in (device, "cpu"))
    off = [a.cpu().double() - b.double() for a, b in zip(found, expected, strict=True)]
    wrong = sum(float(one.square().sum()) for one in off)
    size = sum(float(one.double().square().sum()) for one in expected)
    return float(torch.tensor(wrong / size).sqrt())


def _any_spec(meta: dict[str, Any]) -> ModelSpec:
    """With the profile's shapes. How keys turn does not matter, as long as both turn them alike."""
    from kdn.cache.spec import ModelSpec, RopeSpec

    layers, size = int(meta["num_layers"]), int(meta["head_dim"])
    turn = RopeSpec(tuple(100000.0 ** (-2 * i / size) for i in range(size // 2)))
    return ModelSpec(
        layers, int(meta["num_kv_heads"]), size, int(meta["vocab_size"]), (turn,) * layers,
        (None,) * layers, bytes.fromhex(meta["model"]),
    )  # fmt: skip


def _random_context(codec: KltCodec) -> tuple[list[Chunk], KVCache]:
    import numpy as np
    import torch

    from kdn.cache.keys import Namespace, cut
    from kdn.cache.tensors import KVCache

    spec, rng = codec.spec, np.random.default_rng(0)
    shape = (spec.num_layers, GPU_TOKENS, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.from_numpy(rng.normal(size=shape)).float() for _ in range(2))
    ids = rng.integers(0, spec.vocab_size, GPU_TOKENS)
    return cut(ids, Namespace(spec.fingerprint, codec.profile_id)), KVCache(keys, values)


def _decoded(
    codec: Any, streams: Sequence[Any], chunks: Sequence[Chunk], like: KVCache, device: Any
) -> tuple[Any, Any]:
    import torch

    from kdn.cache.tensors import KVCache

    keys, values = (torch.zeros_like(like.keys, device=device) for _ in range(2))
    codec.decode_all(streams, chunks, KVCache(keys, values))
    return keys, values


def check_profile(situation: Situation) -> Finding:
    """There is one for this model, and it is sound."""
    if find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from kdn.codec.klt import Profile
    from kdn.engines.checkpoint import spec_of_checkpoint
    from kdn.engines.models import local_folder

    folder = local_folder(situation.model)
    if folder is None:
        raise Skip(f"the model {situation.model} is not on this machine yet")
    spec = spec_of_checkpoint(folder)
    for path in (local_profile(spec), SHIPPED / profile_name(spec)):
        if not path.exists():
            continue
        try:
            profile = Profile.load(path)
            profile.check_for(spec)
        except (FormatError, MismatchError) as error:
            return fail(f"{path}: {error}", "Delete it, and calibrate again if there is no other.")
        return ok(f"{situation.model} is {spec.fingerprint.hex()}, its profile {path}")
    if shared_at(situation, spec):
        return ok(f"{situation.model} is {spec.fingerprint.hex()}, its profile is at the node")
    return fail(
        f"there is none for {situation.model} ({spec.fingerprint.hex()})",
        'Make one with `kdn calibrate`, or use the codec "exact".',
    )


def shared_at(situation: Situation, spec: ModelSpec) -> bool:
    """Whether somebody with the same secret shares a profile at the place."""
    from kdn.cache.keys import PUBLIC_SECRET, seal_key
    from kdn.places.places import is_folder, open_places
    from kdn.session.profiles import shared_id

    settings = situation.client
    if is_folder(settings.url):
        return False
    own = settings.credentials

    async def look() -> bool:
        async with open_places(settings.url, token=own.token, tls_ca=own.tls_ca) as places:
            return await shared_id(spec, places, seal_key(own.secret or PUBLIC_SECRET)) is not None

    try:
        return asyncio.run(look())
    except KdnError:
        return False


def check_quality(situation: Situation) -> Finding:
    if situation.quick:
        raise Skip("--quick")
    if find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from kdn.engines.models import local_folder

    folder = local_folder(situation.model)
    if folder is None:
        raise Skip(f"the model {situation.model} is not on this machine yet")
    kld, ratio = quality_of(folder)
    told = f"KLD {kld:.4f} on a short text, {ratio:.0f} times smaller than 16 bit"
    if not kld <= MAX_KLD:
        return fail(
            f"{told}; expected at most {MAX_KLD:g}",
            "The profile does not fit: `kdn calibrate`. If it did before, the machine may err.",
        )
    return ok(told)


def quality_of(folder: Path) -> tuple[float, float]:
    """Divergence at the default quality on a text that every Python has, and how much smaller."""
    from pydoc_data.topics import topics

    import numpy as np

    from kdn.cache.keys import Namespace, cut
    from kdn.cache.tensors import KVCache
    from kdn.codec import open_codec
    from kdn.codec.format import Bitstream
    from kdn.engines.models import load_model
    from kdn.engines.quality import QualityProbe
    from kdn.engines.transformers import spec_of
    from kdn.session.quality import QUALITIES

    model, tokenizer = load_model(folder)
    ids = np.asarray(tokenizer(topics["class"]).input_ids[: CONTEXT + CONTINUATION], np.uint32)
    probe = QualityProbe(model, ids, CONTEXT)
    codec = open_codec("klt", spec_of(model))
    chunks = cut(ids[:CONTEXT], Namespace(codec.spec.fingerprint, codec.profile_id))
    expected = codec.expected_kld
    levels = next((n for n, kld in enumerate(expected, 1) if kld <= QUALITIES["default"]), None)
    parts = []
    for data in codec.encode_all(chunks, probe.cache):
        end = Bitstream.parse(data).level_end((levels or codec.num_levels) - 1)
        parts.append(data[:end])
    streams = [Bitstream.parse(part) for part in parts]
    keys, values = _decoded(codec, streams, chunks, probe.cache, "cpu")
    quality = probe.measure(KVCache(keys, values))
    size = codec.spec.values_per_token * CONTEXT * 2
    return max(quality.kld, quality.recall_kld), size / sum(map(len, parts))
