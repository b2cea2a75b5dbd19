"""Which model this is, and under which names a request's chunks are known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from kdn.cache.keys import Namespace
from kdn.cache.spec import ModelSpec
from kdn.errors import ModelUnavailableError, UnsupportedError

logger = logging.getLogger(__name__)


def spec_of_model(model_config: Any) -> ModelSpec:
    """The spec of the model that vLLM loads, from its checkpoint."""
    from kdn.engines.checkpoint import spec_of_checkpoint

    config = model_config.hf_config if model_config.hf_overrides else None
    return spec_of_checkpoint(_folder(model_config), model_config.dtype, config)


def _folder(model_config: Any) -> Path:
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model_config.model, revision=model_config.revision, local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        raise ModelUnavailableError(
            f"{model_config.model} is not in the local cache: kdn names a model by its weights' "
            "files, so download it first"
        ) from error
    return Path(found)


class Identity:
    """Names requests' chunks. Whatever changes a cache's values is in the name."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._adapters: dict[object, bytes] = {}

    def of(self, request: Any) -> Namespace:
        """UnsupportedError where kdn has no name for what changes the values."""
        if request.mm_features:
            raise UnsupportedError("a prompt with images or other media")
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            raise UnsupportedError("a prompt given as embeddings")
        namespace = self._namespace
        if request.cache_salt:
            namespace = namespace.with_salt(request.cache_salt.encode())
        if request.lora_request is not None:
            namespace = namespace.with_lora(self._adapter(request.lora_request))
        return namespace

    def _adapter(self, lora: Any) -> bytes:
        """Read again when its files have changed: an adapter may be trained on in its place."""
        files = _files(Path(lora.lora_path))
        states = [(str(file), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
        key = tuple(states)
        if key not in self._adapters:
            self._adapters[key] = _digest(files)
        return self._adapters[key]


def _files(folder: Path) -> list[Path]:
    files = [folder / "adapter_config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise UnsupportedError(f"a LoRA adapter without safetensors files in {folder}")
    return files


def _digest(files: Sequence[Path]) -> bytes:
    """Of an adapter's weights and settings. Their paths and names do not count."""
    digest = blake2b(digest_size=16, person=b"kdn-lora")
    for path in files:
        with path.open("rb") as file:
            digest.update(file_digest(file, "blake2b").digest())
    return digest.digest()
