"""Decoded chunks in a folder: what is kept, what goes, and what is never believed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.host_tier import HEADER_BYTES, HostTier
from kdn.errors import UnsupportedError

LAYERS, HEADS, DIM = 2, 2, 8
SPEC = ModelSpec(LAYERS, HEADS, DIM, 1000, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)
CHUNKS = cut(list(range(3, 3 + 5 * 256)), Namespace(SPEC.fingerprint, bytes(16)))
CHUNK_BYTES = 2 * LAYERS * 256 * HEADS * DIM * 4 + HEADER_BYTES


def values(chunk: Chunk, dtype: torch.dtype = torch.float32) -> KVCache:
    generator = torch.Generator().manual_seed(chunk.start)
    shape = (2, LAYERS, chunk.num_tokens, HEADS, DIM)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return KVCache(keys, values, chunk.start)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def tier(folder: Path) -> HostTier:
    return HostTier(folder, SPEC, torch.float32, 3 * CHUNK_BYTES)


def path(folder: Path, chunk: Chunk) -> Path:
    return folder / f"{chunk.key.hex()}.float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_process_finds_what_one_keeps(folder: Path, dtype: torch.dtype) -> None:
    chunk = CHUNKS[1]
    cache = values(chunk, dtype)
    tier = HostTier(folder, SPEC, dtype, CHUNK_BYTES)
    assert tier.put(chunk, cache, 0.25, exact=False)
    held = HostTier(folder, SPEC, dtype, CHUNK_BYTES).get(chunk, 0.25)
    assert held is not None
    assert torch.equal(held.cache.keys, cache.keys)
    assert torch.equal(held.cache.values, cache.values)
    assert (held.cache.start, held.kld, held.exact) == (256, 0.25, False)
    assert tier.get(CHUNKS[0], 1.0) is None


def test_only_what_is_good_enough_counts(tier: HostTier) -> None:
    chunk = CHUNKS[0]
    tier.put(chunk, values(chunk), 0.01, exact=False)
    assert tier.has(chunk, 0.01)
    assert not tier.has(chunk, 0.009)
    assert tier.get(chunk, 0.009) is None
    assert not tier.put(chunk, values(chunk), 0.02, exact=False)  # there is better
    assert tier.put(chunk, values(chunk), 0.0, exact=True)
    held = tier.get(chunk, 0.0)
    assert held is not None
    assert held.exact


def test_what_is_held_does_not_change_by_writing_to_it(tier: HostTier) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    held = tier.get(CHUNKS[0], 0.0)
    assert held is not None
    held.cache.keys.zero_()
    again = tier.get(CHUNKS[0], 0.0)
    assert again is not None
    assert torch.equal(again.cache.keys, values(CHUNKS[0]).keys)


def test_values_of_another_dtype_are_others(tier: HostTier, folder: Path) -> None:
    half = HostTier(folder, SPEC, torch.bfloat16, 3 * CHUNK_BYTES)
    assert half.put(CHUNKS[0], values(CHUNKS[0], torch.bfloat16), 0.0, exact=True)
    assert tier.get(CHUNKS[0], 1.0) is None
    assert not tier.put(CHUNKS[0], values(CHUNKS[0], torch.bfloat16), 0.0, exact=True)
    assert tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    path(folder, CHUNKS[0]).rename(folder / f"{CHUNKS[0].key.hex()}.bfloat16")
    assert half.get(CHUNKS[0], 1.0) is None


class Clock:
    now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns


def first_chunks(number: int) -> list[Chunk]:
    """Of as many prompts."""
    space = Namespace(SPEC.fingerprint, bytes(16))
    return [cut([at, *range(300)], space)[0] for at in range(number)]


def test_the_least_recently_used_goes(folder: Path) -> None:
    clock = Clock()
    tier = HostTier(folder, SPEC, torch.float32, 3 * CHUNK_BYTES, clock)
    chunks = first_chunks(4)
    for chunk in chunks[:3]:
        tier.put(chunk, values(chunk), 0.0, exact=True)
        clock.now_ns += 10**9
    tier.used(chunks[:1])
    clock.now_ns += 10**9
    assert tier.put(chunks[3], values(chunks[3]), 0.0, exact=True)
    assert [tier.has(chunk, 0.0) for chunk in chunks] == [True, False, True, True]


def test_of_one_prompt_the_end_goes_first(tier: HostTier, folder: Path) -> None:
    """Also while it is read, and when it does not fit: its beginning stays."""
    taken = [tier.put(chunk, values(chunk), 0.0, exact=True) for chunk in CHUNKS]
    assert taken == [True] * 3 + [False] * 2
    assert [tier.has(chunk, 0.0) for chunk in CHUNKS] == [True] * 3 + [False] * 2
    tier.used(CHUNKS)
    times = [path(folder, chunk).stat().st_mtime_ns for chunk in CHUNKS[:3]]
    assert times[0] > times[1] > times[2]
    other = first_chunks(1)[0]
    assert tier.put(other, values(other), 0.0, exact=True)
    assert [tier.has(chunk, 0.0) for chunk in CHUNKS] == [True] * 2 + [False] * 3


def test_a_folder_that_was_removed_comes_back(tier: HostTier, folder: Path) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    shutil.rmtree(folder)
    assert tier.get(CHUNKS[0], 0.0) is None
    assert tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    assert tier.has(CHUNKS[0], 0.0)


def test_without_room_nothing_is_kept_or_lost(folder: Path) -> None:
    tier = HostTier(folder, SPEC, torch.float32, CHUNK_BYTES - 1)
    assert not tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("at", [0, 20, HEADER_BYTES - 1, HEADER_BYTES, CHUNK_BYTES - 1])
def test_damage_is_a_miss_and_goes(tier: HostTier, folder: Path, at: int) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.5, exact=False)
    file = path(folder, CHUNKS[0])
    data = bytearray(file.read_bytes())
    data[at] ^= 0x41
    file.write_bytes(data)
    assert tier.get(CHUNKS[0], 1.0) is None
    assert not file.exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]".ljust(600), b"\xff" * 2000])
def test_a_file_of_something_else_is_a_miss(tier: HostTier, folder: Path, data: bytes) -> None:
    path(folder, CHUNKS[0]).write_bytes(data)
    assert not tier.has(CHUNKS[0], 1.0)
    assert tier.get(CHUNKS[0], 1.0) is None


def test_values_do_not_pass_for_others(tier: HostTier, folder: Path) -> None:
    """Neither another chunk's, nor the same at a quality they do not have."""
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.5, exact=False)
    data = path(folder, CHUNKS[0]).read_bytes()
    path(folder, CHUNKS[1]).write_bytes(data)
    assert tier.get(CHUNKS[1], 1.0) is None
    header = json.loads(data[:HEADER_BYTES]) | {"kld": 0.0, "exact": True}
    forged = json.dumps(header).encode().ljust(HEADER_BYTES) + data[HEADER_BYTES:]
    path(folder, CHUNKS[0]).write_bytes(forged)
    assert tier.has(CHUNKS[0], 0.0)  # which reads the header only
    assert tier.get(CHUNKS[0], 0.0) is None


def test_what_does_not_fit_the_chunk_is_not_kept(tier: HostTier) -> None:
    chunk = CHUNKS[1]
    cache = values(chunk)
    half = KVCache(cache.keys[:, :, :1], cache.values[:, :, :1], chunk.start)
    gap = KVCache(cache.keys, cache.values, chunk.start, (chunk.start, chunk.start + 1))
    for wrong in (half, gap, values(CHUNKS[0]), cache.slice(256, 300)):
        assert not tier.put(chunk, wrong, 0.0, exact=True)


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for folder in (open_folder, link):
        with pytest.raises(UnsupportedError, match="only this user"):
            HostTier(folder, SPEC, torch.float32, CHUNK_BYTES)
