"""The models of `kdn bench delivery`: how large their levels are, how fast they read and decode.

SmolLM2's sizes and divergences are what its shipped profile measured on held-out text; its times
are of two CPU cores. The 8B model has the shape of Llama-3.1-8B and the times of an H200; that its
levels take as many bits a value as SmolLM2's is an assumption.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from kdn.bench.cache_replay import PREFILL_S_PER_TOKEN, PREFILL_S_PER_TOKEN2
from kdn.codec.profiles import SHIPPED
from kdn.delivery.plan import Offer
from kdn.errors import UnsupportedError

CHUNK_TOKENS = 256
SMOLLM2 = "8343b7cfb81b5f6e79a387b29328840d"
SIZE_SPREAD = 0.12
"""Standard deviation of the logarithm of a chunk's size; text differs."""


@dataclass(frozen=True)
class Machine:
    """A model on a machine: `Speeds` as measured. Prefill of n tokens takes a n + b n^2."""

    name: str
    values_per_token: int
    prefill_s_per_token: float
    prefill_s_per_token2: float
    chunk_decode_s: tuple[float, ...]

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return self.chunk_decode_s[levels - 1] * num_tokens / CHUNK_TOKENS

    def prefill_s(self, start: int, end: int) -> float:
        linear_s = self.prefill_s_per_token * (end - start)
        return linear_s + self.prefill_s_per_token2 * (end**2 - start**2)


MACHINES = (
    # Two cores: 3,072 tokens in 7.45 s, a fifth of it in attention.
    Machine("smollm2", 11_520, 1.9e-3, 1.709e-7, (0.024, 0.036, 0.055, 0.090)),
    Machine(
        "8b", 65_536, PREFILL_S_PER_TOKEN, PREFILL_S_PER_TOKEN2, (0.0015, 0.002, 0.0027, 0.004)
    ),
)


def profile_levels() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bits a value and divergence of each number of levels, as the shipped profile has them."""
    from safetensors import safe_open

    path = SHIPPED / f"{SMOLLM2}.safetensors"
    if not path.exists():
        raise UnsupportedError(f"expected the shipped profile {path.name}")
    with safe_open(path, framework="np") as file:
        expected = json.loads(file.metadata()["kdn"])["expected"]
    return tuple(one["bits"] for one in expected), tuple(one["kld"] for one in expected)


def offers_of(machine: Machine, num_tokens: int, rng: np.random.Generator) -> tuple[Offer, ...]:
    bits, kld = profile_levels()
    values = machine.values_per_token * CHUNK_TOKENS
    offers = []
    for _ in range(num_tokens // CHUNK_TOKENS):
        factor = np.exp(rng.normal(0, SIZE_SPREAD))
        ends = tuple(int(factor * one * values / 8) for one in bits)
        offers.append(Offer(CHUNK_TOKENS, ends, kld))
    return tuple(offers)
