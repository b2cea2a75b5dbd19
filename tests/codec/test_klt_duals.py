"""What analysis needs is worked out once; a file of it is believed only if it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kdn.codec import open_codec
from kdn.codec.klt import Profile
from kdn.codec.klt.duals import Dual, Duals
from tests.codec.conftest import Tiny
from tests.codec.klt_profile import make_profile, parts

TINY = Tiny.with_layers(4)
PROFILE = make_profile(TINY.spec)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Groups whose duals were worked out."""
    done: list[object] = []
    of = Dual.of

    def counting(group: object) -> Dual:
        done.append(group)
        return of(group)  # type: ignore[arg-type]

    monkeypatch.setattr(Dual, "of", counting)
    return done


def same(some: Sequence[Dual], others: Sequence[Dual]) -> bool:
    both = zip(some, others, strict=True)
    return all(
        torch.equal(a, b)
        for one, other in both
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def test_a_later_process_reads_them(tmp_path: Path, counted: list[object]) -> None:
    first = Duals(PROFILE, tmp_path / "duals").all()
    assert len(counted) == len(PROFILE.groups)
    assert same(Duals(PROFILE, tmp_path / "duals").all(), first)
    assert len(counted) == len(PROFILE.groups)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "of another profile"])
def test_what_is_not_whole_is_made_again(
    damage: str, tmp_path: Path, counted: list[object]
) -> None:
    file = tmp_path / "duals"
    first = Duals(PROFILE, file).all()
    data = file.read_bytes()
    if damage == "of another profile":
        meta, tensors = parts(TINY.spec)
        Duals(Profile.build(meta | {"finest_step": 0.5}, tensors), file).all()
    else:
        flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        file.write_bytes({"flipped": flipped, "cut": data[:-1], "empty": b""}[damage])
    assert file.read_bytes() != data
    counted.clear()
    assert same(Duals(PROFILE, file).all(), first)
    assert len(counted) == len(PROFILE.groups)
    assert file.read_bytes() == data


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = Duals(PROFILE, tmp_path / "file" / "duals").all()
    assert same(found, Duals(PROFILE).all())


def test_streams_are_the_same_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[object]
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "profile").write_bytes(PROFILE.to_bytes())
    chunk = TINY.chunk(PROFILE.profile_id)
    streams = {
        open_codec("klt", TINY.spec, tmp_path / "profile").encode(chunk, TINY.cache(chunk))
        for _ in range(2)
    }
    assert len(streams) == 1
    assert len(counted) == len(PROFILE.groups)
