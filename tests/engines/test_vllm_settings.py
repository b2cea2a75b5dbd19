"""Settings of the vLLM connector: what is unknown or of the wrong kind is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.credentials import Credentials
from kdn.engines.vllm.settings import Settings
from kdn.errors import UnsupportedError
from kdn.session.settings import SessionSettings


def test_defaults_and_kinds() -> None:
    settings = Settings.parse({"url": "http://a", "deadline_s": 2, "secret": "s3"})
    assert settings.session == SessionSettings(("http://a",), Credentials(secret=b"s3"))
    assert (settings.quality, settings.load_failure) == (0.001, "recompute")
    assert settings.deadline_s == 2.0
    assert Settings.parse({"url": ["http://a", "/b"]}).session.where == ("http://a", "/b")


def test_what_a_session_is_told() -> None:
    given = {"client": "c", "codec": "exact", "profile": "/p", "queue_bytes": 1, "spool_bytes": 0,
             "spool_folder": "/s", "host_bytes": 3, "host_folder": "/h"}  # fmt: skip
    told = Settings.parse({"url": "x", **given}).session
    found = {name: getattr(told, name) for name in given}
    assert found == given | {
        name: Path(given[name]) for name in ("profile", "spool_folder", "host_folder")
    }


@pytest.mark.parametrize(
    ("given", "engine", "publishes", "has_spool"),
    [
        ({}, {}, True, True),
        ({"publish": False}, {}, False, False),
        ({}, {"produces": False}, False, False),
        ({}, {"ranks": 2}, True, False),  # the scheduler
        ({}, {"ranks": 2, "rank": 0}, True, True),
        ({}, {"ranks": 2, "rank": 1}, True, False),
        ({"publish": False}, {"ranks": 2, "rank": 0}, False, False),
        ({"spool_bytes": 5}, {"consumes": False}, True, True),
    ],
)
def test_who_sends_nothing_has_no_spool(
    given: dict[str, Any], engine: dict[str, Any], publishes: bool, has_spool: bool
) -> None:
    settings = Settings.parse({"url": "x", **given})
    found = settings.for_engine(**{"consumes": True, "produces": True, "ranks": 1, **engine})
    assert found.publish == publishes
    assert found.load == engine.get("consumes", True)
    assert found.session.spool_bytes == (settings.session.spool_bytes if has_spool else 0)


@pytest.mark.parametrize(
    ("quality", "expected"), [("high", 0.001), ("exact", 0.0), ("draft", 0.03), (0.02, 0.02)]
)
def test_quality_is_a_word_or_a_number(quality: str | float, expected: float) -> None:
    assert Settings.parse({"url": "x", "quality": quality}).quality == expected
    loose = Settings.parse({"url": "x", "quality": 3600})
    assert loose.for_request({"kdn": {"quality": quality}}).quality == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, 'needs "url"'),
        ({"url": ""}, "url"),
        ({"url": []}, "url"),
        ({"url": 3}, "url"),
        ({"url": "x", "urll": 1}, "no setting 'urll'"),
        ({"url": "x", "deadline_s": "soon"}, "deadline_s"),
        ({"url": "x", "deadline_s": -1}, "deadline_s"),
        ({"url": "x", "deadline_s": float("inf")}, "deadline_s"),
        ({"url": "x", "quality": float("nan")}, "quality"),
        ({"url": "x", "quality": "best"}, "quality.*draft, default, high, exact"),
        ({"url": "x", "quality": True}, "quality"),
        ({"url": "x", "lookup_s": 0}, "lookup_s"),
        ({"url": "x", "spool_bytes": -1}, "spool_bytes"),
        ({"url": "x", "host_folder": ""}, "host_folder"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "x", "publish": 1}, "publish"),
        ({"url": "x", "queue_bytes": 0}, "queue_bytes"),
        ({"url": "x", "queue_bytes": True}, "queue_bytes"),
        ({"url": "x", "codec": "zip"}, "codec: expected klt"),
        ({"url": "x", "load_failure": "hide"}, "load_failure"),
    ],
)
def test_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        Settings.parse(given)


def test_credentials_from_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token, secret = tmp_path / "token", tmp_path / "secret"
    for path, content in ((token, "T0KEN\n"), (secret, "S3CRET\n")):
        path.write_text(content)
        path.chmod(0o600)
    given = {"url": "x", "token_file": str(token), "secret_file": str(secret), "tls_ca": "/ca"}
    settings = Settings.parse(given)
    assert settings.session.credentials == Credentials("T0KEN", b"S3CRET", "/ca")
    monkeypatch.setenv("KDN_CLIENT_TOKEN", "other")
    monkeypatch.setenv("KDN_CLIENT_SECRET_FILE", str(secret))
    settings = Settings.parse({"url": "x"})
    assert settings.session.credentials == Credentials("other", b"S3CRET")
    assert Settings.parse(given).session.credentials.token == "T0KEN"
    assert caplog.messages == []
    for name in ("token", "secret"):
        caplog.clear()
        assert Settings.parse({"url": "x", name: "PL4IN"})
        assert f"set {name}_file" in caplog.text
        assert f"KDN_CLIENT_{name.upper()}" in caplog.text
        assert "PL4IN" not in caplog.text


@pytest.mark.parametrize(
    "given",
    [{"token": ["PL4IN"]}, {"token": "PL4IN two"}, {"secret": ["PL4IN"]}, {"secret": "PL4IN" * 20},
     {"token": "PL4IN", "token_file": "/x"}, {"token_file": "/no/such"}, {"secret_file": 5},
     {"tls_ca": 5}],
)  # fmt: skip
def test_bad_credentials_are_refused_and_not_shown(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="|".join(given)) as caught:
        Settings.parse({"url": "x", **given})
    assert "PL4IN" not in str(caught.value)


def test_secrets_do_not_show() -> None:
    settings = Settings.parse({"url": "x", "token": "T0KEN", "secret": "S3CRET"})
    assert "T0KEN" not in repr(settings)
    assert "S3CRET" not in repr(settings)


def test_of_a_request() -> None:
    settings = Settings.parse({"url": "x"})
    assert settings.for_request(None) is settings
    assert settings.for_request({"other": 1}) is settings
    own = settings.for_request({"kdn": {"deadline_s": 1, "quality": 0.0001, "publish": False}})
    assert (own.deadline_s, own.quality, own.publish, own.load) == (1.0, 0.0001, False, True)
    for wrong in (
        {"url": "http://evil"}, {"deadline_s": 1e9}, {"secret": "x"}, {"allow_coarser": True}, 5,
    ):  # fmt: skip
        with pytest.raises(UnsupportedError):
            settings.for_request({"kdn": wrong})


def test_a_request_turns_nothing_on() -> None:
    settings = Settings.parse({"url": "x", "load": False, "publish": False})
    own = settings.for_request({"kdn": {"load": True, "publish": True}})
    assert (own.load, own.publish) == (False, False)


COARSE = {"kdn": {"quality": 3600, "deadline_s": 3600}}


def test_a_request_only_tightens() -> None:
    """Nor does it wait longer, with a salt or without: its load keeps others from their turn."""
    settings = Settings.parse({"url": "x", "quality": 0.01, "deadline_s": 5})
    for has_salt in (False, True):
        own = settings.for_request(COARSE, has_salt=has_salt)
        assert (own.quality, own.deadline_s) == (0.01, 5.0)
        own = settings.for_request({"kdn": {"quality": 0, "deadline_s": 0}}, has_salt=has_salt)
        assert (own.quality, own.deadline_s) == (0.0, 0.0)


def test_coarser_needs_the_operators_leave_and_a_salt() -> None:
    settings = Settings.parse({"url": "x", "allow_coarser": True})
    assert settings.for_request(COARSE).quality == 0.001
    own = settings.for_request(COARSE, has_salt=True)
    assert (own.quality, own.deadline_s) == (3600.0, 5.0)


def test_several_nodes_of_one_store_are_one_place() -> None:
    urls = "http://10.0.0.1:8470,http://10.0.0.2:8470"
    settings = Settings.parse({"url": urls, "resolve_s": 2})
    assert settings.session.where == (urls,)
    assert settings.session.resolve_s == 2.0
    for wrong in ({"url": "http://a,ftp://b"}, {"url": urls, "resolve_s": 0}):
        with pytest.raises(UnsupportedError):
            Settings.parse(wrong)


def test_what_is_stored_is_no_coarser_than_what_is_loaded() -> None:
    assert Settings.parse({"url": "x"}).session.stored_quality == "exact"
    own = Settings.parse({"url": "x", "quality": "default", "stored_quality": "default"})
    assert own.session.stored_quality == own.quality == 0.0035
    with pytest.raises(UnsupportedError, match="stored_quality"):
        Settings.parse({"url": "x", "stored_quality": "default"})
    with pytest.raises(UnsupportedError, match="stored_quality"):
        Settings.parse({"url": "x", "stored_quality": "best"})
    only_stores = Settings.parse({"url": "x", "stored_quality": "default", "load": False})
    assert only_stores.session.stored_quality == 0.0035
