"""The GPU's kernels with the profile that is shipped for SmolLM2-135M: calibrated tables, spectrum,
uneven levels and three heads, on a cache drawn from what the profile describes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.cache.tensors import KVCache
from kdn.calibrate.tables import SCALE_ORIGIN
from kdn.codec import rope
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.profiles import SHIPPED
from tests.codec import klt_reference

PATHS = [path for path in SHIPPED.glob("*.safetensors") if path.is_file()]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and find_spec("triton")),
        reason="needs a CUDA device and Triton",
    ),
    pytest.mark.skipif(not PATHS, reason="no profile is shipped here"),
]
NUM_TOKENS = 256 + 80


def spec_of(meta: dict[str, Any]) -> ModelSpec:
    layers, size = int(meta["num_layers"]), int(meta["head_dim"])
    turn = RopeSpec(tuple(100000.0 ** (-2 * i / size) for i in range(size // 2)))
    return ModelSpec(
        layers, int(meta["num_kv_heads"]), size, int(meta["vocab_size"]), (turn,) * layers,
        (None,) * layers, bytes.fromhex(meta["model"]),
    )  # fmt: skip


def drawn(codec: KltCodec, chunks: list[Chunk]) -> KVCache:
    """Prediction and components as large as their scale classes say, and sinks as they mostly
    are."""
    spec, profile, rng = codec.spec, codec.profile, np.random.default_rng(0)
    step = profile.finest_step * 3.0 ** (profile.num_levels - 1)
    shape = (spec.num_layers, NUM_TOKENS, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.empty(shape), torch.empty(shape)
    for index, group in enumerate(profile.groups):
        found = [codec._transforms[index].predict(codec._predict(chunk)) for chunk in chunks]
        columns = torch.cat([torch.as_tensor(one) for one in found]).numpy()
        rows = np.concatenate([
            group.fine.astype(np.float32), group.basis * group.basis_scale[:, None]
        ])  # fmt: skip
        sizes = step * 2.0 ** ((group.scale.astype(np.float32) - SCALE_ORIGIN) / 4)
        amounts = rng.normal(size=(NUM_TOKENS, len(sizes))).astype(np.float32) * sizes
        columns += (amounts @ rows) / group.weight
        columns[: profile.num_sinks] = profile.tensors["sink.mean"][:, group.columns]
        (first, last), half = group.layers, columns.shape[1] // 2
        for side, part in ((keys, columns[:, :half]), (values, columns[:, half:])):
            split = part.reshape(NUM_TOKENS, last - first, *shape[2:]).swapaxes(0, 1)
            side[first:last] = torch.from_numpy(np.ascontiguousarray(split))
    rope.redo(keys, spec, 0, out=keys)
    return KVCache(keys, values)


def test_the_shipped_profile_on_the_gpu() -> None:
    """Values of every level within 1e-3 of float64, and streams no larger than the reference's."""
    profile = Profile.load(PATHS[0])
    codec = KltCodec(spec_of(dict(profile.meta)), profile)
    ids = np.random.default_rng(1).integers(0, codec.spec.vocab_size, NUM_TOKENS)
    chunks = cut(ids, Namespace(codec.spec.fingerprint, codec.profile_id))
    cache = drawn(codec, chunks)
    data = codec.encode_all(chunks, cache)
    streams = [Bitstream.parse(one) for one in data]
    for levels in (1, 2, 3):
        nothing = torch.full_like(cache.keys, 7e4, device="cuda")
        found = KVCache(nothing, nothing.clone())
        assert codec._gpu.decode(streams, chunks, [levels] * len(chunks), found) == []
        parts = [klt_reference.decode(codec, s, c, levels)
                 for s, c in zip(streams, chunks, strict=True)]  # fmt: skip
        wrong, size = 0.0, 0.0
        for name in ("keys", "values"):
            exact = torch.cat([getattr(part, name) for part in parts], 1)
            wrong += float((getattr(found, name).cpu().double() - exact).square().sum())
            size += float(exact.square().sum())
        assert (wrong / size) ** 0.5 < 1e-3
    on_gpu = KVCache(cache.keys.cuda(), cache.values.cuda())
    again = codec.encode_all(chunks, on_gpu)
    assert 0.98 * sum(map(len, data)) < sum(map(len, again)) < 1.02 * sum(map(len, data))
