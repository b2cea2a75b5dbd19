"""Settings of the vLLM connector: what is unknown or of the wrong kind is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kdn.engines.vllm.settings import Settings
from kdn.errors import UnsupportedError


def test_defaults_and_kinds() -> None:
    settings = Settings.parse({"url": "http://a", "deadline_s": 2, "secret": "s3"})
    assert (settings.codec, settings.quality, settings.load_failure) == ("klt", 0.001, "recompute")
    assert (settings.deadline_s, settings.secret) == (2.0, b"s3")
    assert Settings.parse({"url": ["http://a", "/b"]}).url == ("http://a", "/b")


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
        ({"url": "x", "publish": 1}, "publish"),
        ({"url": "x", "queue_bytes": 0}, "queue_bytes"),
        ({"url": "x", "queue_bytes": True}, "queue_bytes"),
        ({"url": "x", "codec": "zip"}, "no codec 'zip'"),
        ({"url": "x", "load_failure": "hide"}, "load_failure"),
    ],
)
def test_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        Settings.parse(given)


def test_secrets_do_not_show() -> None:
    settings = Settings.parse({"url": "x", "token": "T0KEN", "secret": "S3CRET"})
    assert "T0KEN" not in repr(settings)
    assert "S3CRET" not in repr(settings)


def test_of_a_request() -> None:
    settings = Settings.parse({"url": "x"})
    assert settings.for_request(None) is settings
    assert settings.for_request({"other": 1}) is settings
    own = settings.for_request({"kdn": {"deadline_s": 1, "quality": 0.1, "publish": False}})
    assert (own.deadline_s, own.quality, own.publish, own.load) == (1.0, 0.1, False, True)
    for wrong in ({"url": "http://evil"}, {"deadline_s": 1e9}, {"secret": "x"}, 5):
        with pytest.raises(UnsupportedError):
            settings.for_request({"kdn": wrong})


def test_a_request_turns_nothing_on() -> None:
    settings = Settings.parse({"url": "x", "load": False, "publish": False})
    own = settings.for_request({"kdn": {"load": True, "publish": True}})
    assert (own.load, own.publish) == (False, False)
