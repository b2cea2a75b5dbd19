"""Small models and caches for the codec tests, the same on every platform, and two options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kdn.cache.keys import PUBLIC_SECRET, Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, help="mutated streams per codec in test_fuzz.py")
    parser.addoption("--regenerate-golden", action="store_true", help="rewrite tests/golden")


def seeded_bytes(seed: str, count: int) -> bytes:
    """The same on every platform and with every library version."""
    blocks = (blake2b(f"{seed}/{i}".encode()).digest() for i in range(-(-count // 64)))
    return b"".join(blocks)[:count]


@dataclass(frozen=True)
class Tiny:
    """A model of `layers` x 2 heads x 8 channels that never ran, and chunks of its contexts."""

    spec: ModelSpec
    seed: str = "tiny"
    secret: bytes = PUBLIC_SECRET

    @classmethod
    def with_layers(cls, layers: int) -> Tiny:
        none = (None,) * layers
        return cls(ModelSpec(layers, 2, 8, 1000, none, none, seeded_bytes("model", 16)))

    def reseed(self, seed: str) -> Tiny:
        return replace(self, seed=seed)

    def chunk(self, profile: bytes, num_tokens: int = 48, index: int = 0) -> Chunk:
        """Chunk `index` of a context: full ones and a last one of `num_tokens`."""
        tokens = np.frombuffer(seeded_bytes(self.seed, 1024), np.uint8)[: 256 * index + num_tokens]
        return cut(tokens, Namespace(self.spec.fingerprint, profile, secret=self.secret))[index]

    def cache(
        self,
        chunk: Chunk,
        dtype: torch.dtype = torch.float16,
        absences: tuple[int, ...] = (),
        scale: float = 1 / 64,
    ) -> KVCache:
        """Neighbouring tokens are alike, channels differ; multiples of `scale`, exact in fp16."""
        spec = self.spec
        shape = (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)
        tensors = []
        for kind in "kv":
            tensor = torch.from_numpy(self._integers(kind, shape) * scale).to(dtype)
            for layer, absent in enumerate(absences):
                tensor[layer, :absent] = 0
            tensors.append(tensor)
        valid = tuple(chunk.start + absent for absent in absences)
        return KVCache(tensors[0], tensors[1], chunk.start, valid)

    def _integers(self, kind: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        noise = np.frombuffer(seeded_bytes(self.seed + kind, int(np.prod(shape))), np.uint8)
        steps = noise.reshape(shape).astype(np.int64) // 32 - 4
        channel = np.frombuffer(seeded_bytes(kind, shape[2] * shape[3]), np.uint8).astype(np.int64)
        drift = np.cumsum(steps, axis=1) % 97 - 48
        return (drift + 2 * steps + channel.reshape(shape[2:])).astype(np.float64)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny.with_layers(4)


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def mutations(request: pytest.FixtureRequest) -> int | None:
    """How many mutated streams per codec, if the option was given."""
    count: int | None = request.config.getoption("mutations", default=None)
    return count


@pytest.fixture(scope="session")
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("regenerate_golden", default=False))
