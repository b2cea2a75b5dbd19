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
from tests.codec.klt_planes import Planes

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


class Shipped:
    """A context drawn from what the profile describes, and its streams."""

    def __init__(self) -> None:
        profile = Profile.load(PATHS[0])
        self.codec = KltCodec(spec_of(dict(profile.meta)), profile)
        spec = self.codec.spec
        ids = np.random.default_rng(1).integers(0, spec.vocab_size, NUM_TOKENS)
        self.chunks = cut(ids, Namespace(spec.fingerprint, self.codec.profile_id))
        self.cache = drawn(self.codec, self.chunks)
        self.data = self.codec.encode_all(self.chunks, self.cache)
        self.streams = [Bitstream.parse(one) for one in self.data]


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped()


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_the_shipped_profile_decodes_on_the_gpu(
    shipped: Shipped, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers of every level bit by bit, values within 1e-3 of float64."""
    from kdn.codec.klt.decoder_triton import GpuDecoder, Target

    codec, chunks, streams = shipped.codec, shipped.chunks, shipped.streams
    nothing = torch.full_like(shipped.cache.keys, 7e4, device="cuda")
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
    decoder = GpuDecoder(codec.spec, codec.profile, found.keys.device)
    planes = Planes(decoder, monkeypatch)
    slots = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    target = Target.of_cache(found, chunks)
    assert decoder.decode(streams, chunks, levels, target, slots) == []
    planes.check(codec, streams, chunks, levels)


def test_the_shipped_profile_encodes_on_the_gpu(shipped: Shipped) -> None:
    """Streams no larger than the reference's, and no further from the cache."""
    codec, cache = shipped.codec, shipped.cache
    on_gpu = KVCache(cache.keys.cuda(), cache.values.cuda())
    items = [(chunk, on_gpu.slice(chunk.start, chunk.end)) for chunk in shipped.chunks]
    again = codec.encode_batch(items)
    for chunk, ours, theirs in zip(shipped.chunks, again, shipped.data, strict=True):
        assert isinstance(ours, bytes)
        assert 0.98 * len(theirs) < len(ours) < 1.02 * len(theirs)
        own = cache.slice(chunk.start, chunk.end)
        for levels in range(1, codec.num_levels + 1):
            errors = []
            for data in (ours, theirs):
                found = codec.decode(Bitstream.parse(data), chunk, levels=levels)
                both = ((found.keys, own.keys), (found.values, own.values))
                errors.append(sum(float((a - b).square().sum()) for a, b in both) ** 0.5)
            assert errors[0] < 1.03 * errors[1]
