"""Profiles travel with what was coded by them, verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.cache.spec import ModelSpec
from kdn.client.asynchronous import AsyncClient
from kdn.codec.klt import Profile
from kdn.codec.profiles import local_profile
from kdn.engines.transformers import spec_of
from kdn.errors import ChecksumError, UnsupportedError
from kdn.places import open_places
from kdn.shared_profiles import codec_for, share_profile
from tests.client.letters import Letters
from tests.client.test_asynchronous import TEXT
from tests.codec.klt_profile import LEVELS, parts
from tests.node.harness import Running, with_node


def profile_of(spec: ModelSpec) -> Profile:
    meta, tensors = parts(spec)
    meta["expected"] = [{"kld": 0.1 / 4**level} for level in range(LEVELS)]
    return Profile.build(meta, tensors)


def test_a_profile_calibrated_here_is_used_everywhere(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    spec = spec_of(model)
    profile = profile_of(spec)

    def machine(name: str) -> None:
        monkeypatch.setenv("KDN_CACHE", str(tmp_path / name))

    async def test(node: Running) -> None:
        machine("first")
        local_profile(spec).parent.mkdir(parents=True)
        local_profile(spec).write_bytes(profile.to_bytes())
        pair = (model, Letters())
        async with AsyncClient(node.url, model=pair, recompute=False) as client:
            await client.learn("notes", TEXT)
        machine("second")
        async with AsyncClient(node.url, model=pair, recompute=False) as client:
            assert client.engine.codec.profile_id == profile.profile_id
            answer = client.ask("notes", "?", max_new_tokens=3)
            await answer.read()
            assert answer.stats.known_tokens == 704
            assert answer.stats.levels[0] >= 1
        assert local_profile(spec).read_bytes() == profile.to_bytes()
        async with open_places(node.url) as places:
            assert not await share_profile(spec, places)  # it is there already

    with_node(tmp_path / "node", test)


def test_what_is_no_profile_is_refused(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    spec = spec_of(tiny_model("llama"))
    profile = profile_of(spec)

    async def test(node: Running) -> None:
        async with open_places(node.url) as places:
            with pytest.raises(UnsupportedError, match="kdn calibrate"):
                await codec_for("klt", spec, places)
            assert (await codec_for("exact", spec, places)).name == "exact"
            name = f"profile-{spec.fingerprint.hex()}"
            entry = {"profile": profile.profile_id.hex()}
            await places.names.put(name, {"models": {spec.fingerprint.hex(): entry}}, None)
            with pytest.raises(UnsupportedError, match="kdn calibrate"):
                await codec_for("klt", spec, places)  # the name is there, the profile is not

            class Liar:
                async def get(self, key: bytes) -> Any:
                    from kdn.store.base import Entry, Span

                    return Span(Entry(key, key, 3), 0, b"lie")

            object.__setattr__(places, "profiles", (Liar(),))
            with pytest.raises(ChecksumError, match="other bytes"):
                await codec_for("klt", spec, places)
        assert not local_profile(spec).exists()

    with_node(tmp_path / "node", test)
