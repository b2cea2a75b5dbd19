"""Names and manifests as a depot sees them: which names there can be, and which chunks one uses."""

from __future__ import annotations

import re

from kdn.checked import shown
from kdn.errors import MalformedError, UnsupportedError
from kdn.protocol.limits import MAX_MANIFEST_KEYS
from kdn.protocol.strict import parse_hex, parse_object

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_PART = re.compile(r"[A-Za-z0-9._-]{0,128}")
EXPECTED = "expected a name of 1 to 128 letters, digits, '.', '_', '-'"


def is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not is_name(name):
        raise UnsupportedError(f"{EXPECTED}, found {shown(name)}")
    return name


def chunks_of(manifest: bytes) -> set[bytes]:
    """The chunk keys a manifest names, the one thing that is read of it."""
    models = parse_object(manifest).get("models", {})
    if not isinstance(models, dict):
        raise MalformedError("models: expected an object")
    chunks: list[bytes] = []
    for fingerprint, model in models.items():
        parse_hex("models: a fingerprint", fingerprint)
        if not isinstance(model, dict) or not isinstance(model.get("chunks", []), list):
            raise MalformedError(f"models.{fingerprint}: expected an object with a list of chunks")
        if "profile" in model:
            parse_hex(f"models.{fingerprint}.profile", model["profile"])
        keys = model.get("chunks", [])
        if len(chunks) + len(keys) > MAX_MANIFEST_KEYS:
            raise MalformedError(f"expected at most {MAX_MANIFEST_KEYS} chunks in a manifest")
        chunks += (parse_hex("a chunk key", key) for key in keys)
    return set(chunks)
