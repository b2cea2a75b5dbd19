"""Fits the rivals that learn from text, once: kvtc and CacheGen as in the paper.

The text is read in windows as long as the measured contexts. What was fitted is kept in the cache
folder under a digest of the model, the text and the amount, and read back the next time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.bench.rivals.kvtc_profile import KvtcProfile
from kdn.cache.folder import cache_folder
from kdn.cache.keys import TokenIds
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.calibrate.corpus import NO_HEAD, Text, sample_windows
from kdn.engines.transformers import from_dynamic_cache
from kdn.errors import FormatError

KVTC_RATIOS = (96.0, 48.0, 24.0, 14.0, 9.0, 6.0, 4.0)
"""Compression before DEFLATE, coarse to fine."""
CACHEGEN_WINDOWS = 8
"""Its tables need no more, and it wants all its caches in memory."""
_VERSION = 2

Track = Callable[[Sequence[TokenIds]], Iterator[TokenIds]]
"""Walks over windows and shows how far it is."""


@dataclass(frozen=True)
class Calibration:
    """Windows of calibration text for one model, and where fits to them are kept. klt is not fitted
    here: it has a profile of its own, found by the model unless one is named."""

    model: Any
    spec: ModelSpec
    windows: list[TokenIds]
    track: Track = iter
    klt_profile: Path | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        spec: ModelSpec,
        texts: Sequence[tuple[Text, TokenIds]],
        *,
        window_tokens: int,
        num_tokens: int,
        seed: int,
        track: Track = iter,
        klt_profile: Path | None = None,
        head: TokenIds = NO_HEAD,
    ) -> Calibration:
        tokens = [ids for _, ids in texts]
        windows = sample_windows(tokens, window_tokens, num_tokens, seed, head)
        if not windows:
            raise FormatError("expected calibration text, found none")
        return cls(model, spec, windows, track, klt_profile)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.windows))

    def kvtc(self) -> KvtcProfile:
        path = self._path("kvtc")
        if not path.exists():
            profile = KvtcProfile.fit(self.spec, self._caches(self.windows), KVTC_RATIOS)
            _put_aside(path, profile.save)
        return KvtcProfile.load(path)

    def cachegen(self) -> CacheGenProfile:
        path = self._path("cachegen")
        if not path.exists():
            every = max(1, len(self.windows) // CACHEGEN_WINDOWS)
            profile = CacheGenProfile.fit(self.spec, list(self._caches(self.windows[::every])))
            _put_aside(path, lambda target: target.write_bytes(profile.to_bytes()))
        return CacheGenProfile.from_bytes(path.read_bytes())

    @property
    def digest(self) -> str:
        """Of the model, the text and the amount: equal ones are fitted alike."""
        digest = blake2b(self.spec.fingerprint, digest_size=12)
        digest.update(repr((_VERSION, KVTC_RATIOS, CACHEGEN_WINDOWS)).encode())
        for window in self.windows:
            digest.update(window.tobytes())
        return digest.hexdigest()

    def _path(self, name: str) -> Path:
        return cache_folder() / "bench" / f"{name}-{self.digest}.safetensors"

    def _caches(self, windows: Sequence[TokenIds]) -> Iterator[KVCache]:
        for window in self.track(windows):
            ids = torch.as_tensor(window.astype(np.int64), device=self.model.device)
            with torch.no_grad():
                past = self.model(ids[None], use_cache=True, logits_to_keep=1).past_key_values
            yield from_dynamic_cache(past)


def _put_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Write a sibling, then rename: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    write(partial)
    partial.replace(path)
