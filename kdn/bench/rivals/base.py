"""What the benchmark asks of every codec, ours and others': real bytes out, a cache back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kdn.cache.keys import TokenIds
from kdn.cache.tensors import KVCache

T = TypeVar("T")

REPEATS = 3
QUICK_S = 2.0


@dataclass(frozen=True)
class ExactContext:
    """A context and the exact cache a model made of it."""

    tokens: TokenIds
    cache: KVCache


@dataclass(frozen=True)
class CodedLevel:
    """One level of one codec on one context. `kept` marks the tokens that are still there, where
    the codec dropped some."""

    level: int
    size_bytes: int
    cache: KVCache
    encode_s: float
    decode_s: float
    kept: npt.NDArray[np.bool_] | None = None


class Rival(ABC):
    """A codec under test. Levels are numbered from coarse to fine; `labels` names them."""

    name: str
    labels: tuple[str, ...]

    @abstractmethod
    def run(self, context: ExactContext) -> Iterator[CodedLevel]:
        """Encode and decode the context at every level."""


class Separate(Rival):
    """A codec whose levels have nothing in common: each is encoded for itself."""

    @abstractmethod
    def encode(self, context: ExactContext, level: int) -> bytes:
        """Everything a receiver needs besides the codec's fixed parameters and the tokens."""

    @abstractmethod
    def decode(self, data: bytes, tokens: TokenIds, level: int) -> KVCache:
        """The cache from those bytes."""

    def kept(self, num_tokens: int) -> npt.NDArray[np.bool_] | None:
        """The tokens that survive; None for all."""
        return None

    def run(self, context: ExactContext) -> Iterator[CodedLevel]:
        kept = self.kept(len(context.tokens))
        for level in range(len(self.labels)):
            data, encode_s = timed(partial(self.encode, context, level))
            cache, decode_s = timed(partial(self.decode, data, context.tokens, level))
            yield CodedLevel(level, len(data), cache, encode_s, decode_s, kept)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work` and the seconds it took: the median of three times, if it is quick, as
    other work on the machine easily doubles a single one."""
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < QUICK_S:
        begin = time.perf_counter()
        result = work()
        taken.append(time.perf_counter() - begin)
    return result, median(taken)
