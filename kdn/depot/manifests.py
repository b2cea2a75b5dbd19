"""Manifests as a depot sees them: which chunks one uses."""

from __future__ import annotations

from kdn.errors import MalformedError
from kdn.protocol.limits import MAX_MANIFEST_KEYS
from kdn.protocol.strict import parse_hex, parse_object


def chunks_of(manifest: bytes) -> set[bytes]:
    """The chunk keys a manifest names, the one thing that is read of it."""
    return {chunk for chunks in models_of(manifest).values() for chunk in chunks}


def models_of(manifest: bytes) -> dict[str, list[bytes]]:
    """The same in order, by the fingerprint of the model they are for."""
    models = parse_object(manifest).get("models", {})
    if not isinstance(models, dict):
        raise MalformedError("models: expected an object")
    found: dict[str, list[bytes]] = {}
    num_chunks = 0
    for fingerprint, model in models.items():
        parse_hex("models: a fingerprint", fingerprint)
        if not isinstance(model, dict) or not isinstance(model.get("chunks", []), list):
            raise MalformedError(f"models.{fingerprint}: expected an object with a list of chunks")
        if "profile" in model:
            parse_hex(f"models.{fingerprint}.profile", model["profile"])
        keys = model.get("chunks", [])
        num_chunks += len(keys)
        if num_chunks > MAX_MANIFEST_KEYS:
            raise MalformedError(f"expected at most {MAX_MANIFEST_KEYS} chunks in a manifest")
        found[fingerprint] = [parse_hex("a chunk key", key) for key in keys]
    return found
