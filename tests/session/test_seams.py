"""Seams are found by model and tag, at places and on this machine."""

from __future__ import annotations

import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kdn.bench.web_server import start_web
from kdn.cli.main import app
from kdn.credentials import Credentials
from kdn.errors import (
    AuthenticityError,
    ChecksumError,
    FormatError,
    MismatchError,
    StoreError,
    UnsupportedError,
)
from kdn.places.manifests import with_entry
from kdn.session import seams as home
from kdn.session.seams import find_seams, share_seams
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from tests.blend.test_seams import SPEC, random_seams
from tests.node.harness import run
from tests.places.exports import needs_nginx


def with_session(
    place: Path | str, test: Callable[[Session], Coroutine[Any, Any, Any]], **more: Any
) -> Any:
    async def work() -> Any:
        own = SessionSettings((place,), codec="exact", **{"host_bytes": 0, **more})
        async with Session(own, SPEC, torch.float32) as session:
            return await test(session)

    return run(work())


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Another machine than before."""

    def change(name: str) -> Path:
        monkeypatch.setenv("KDN_CACHE", str(tmp_path / name))
        return tmp_path / name

    change("first machine")
    return change


def test_what_one_shares_others_find_by_its_tag(tmp_path: Path, machine: Any) -> None:
    async def share(session: Session) -> None:
        await share_seams(session, random_seams(seed=1))
        await share_seams(session, random_seams(seed=2), "faq")

    with_session(tmp_path / "place", share)
    folder = machine("second machine")

    async def find(session: Session) -> None:
        for tag, seed in (("", 1), ("faq", 2), ("", 1)):
            found = await find_seams(session, tag)
            assert found is not None
            assert found.to_bytes() == random_seams(seed=seed).to_bytes()
        assert await find_seams(session, "other") is None
        with pytest.raises(UnsupportedError, match="tag"):
            await find_seams(session, "a/b")

    with_session(tmp_path / "place", find)
    kept = list((folder / "seams").iterdir())
    assert len(kept) == 2
    assert {stat.S_IMODE(one.stat().st_mode) for one in kept} == {0o600}


def test_newer_ones_replace_what_is_kept(tmp_path: Path, machine: Any) -> None:
    async def share_and_find(session: Session) -> None:
        for seed in (1, 2):
            machine("first machine")
            await share_seams(session, random_seams(seed=seed))
            machine("second machine")
            found = await find_seams(session)
            assert found is not None
            assert found.to_bytes() == random_seams(seed=seed).to_bytes()

    with_session(tmp_path / "place", share_and_find)


def test_what_is_kept_serves_while_the_place_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(session: Session) -> None:
        await share_seams(session, random_seams())

        async def away(name: str) -> Any:
            raise StoreError("away")

        monkeypatch.setattr(session.places.names, "get", away)
        assert await find_seams(session) is not None
        assert await find_seams(session, "other") is None
        [path] = (tmp_path / "first machine" / "seams").iterdir()
        path.write_bytes(b"no seams")
        assert await find_seams(session) is None

    with_session(tmp_path / "place", test)


def test_only_a_holder_of_the_secret_names_seams(tmp_path: Path) -> None:
    async def share(session: Session) -> None:
        await share_seams(session, random_seams())

    with_session(tmp_path / "place", share)

    async def other(session: Session) -> None:
        assert await find_seams(session) is None
        name = home._name(session, "")
        forged = with_entry({}, name, SPEC.fingerprint, {"profile": "00" * 16}, b"?" * 32)
        await session.places.names.change(name, lambda _: forged)
        with pytest.raises(AuthenticityError):
            await find_seams(session)

    with_session(tmp_path / "place", other, credentials=Credentials(None, b"another one's", None))


async def name_bytes(session: Session, data: bytes, seams_id: bytes | None = None) -> None:
    """As a holder of the secret might."""
    seams_id = seams_id or home._digest(data)
    await session.places.profiles[0].put(seams_id, data, etag=seams_id, checksum=0)
    name, entry = home._name(session, ""), {"profile": seams_id.hex()}
    told = with_entry({}, name, SPEC.fingerprint, entry, session.namespace.seal_key)
    await session.places.names.change(name, lambda _: told)


def test_what_cannot_be_used_is_not_kept(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(session: Session) -> None:
        store = session.places.profiles[0]
        served: dict[bytes, bytes] = {}

        async def put(key: bytes, data: bytes, **_: Any) -> None:
            served[key] = data

        async def get(key: bytes, start: int, end: int) -> Any:
            from kdn.store.base import Entry, Span

            data = served[key][start:end]
            return Span(Entry(key, key, len(data)), 0, data)

        monkeypatch.setattr(store, "put", put)
        monkeypatch.setattr(store, "get", get)
        await name_bytes(session, b"no seams")
        with pytest.raises(FormatError, match="cannot be used"):
            await find_seams(session)
        await name_bytes(session, random_seams(model=b"?" * 16).to_bytes())
        with pytest.raises(MismatchError, match="cannot be used"):
            await find_seams(session)
        await name_bytes(session, random_seams().to_bytes(), b"?" * 16)
        with pytest.raises(ChecksumError, match="other bytes"):
            await find_seams(session)

    with_session(tmp_path / "place", test)
    assert not (tmp_path / "first machine" / "seams").exists()


@needs_nginx
def test_an_export_carries_them(tmp_path: Path, machine: Any) -> None:
    async def share(session: Session) -> None:
        await share_seams(session, random_seams(), "faq")

    with_session(tmp_path / "place", share)
    files = tmp_path / "files"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "place"), str(files)])
    assert done.exit_code == 0, done.output
    machine("second machine")

    async def find(session: Session) -> None:
        found = await find_seams(session, "faq")
        assert found is not None
        assert found.to_bytes() == random_seams().to_bytes()
        await share_seams(session, random_seams(seed=5))  # kept here, for nobody else
        assert await find_seams(session) is not None

    with start_web(files, tmp_path / "web") as web:
        with_session(web.url, find)
        assert not any(line.startswith(("PUT", "POST", "DELETE")) for line in web.requests())


def test_seams_of_this_machine_are_not_those_of_another_place(tmp_path: Path) -> None:
    """Without a secret, two tenants have the same names for them."""

    async def share(session: Session) -> None:
        await share_seams(session, random_seams())
        assert await find_seams(session) is not None

    async def other(session: Session) -> None:
        assert await find_seams(session) is None

    with_session(tmp_path / "one tenant's", share)
    with_session(tmp_path / "another's", other)
