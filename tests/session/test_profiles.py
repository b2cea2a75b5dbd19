"""Profiles travel with what was coded by them, verified."""

from __future__ import annotations

import stat
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kdn.cache.keys import PUBLIC_SEAL_KEY, seal_key
from kdn.cache.spec import ModelSpec
from kdn.client.asynchronous import AsyncClient
from kdn.codec import open_codec
from kdn.codec.base import Codec
from kdn.codec.profiles import local_profile
from kdn.engines.transformers import spec_of
from kdn.errors import (
    AuthenticityError,
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    UnsupportedError,
)
from kdn.places.manifests import with_entry
from kdn.places.places import Places, open_places
from kdn.session.profiles import _name, codec_for, share_profile
from tests.client.clients import TEXT
from tests.client.letters import Letters
from tests.node.harness import Running, with_node
from tests.session.calibrated import calibrate_here, profile_of


async def klt_for(spec: ModelSpec, places: Places) -> Codec:
    return await codec_for("klt", spec, places, PUBLIC_SEAL_KEY)


def test_a_profile_calibrated_here_is_used_everywhere(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    spec = spec_of(model)

    def machine(name: str) -> None:
        monkeypatch.setenv("KDN_CACHE", str(tmp_path / name))

    async def test(node: Running) -> None:
        machine("first")
        profile = calibrate_here(spec)
        pair = (model, Letters())
        async with AsyncClient(node.url, model=pair, recompute=False) as client:
            await client.learn("notes", TEXT)
        machine("second")
        async with AsyncClient(node.url, model=pair, recompute=False) as client:
            assert client.session.codec.profile_id == profile.profile_id
            answer = client.ask("notes", "?", max_new_tokens=3)
            await answer.read()
            assert answer.stats.known_tokens == 709
            assert answer.stats.levels[0] >= 1
        assert local_profile(spec).read_bytes() == profile.to_bytes()
        assert stat.S_IMODE(local_profile(spec).stat().st_mode) == 0o600
        for folder in (local_profile(spec).parent, tmp_path / "second"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        async with open_places(node.url) as places:
            codec = await klt_for(spec, places)
            assert not await share_profile(codec, places, PUBLIC_SEAL_KEY)  # it is there already

    with_node(tmp_path / "node", test)


async def share(places: Places, spec: ModelSpec, data: bytes) -> bytes:
    """Whatever it is, as anybody can in the public namespace."""
    profile_id = blake2b(data, digest_size=16).digest()
    await places.profiles[0].put(
        profile_id, data, etag=profile_id, checksum=xxh3_64_intdigest(data)
    )
    name, entry = _name(spec, PUBLIC_SEAL_KEY), {"profile": profile_id.hex()}
    told = with_entry({}, name, spec.fingerprint, entry, PUBLIC_SEAL_KEY)
    await places.names.change(name, lambda _: told)
    return profile_id


def other_profiles(spec: ModelSpec) -> dict[str, bytes]:
    """Profiles like any other, but not of this model."""
    return {
        "another fingerprint": profile_of(replace(spec, fingerprint=b"?" * 16)).to_bytes(),
        "another size": profile_of(replace(spec, vocab_size=96)).to_bytes(),
        "no profile": b"no profile",
        "cut": profile_of(spec).to_bytes()[:-9],
    }


def test_a_profile_of_another_model_is_not_kept(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    spec = spec_of(tiny_model("llama"))
    good = profile_of(spec)

    async def test(node: Running) -> None:
        async with open_places(node.url) as places:
            for data in other_profiles(spec).values():
                await share(places, spec, data)
                with pytest.raises((FormatError, MismatchError), match="cannot be used"):
                    await klt_for(spec, places)
                assert not local_profile(spec).exists()
            await share(places, spec, good.to_bytes())
            codec = await klt_for(spec, places)
            assert codec.profile_id == good.profile_id

    with_node(tmp_path / "node", test)


def test_a_bad_file_does_not_stop_later_starts(
    tiny_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kdn.codec.profiles.SHIPPED", tmp_path / "shipped")
    spec = spec_of(tiny_model("llama"))
    good = profile_of(spec)
    path, shipped = local_profile(spec), tmp_path / "shipped" / local_profile(spec).name
    for folder in (path.parent, shipped.parent):
        folder.mkdir(parents=True)

    async def test(node: Running) -> None:
        async with open_places(node.url) as places:
            for data in other_profiles(spec).values():
                path.write_bytes(data)
                shipped.write_bytes(good.to_bytes())
                assert (await klt_for(spec, places)).profile_id == good.profile_id
                assert f"{path} is not used, please delete it" in caplog.text
                codec = open_codec("klt", spec)
                assert not await share_profile(
                    codec, places, PUBLIC_SEAL_KEY
                )  # what lies here is not in use
                shipped.unlink()
                with pytest.raises(UnsupportedError, match="kdn calibrate"):
                    await klt_for(spec, places)
                caplog.clear()
            await share(places, spec, good.to_bytes())
            assert (await klt_for(spec, places)).profile_id == good.profile_id
            assert path.read_bytes() == good.to_bytes()

    with_node(tmp_path / "node", test)


def test_no_more_than_a_profile_can_have_is_read(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    spec = spec_of(tiny_model("llama"))
    good = profile_of(spec)
    size = len(good.to_bytes())
    asked = []

    async def test(node: Running) -> None:
        async with open_places(node.url) as places:
            await share(places, spec, good.to_bytes())
            get = places.profiles[0].get

            async def counted(key: bytes, start: int = 0, end: int | None = None) -> Any:
                asked.append(end)
                return await get(key, start, end)

            monkeypatch.setattr(places.profiles[0], "get", counted)
            for home in ("kdn.session.profiles", "kdn.codec.klt.profile"):
                monkeypatch.setattr(f"{home}.MAX_PROFILE_BYTES", size - 1)
            with pytest.raises(KdnError):
                await klt_for(spec, places)
            for home in ("kdn.session.profiles", "kdn.codec.klt.profile"):
                monkeypatch.setattr(f"{home}.MAX_PROFILE_BYTES", size)
            assert (await klt_for(spec, places)).profile_id == good.profile_id
        assert asked == [size, size + 1]

    with_node(tmp_path / "node", test)


def test_a_profile_that_cannot_be_kept_is_used(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "file" / "cache"))
    spec = spec_of(tiny_model("llama"))
    good = profile_of(spec)

    async def test(node: Running) -> None:
        async with open_places(node.url) as places:
            await share(places, spec, good.to_bytes())
            assert (await klt_for(spec, places)).profile_id == good.profile_id

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
                await klt_for(spec, places)
            assert (await codec_for("exact", spec, places, PUBLIC_SEAL_KEY)).name == "exact"
            name = _name(spec, PUBLIC_SEAL_KEY)
            entry = {"profile": profile.profile_id.hex()}
            told = with_entry({}, name, spec.fingerprint, entry, PUBLIC_SEAL_KEY)
            await places.names.put(name, told, None)
            with pytest.raises(UnsupportedError, match="kdn calibrate"):
                await klt_for(spec, places)  # the name is there, the profile is not

            class Liar:
                async def get(self, key: bytes, start: int, end: int) -> Any:
                    from kdn.store.base import Entry, Span

                    return Span(Entry(key, key, 3), 0, b"lie")

            object.__setattr__(places, "profiles", (Liar(),))
            with pytest.raises(ChecksumError, match="other bytes"):
                await klt_for(spec, places)
        assert not local_profile(spec).exists()

    with_node(tmp_path / "node", test)


def test_only_a_holder_of_the_secret_names_a_profile(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile decides what streams decode to: nobody else may choose it."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    spec = spec_of(tiny_model("llama"))

    async def test(node: Running) -> None:
        async with open_places(node.url) as places:
            await share(places, spec, profile_of(spec).to_bytes())
            own = seal_key(b"a tenant's own")
            with pytest.raises(UnsupportedError, match="kdn calibrate"):
                await codec_for("klt", spec, places, own)
            public = await places.names.get(_name(spec, PUBLIC_SEAL_KEY))
            assert public is not None
            await places.names.put(_name(spec, own), public.manifest, None)
            with pytest.raises(AuthenticityError, match="secret"):
                await codec_for("klt", spec, places, own)
        assert not local_profile(spec).exists()

    with_node(tmp_path / "node", test)
