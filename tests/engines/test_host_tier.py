"""Decoded chunks in a folder: what is kept, what goes, and what is never believed."""

from __future__ import annotations

import json
import os
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
    return HostTier(folder, SPEC, 3 * CHUNK_BYTES)


def path(folder: Path, chunk: Chunk) -> Path:
    return folder / chunk.key.hex()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_process_finds_what_one_keeps(
    tier: HostTier, folder: Path, dtype: torch.dtype
) -> None:
    chunk = CHUNKS[1]
    cache = values(chunk, dtype)
    assert tier.put(chunk, cache, 0.25, exact=False)
    held = HostTier(folder, SPEC, CHUNK_BYTES).get(chunk, 0.25)
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


def test_the_least_recently_used_goes(tier: HostTier, folder: Path) -> None:
    for number in range(3):
        tier.put(CHUNKS[number], values(CHUNKS[number]), 0.0, exact=True)
        os.utime(path(folder, CHUNKS[number]), (number, number))
    tier.used(CHUNKS[:1])
    assert tier.put(CHUNKS[3], values(CHUNKS[3]), 0.0, exact=True)
    assert [tier.has(chunk, 0.0) for chunk in CHUNKS[:4]] == [True, False, True, True]


def test_of_one_prompt_the_end_goes_first(tier: HostTier, folder: Path) -> None:
    for chunk in CHUNKS[:3]:
        tier.put(chunk, values(chunk), 0.0, exact=True)
    tier.used(CHUNKS[:3])
    times = [path(folder, chunk).stat().st_mtime_ns for chunk in CHUNKS[:3]]
    assert times == sorted(times, reverse=True)


def test_without_room_nothing_is_kept_or_lost(folder: Path) -> None:
    tier = HostTier(folder, SPEC, CHUNK_BYTES - 1)
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
            HostTier(folder, SPEC, CHUNK_BYTES)
