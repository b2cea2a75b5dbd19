"""A manifest's entry is what a holder of the secret wrote, for this name and model, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from kdn.errors import AuthenticityError, FormatError
from kdn.places.manifests import entry_of, with_entry

KEY, MODEL = b"k" * 32, b"m" * 16
ENTRY = {"profile": "00", "tokens": [1, 2, 3], "style": "plain"}


def sealed() -> dict[str, Any]:
    return with_entry({"about": "x"}, "handbook", MODEL, ENTRY, KEY)


def test_reads_what_was_written() -> None:
    assert entry_of(sealed(), "handbook", MODEL, KEY) == ENTRY
    assert entry_of(sealed(), "handbook", b"n" * 16, KEY) is None
    assert entry_of({}, "handbook", MODEL, KEY) is None


def test_entries_of_other_models_stay() -> None:
    both = with_entry(sealed(), "handbook", b"n" * 16, {"tokens": [4]}, b"another's")
    assert entry_of(both, "handbook", MODEL, KEY) == ENTRY
    assert entry_of(both, "handbook", b"n" * 16, b"another's") == {"tokens": [4]}
    assert both["about"] == "x"


@pytest.mark.parametrize("change", [{"tokens": [1, 2, 4]}, {"profile": "01"}, {"more": 1}])
def test_a_changed_entry_is_refused(change: dict[str, Any]) -> None:
    manifest = sealed()
    manifest["models"][MODEL.hex()] |= change
    with pytest.raises(AuthenticityError, match="handbook"):
        entry_of(manifest, "handbook", MODEL, KEY)


@pytest.mark.parametrize("seal", [None, 5, "", "00" * 16, "\u00fc" * 32, "\ud800"])
def test_a_wrong_seal_is_refused(seal: object) -> None:
    manifest = sealed()
    manifest["models"][MODEL.hex()]["seal"] = seal
    with pytest.raises(AuthenticityError):
        entry_of(manifest, "handbook", MODEL, KEY)


def test_an_entry_is_of_its_name_model_and_secret() -> None:
    manifest = sealed()
    with pytest.raises(AuthenticityError):
        entry_of(manifest, "another-name", MODEL, KEY)
    with pytest.raises(AuthenticityError):
        entry_of(manifest, "handbook", MODEL, b"another's")
    manifest["models"]["00" * 16] = manifest["models"][MODEL.hex()]
    with pytest.raises(AuthenticityError):
        entry_of(manifest, "handbook", bytes(16), KEY)


@pytest.mark.parametrize("models", [[], "x", {MODEL.hex(): []}])
def test_what_is_no_manifest_is_refused(models: object) -> None:
    with pytest.raises(FormatError):
        entry_of({"models": models}, "handbook", MODEL, KEY)
