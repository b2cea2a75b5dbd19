"""Decoded chunks in a folder: what is kept, what goes, and what is never believed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.exact import ExactCodec
from kdn.delivery.sink import HostSink
from kdn.errors import UnsupportedError
from kdn.session.delivered import Grade
from kdn.session.host_folder import MARKER
from kdn.session.host_memory import HEADER_BYTES, HostMemory

LAYERS, HEADS, DIM = 2, 2, 8
SPEC = ModelSpec(LAYERS, HEADS, DIM, 1000, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)
CHUNKS = cut(list(range(3, 3 + 5 * 256)), Namespace(SPEC.fingerprint, bytes(16)))
CHUNK_BYTES = 2 * LAYERS * 256 * HEADS * DIM * 4 + HEADER_BYTES
KLDS = (0.25, 0.05, 0.01)


def values(chunk: Chunk, dtype: torch.dtype = torch.float32) -> KVCache:
    generator = torch.Generator().manual_seed(chunk.start)
    shape = (2, LAYERS, chunk.num_tokens, HEADS, DIM)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return KVCache(keys, values, chunk.start)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That the tiers make in `tmp_path`."""
    return tmp_path / f"kdn-{os.geteuid()}"


def open_tier(
    folder: Path, dtype: torch.dtype = torch.float32, max_bytes: int = 3 * CHUNK_BYTES
) -> HostMemory:
    return HostMemory(folder.parent, SPEC, dtype, max_bytes, KLDS)


@pytest.fixture
def tier(folder: Path) -> HostMemory:
    return open_tier(folder)


def path(folder: Path, chunk: Chunk) -> Path:
    return folder / f"{chunk.key.hex()}.float32"


def test_a_delivery_says_how_many_levels_values_stand_for(tier: HostMemory) -> None:
    """Of what the model computed, and what was decoded from all levels, all."""
    for chunk, kld, exact in zip(CHUNKS, (0.0, 0.05, 0.25), (True, False, False), strict=False):
        assert tier.put(chunk, values(chunk), kld, exact=exact)
    whole = KVCache(*torch.zeros(2, LAYERS, 5 * 256, HEADS, DIM))
    grades = tier.deliver(CHUNKS, HostSink(ExactCodec(SPEC), whole), 5 * 256, 10.0)
    assert grades == (Grade(0.0, True, 3), Grade(0.05, False, 2), Grade(0.25, False, 1))


class Noting:
    """A sink that keeps only what it was given."""

    def __init__(self) -> None:
        self.written: list[Chunk] = []

    def write(self, chunk: Chunk, cache: KVCache) -> None:
        self.written.append(chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_process_finds_what_one_keeps(folder: Path, dtype: torch.dtype) -> None:
    chunk = CHUNKS[1]
    cache = values(chunk, dtype)
    tier = open_tier(folder, dtype)
    assert tier.put(chunk, cache, 0.25, exact=False)
    held = open_tier(folder, dtype).get(chunk, 0.25)
    assert held is not None
    assert torch.equal(held.cache.keys, cache.keys)
    assert torch.equal(held.cache.values, cache.values)
    assert (held.cache.start, held.kld, held.exact) == (256, 0.25, False)
    assert tier.get(CHUNKS[0], 1.0) is None


def test_only_what_is_good_enough_counts(tier: HostMemory) -> None:
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


def test_when_it_is_late_no_more_is_written(tier: HostMemory) -> None:
    for chunk in CHUNKS[:3]:
        tier.put(chunk, values(chunk), 0.0, exact=True)
    answers = iter([False, False, True])
    sink = Noting()
    assert len(tier.deliver(CHUNKS[:3], sink, 768, 0.0, lambda: next(answers))) == 2  # type: ignore[arg-type]
    assert sink.written == CHUNKS[:2]


def test_what_is_held_does_not_change_by_writing_to_it(tier: HostMemory) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    held = tier.get(CHUNKS[0], 0.0)
    assert held is not None
    held.cache.keys.zero_()
    again = tier.get(CHUNKS[0], 0.0)
    assert again is not None
    assert torch.equal(again.cache.keys, values(CHUNKS[0]).keys)


def test_values_of_another_dtype_are_others(tier: HostMemory, folder: Path) -> None:
    half = open_tier(folder, torch.bfloat16)
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
    tier = HostMemory(folder.parent, SPEC, torch.float32, 3 * CHUNK_BYTES, KLDS, clock)
    chunks = first_chunks(4)
    for chunk in chunks[:3]:
        tier.put(chunk, values(chunk), 0.0, exact=True)
        clock.now_ns += 10**9
    tier.used(chunks[:1])
    clock.now_ns += 10**9
    assert tier.put(chunks[3], values(chunks[3]), 0.0, exact=True)
    assert [tier.has(chunk, 0.0) for chunk in chunks] == [True, False, True, True]


def test_of_one_prompt_the_end_goes_first(tier: HostMemory, folder: Path) -> None:
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


def test_a_folder_that_was_removed_comes_back(tier: HostMemory, folder: Path) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    shutil.rmtree(folder)
    assert tier.get(CHUNKS[0], 0.0) is None
    assert tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    assert tier.has(CHUNKS[0], 0.0)


def test_without_room_nothing_is_kept_or_lost(folder: Path) -> None:
    tier = open_tier(folder, max_bytes=CHUNK_BYTES - 1)
    assert not tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    assert os.listdir(folder) == [MARKER]


def test_others_memory_stays_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, [old, new] = Clock(), first_chunks(2)
    tier = HostMemory(folder.parent, SPEC, torch.float32, 3 * CHUNK_BYTES, clock)
    disk = SimpleNamespace(f_blocks=100, f_bavail=25, f_frsize=CHUNK_BYTES)
    monkeypatch.setattr(os, "fstatvfs", lambda _: disk)
    assert not tier.put(old, values(old), 0.0, exact=True)
    disk.f_bavail += 1
    assert tier.put(old, values(old), 0.0, exact=True)
    disk.f_bavail = 0
    clock.now_ns += 10**9
    assert tier.put(new, values(new), 0.0, exact=True)  # in the place of the other
    assert [tier.has(one, 0.0) for one in (old, new)] == [False, True]


@pytest.mark.parametrize("at", [0, 20, HEADER_BYTES - 1, HEADER_BYTES, CHUNK_BYTES - 1])
def test_damage_is_a_miss_and_goes(tier: HostMemory, folder: Path, at: int) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.5, exact=False)
    file = path(folder, CHUNKS[0])
    data = bytearray(file.read_bytes())
    data[at] ^= 0x41
    file.write_bytes(data)
    assert tier.get(CHUNKS[0], 1.0) is None
    assert not file.exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]".ljust(600), b"\xff" * 2000])
