"""Which model this is, and under which names a request's chunks are known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from kdn.cache.keys import Namespace
from kdn.cache.spec import ModelSpec
from kdn.errors import KdnError, ModelUnavailableError, UnsupportedError

logger = logging.getLogger(__name__)

FP8_CACHE = b"fp8_e4m3"


def spec_of_model(model_config: Any, load_config: Any = None) -> ModelSpec:
    """The spec of the model that vLLM loads, from its checkpoint."""
    from kdn.engines.checkpoint import spec_of_checkpoint

    config = model_config.hf_config if model_config.hf_overrides else None
    folder = _folder(model_config, getattr(load_config, "download_dir", None))
    _check_files(folder, str(getattr(load_config, "load_format", "auto")))
    return spec_of_checkpoint(folder, model_config.dtype, config)


def _check_files(folder: Path, load_format: str) -> None:
    """A second copy of the weights, in Mistral's own format, is what vLLM would load."""
    has_index = (folder / "model.safetensors.index.json").is_file()
    if any(folder.glob("consolidated*.safetensors")) and (load_format == "auto" or not has_index):
        raise UnsupportedError(
            f"{folder} has weights twice: vLLM loads consolidated*.safetensors, and kdn names the "
            "model after the others. Use --load-format safetensors, or move that copy away"
        )


def _folder(model_config: Any, download_dir: str | None) -> Path:
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelUnavailableError(
            f"{model_config.model} is not in the local cache: kdn names a model by its weights' "
            "files, so download it first"
        ) from error
    return Path(found)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter's files, as they were when it was first seen."""

    states: tuple[object, ...]
    digest: bytes


class Identity:
    """Names requests' chunks. Whatever changes a cache's values is in the name."""

    def __init__(self, namespace: Namespace, *, is_fp8: bool = False) -> None:
        """`is_fp8`: every token is computed from a cache of 8 bit, so its values are others."""
        self._namespace = namespace.with_cache(FP8_CACHE) if is_fp8 else namespace
        self._adapters: dict[int | str, Adapter | None] = {}
        """By id and by name. None: refused for good."""

    def of(self, request: Any) -> Namespace:
        """UnsupportedError where kdn has no name for what changes the values. Cheap but for the
        first request with an adapter: what is named so may change while a request lives."""
        return self.under(request, request.cache_salt)

    def under(self, request: Any, salt: str | None) -> Namespace:
        """The same, whatever its cache salt is by now."""
        if request.mm_features:
            raise UnsupportedError("a prompt with images or other media")
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            raise UnsupportedError("a prompt given as embeddings")
        namespace = self._namespace
        if salt:
            namespace = namespace.with_salt(salt.encode())
        if request.lora_request is not None:
            namespace = namespace.with_lora(self._adapter(request.lora_request))
        return namespace

    def _adapter(self, lora: Any) -> bytes:
        """vLLM loads an adapter once and keeps its weights under its id, and the blocks computed
        with them under its name, whatever happens to its files. So both stand for the files of the
        first time; if those have changed, nobody knows which of them vLLM has."""
        marks = (lora.lora_int_id, lora.lora_name)
        try:
            now = self._seen(
                lora, [self._adapters[mark] for mark in marks if mark in self._adapters]
            )
        except (KdnError, OSError):
            self._adapters |= dict.fromkeys(marks)
            raise
        self._adapters |= dict.fromkeys(marks, now)
        return now.digest

    def _seen(self, lora: Any, before: Sequence[Adapter | None]) -> Adapter:
        files = _files(Path(lora.lora_path))
        states = _states(files)
        if any(one is None or one.states != states for one in before):
            raise UnsupportedError(
                f"the LoRA adapter {lora.lora_name} ({lora.lora_int_id}): its files are not those "
                "that it had when this engine first used it, or could not be read then"
            )
        if before:
            assert before[0] is not None
            return before[0]
        adapter = Adapter(states, _digest(files))
        if _states(files) != states:
            raise UnsupportedError(
                f"a LoRA adapter whose files are being written: {lora.lora_name}"
            )
        return adapter


def _files(folder: Path) -> list[Path]:
    files = [folder / "adapter_config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise UnsupportedError(f"a LoRA adapter without safetensors files in {folder}")
    return files


def _states(files: Sequence[Path]) -> tuple[object, ...]:
    """Equal as long as nobody has written to these files: nobody can set when a file's own record
    last changed (`ctime`), as copying tools do with the time of its contents."""
    return tuple(
        (str(file), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        for file in files
        for about in (file.stat(),)
    )


def _digest(files: Sequence[Path]) -> bytes:
    """Of an adapter's weights and settings. Their paths and names do not count."""
    digest = blake2b(digest_size=16, person=b"kdn-lora")
    for path in files:
        with path.open("rb") as file:
            digest.update(file_digest(file, "blake2b").digest())
    return digest.digest()
