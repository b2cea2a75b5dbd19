"""Golden files pin the format: a byte that changes here needs a new format version.

`pytest tests/codec/test_golden.py --regenerate-golden` rewrites them. The inputs are integers from
a hash, and encoding rounds only where IEEE says how, so they are the same on every platform. A
profile is fitted once and then pinned itself: fitting sums floats in an order of the platform's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import open_codec
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import Profile
from kdn.codec.profiles import codec_with
from tests.codec.klt_profile import make_profile
from tests.codec.targets import windowed


@dataclass(frozen=True)
class Golden:
    """One file: which codec, and the chunk and cache it is made of."""

    codec: Callable[[Any, bytes], Codec]
    dtype: torch.dtype = torch.float16
    absences: tuple[int, ...] = ()
    index: int = 0
    profile: str = ""

    def case(self, tiny: Any, folder: Path) -> tuple[Codec, Chunk, KVCache]:
        data = (folder / self.profile).read_bytes() if self.profile else b""
        codec = self.codec(tiny, data)
        chunk = tiny.chunk(codec.profile_id, 32, self.index)
        return codec, chunk, tiny.cache(chunk, self.dtype, self.absences)


def _exact(tiny: Any, profile: bytes) -> Codec:
    return ExactCodec(tiny.spec)


def _exact_parts(tiny: Any, profile: bytes) -> Codec:
    return open_codec("exact", windowed(tiny))


def _cachegen(tiny: Any, profile: bytes) -> Codec:
    return CacheGenCodec(tiny.spec, CacheGenProfile.from_bytes(profile))


KLT: dict[str, dict[str, Any]] = {
    "klt": {},
    "klt_stages": {"leading": 24},
    "klt_parts": {"in_parts": True},
    "klt_runs": {"leading": 24, "run_rows": 16},
    "klt_means": {"means": True},
}
"""Names of files, and how their profile is made: versions 3 to 7."""
CACHEGEN_PROFILE = "cachegen_profile.safetensors"
GOLDEN = {
    "exact_float16": Golden(_exact),
    "exact_bfloat16_windowed": Golden(_exact, torch.bfloat16, (0, 7, 32, 0), 1),
    "exact_float32": Golden(_exact, torch.float32),
    "exact_parts": Golden(_exact_parts, absences=(0, 7, 0, 32), index=1),
    "cachegen": Golden(_cachegen, profile=CACHEGEN_PROFILE),
    "cachegen_windowed": Golden(_cachegen, torch.float32, (0, 7, 32, 0), 1, CACHEGEN_PROFILE),
}


def decoded_digests(codec: Codec, stream: Bitstream, chunk: Chunk) -> list[str]:
    """What each prefix of levels decodes to."""
    digests = []
    for levels in range(1, codec.num_levels + 1):
        cache = codec.decode(stream, chunk, levels=levels)
        digest = blake2b(digest_size=16)
        for tensor in (cache.keys, cache.values):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


@pytest.fixture(scope="module", autouse=True)
def _regenerate(tiny: Any, golden_folder: Path, regenerate_golden: bool) -> None:
    if not regenerate_golden:
        return
    other = tiny.reseed("calibration")
    calibration = [other.cache(other.chunk(bytes(16), 256, i)) for i in (0, 1)]
    for name in KLT:
        _regenerate_klt(tiny, golden_folder, name)
    profile = CacheGenProfile.fit(tiny.spec, calibration)
    (golden_folder / CACHEGEN_PROFILE).write_bytes(profile.to_bytes())
    digests = {}
    for name, golden in GOLDEN.items():
        codec, chunk, cache = golden.case(tiny, golden_folder)
        data = codec.encode(chunk, cache)
        (golden_folder / f"{name}.kdn").write_bytes(data)
        digests[name] = decoded_digests(codec, Bitstream.parse(data), chunk)
    (golden_folder / "decoded.json").write_text(json.dumps(digests, indent=1) + "\n")


@pytest.mark.parametrize("name", GOLDEN)
def test_encodes_to_the_pinned_bytes(name: str, tiny: Any, golden_folder: Path) -> None:
    codec, chunk, cache = GOLDEN[name].case(tiny, golden_folder)
    assert codec.encode(chunk, cache) == (golden_folder / f"{name}.kdn").read_bytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_decodes_to_the_pinned_values(name: str, tiny: Any, golden_folder: Path) -> None:
    codec, chunk, _ = GOLDEN[name].case(tiny, golden_folder)
    stream = Bitstream.parse((golden_folder / f"{name}.kdn").read_bytes())
    stream.verify()
    pinned = json.loads((golden_folder / "decoded.json").read_text())
    assert decoded_digests(codec, stream, chunk) == pinned[name]


# klt transforms in floating point: its integers are pinned by their bytes, which a decoder must
# read to the end of every lane; its values to within a rounding that may fall the other way.
KLT_TOLERANCE = 2e-3


def _klt_spec(tiny: Any, name: str) -> ModelSpec:
    found: ModelSpec = windowed(tiny) if name == "klt_parts" else tiny.spec
    return found


def _klt_case(tiny: Any, folder: Path, name: str, index: int) -> tuple[Codec, Chunk]:
    profile = Profile.load(folder / f"{name}_profile.safetensors")
    codec = codec_with(_klt_spec(tiny, name), profile)
    return codec, tiny.chunk(codec.profile_id, 32, index)


def _klt_levels(codec: Codec, stream: Bitstream, chunk: Chunk) -> dict[str, torch.Tensor]:
    found = {}
    for levels in range(1, codec.num_levels + 1):
        cache = codec.decode(stream, chunk, levels=levels)
        found |= {f"{levels}.keys": cache.keys, f"{levels}.values": cache.values}
    return found


def _regenerate_klt(tiny: Any, folder: Path, name: str) -> None:
    profile = make_profile(_klt_spec(tiny, name), **KLT[name])
    (folder / f"{name}_profile.safetensors").write_bytes(profile.to_bytes())
    pinned = {}
    for index in (0, 1):
        codec, chunk = _klt_case(tiny, folder, name, index)
        data = codec.encode(chunk, tiny.cache(chunk, torch.float32))
        (folder / f"{name}_{index}.kdn").write_bytes(data)
        levels = _klt_levels(codec, Bitstream.parse(data), chunk)
        pinned |= {f"{index}.{part}": tensor for part, tensor in levels.items()}
    save_file(pinned, folder / f"{name}_decoded.safetensors")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", KLT)
def test_klt_decodes_to_the_pinned_values(
    tiny: Any, golden_folder: Path, name: str, index: int
) -> None:
    codec, chunk = _klt_case(tiny, golden_folder, name, index)
    stream = Bitstream.parse((golden_folder / f"{name}_{index}.kdn").read_bytes())
    stream.verify()
    pinned = load_file(golden_folder / f"{name}_decoded.safetensors")
    for part, found in _klt_levels(codec, stream, chunk).items():
        torch.testing.assert_close(
            found, pinned[f"{index}.{part}"], rtol=KLT_TOLERANCE, atol=KLT_TOLERANCE
        )


@pytest.mark.parametrize("name", KLT)
def test_klt_profile_id_is_pinned(golden_folder: Path, name: str) -> None:
    found = Profile.load(golden_folder / f"{name}_profile.safetensors")
    assert Profile.from_bytes(found.to_bytes()).profile_id == found.profile_id
    stream = Bitstream.parse((golden_folder / f"{name}_0.kdn").read_bytes())
    assert stream.info.profile == found.profile_id