def test_a_file_of_something_else_is_a_miss(tier: HostMemory, folder: Path, data: bytes) -> None:
    path(folder, CHUNKS[0]).write_bytes(data)
    assert not tier.has(CHUNKS[0], 1.0)
    assert tier.get(CHUNKS[0], 1.0) is None


def test_values_do_not_pass_for_others(tier: HostMemory, folder: Path) -> None:
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


def test_what_does_not_fit_the_chunk_is_not_kept(tier: HostMemory) -> None:
    chunk = CHUNKS[1]
    cache = values(chunk)
    half = KVCache(cache.keys[:, :, :1], cache.values[:, :, :1], chunk.start)
    gap = KVCache(cache.keys, cache.values, chunk.start, (chunk.start, chunk.start + 1))
    for wrong in (half, gap, values(CHUNKS[0]), cache.slice(256, 300)):
        assert not tier.put(chunk, wrong, 0.0, exact=True)


def test_a_folder_that_others_can_open_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(UnsupportedError, match="only this user"):
        open_tier(folder)
    folder.rmdir()
    for target in (folder.parent, folder.parent / "nowhere"):
        folder.symlink_to(target)
        with pytest.raises(UnsupportedError, match="only this user"):
            open_tier(folder)
        folder.unlink()


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that somebody made in shared memory before us."""
    folder.mkdir(mode=0o700)
    real = os.fstat

    def another(fd: int) -> os.stat_result:
        about = list(real(fd))
        about[4] += 1  # st_uid
        return os.stat_result(about)

    monkeypatch.setattr(os, "fstat", another)
    with pytest.raises(UnsupportedError, match="only this user"):
        open_tier(folder)


def test_files_of_others_are_never_removed(folder: Path, tmp_path: Path) -> None:
    """Beside kdn's folder and in it: by name, by kind, whatever room is needed."""
    beside = tmp_path / "thesis.tex"
    beside.write_bytes(b"not ours")
    tier = open_tier(folder)
    inside = [folder / name for name in ("thesis.tex", "00.txt", ".hidden", "film.float32")]
    for one in inside:
        one.write_bytes(b"not ours")
        os.utime(one, (0, 0))
    link = path(folder, CHUNKS[4])  # a name of ours, and yet nothing of ours
    link.symlink_to(beside)
    os.utime(link, (0, 0), follow_symlinks=False)
    half_written = folder / ".0123456789abcdef.part"
    half_written.write_bytes(bytes(CHUNK_BYTES))
    os.utime(half_written, (0, 0))
    for chunk in first_chunks(5):
        assert tier.put(chunk, values(chunk), 0.0, exact=True)
    assert tier.get(CHUNKS[4], 1.0) is None
    assert [one.read_bytes() for one in (beside, *inside)] == [b"not ours"] * 5
    assert link.is_symlink()
    assert not half_written.exists()
    assert sum(tier.has(chunk, 0.0) for chunk in first_chunks(5)) == 3


def test_a_folder_that_is_not_kdns_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    theirs = folder / ("00" * 16 + ".float32")
    theirs.write_bytes(b"not ours")
    with pytest.raises(UnsupportedError, match=r"not kdn's"):
        open_tier(folder)
    assert theirs.read_bytes() == b"not ours"


def test_what_another_could_have_written_is_not_believed(tier: HostMemory, folder: Path) -> None:
    tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    path(folder, CHUNKS[0]).chmod(0o666)
    assert not tier.has(CHUNKS[0], 0.0)
    assert tier.get(CHUNKS[0], 0.0) is None
    tier.put(CHUNKS[1], values(CHUNKS[1]), 0.0, exact=True)
    elsewhere = folder.parent / "elsewhere"
    path(folder, CHUNKS[1]).rename(elsewhere)
    path(folder, CHUNKS[1]).symlink_to(elsewhere)
    assert tier.get(CHUNKS[1], 0.0) is None
    folder.chmod(0o777)
    tier.used(CHUNKS[:1])
    with pytest.raises(UnsupportedError, match="only this user"):
        tier.put(CHUNKS[2], values(CHUNKS[2]), 0.0, exact=True)
    assert tier.get(CHUNKS[2], 0.0) is None


def test_everything_is_for_its_owner_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        tier = open_tier(folder)
        tier.put(CHUNKS[0], values(CHUNKS[0]), 0.0, exact=True)
    finally:
        os.umask(before)
    assert {one.stat().st_mode & 0o077 for one in (folder, *folder.iterdir())} == {0}
