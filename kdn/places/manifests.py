"""What a name says of one model, sealed: only a holder of the tenant's secret can have written it.

A manifest holds an entry for each model. Its text, as token ids, becomes part of prompts, and the
profile that it names decides what streams decode to: whoever could change either could put words
into a model's mouth. So each entry carries a seal over itself, its name and its model. Names are
versioned by their node: that an entry is the newest one, a seal cannot tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from kdn.errors import AuthenticityError, FormatError

Manifest = dict[str, Any]
Entry = dict[str, Any]

SEAL_BYTES = 16


def with_entry(
    manifest: Manifest, name: str, model: bytes, entry: Entry, seal_key: bytes
) -> Manifest:
    """The manifest with this sealed entry for the model; those of other models stay."""
    sealed = {**entry, "seal": _seal(name, model, entry, seal_key)}
    return {**manifest, "models": {**_models(manifest), model.hex(): sealed}}


def entry_of(manifest: Manifest, name: str, model: bytes, seal_key: bytes) -> Entry | None:
    """What it says of this model; None if nothing, AuthenticityError if nobody who may has."""
    entry = _models(manifest).get(model.hex())
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise FormatError(f"the manifest of {name!r}: expected an object for each model")
    told = {key: value for key, value in entry.items() if key != "seal"}
    seal = entry.get("seal")
    expected = _seal(name, model, told, seal_key)
    if not (isinstance(seal, str) and seal.isascii() and compare_digest(seal, expected)):
        raise AuthenticityError(
            f"no holder of this secret has written the manifest of {name!r}: it was learned with "
            "another secret, or changed by somebody else. Learn it again"
        )
    return told


def _models(manifest: Manifest) -> Mapping[str, Any]:
    models = manifest.get("models", {})
    if not isinstance(models, dict):
        raise FormatError("a manifest: expected an object of models")
    return models


def _seal(name: str, model: bytes, entry: Entry, seal_key: bytes) -> str:
    told = json.dumps([name, model.hex(), entry], sort_keys=True, separators=(",", ":"))
    digest = blake2b(told.encode(), digest_size=SEAL_BYTES, key=seal_key, person=b"kdn-name")
    return digest.hexdigest()
