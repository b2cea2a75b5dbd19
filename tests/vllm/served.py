"""vLLM's OpenAI server in a process of its own, for a tiny model with a tokenizer of bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdn.bench.servers import free_port
from tests.vllm.harness import ENVIRONMENT, ROOT, python_path

START_S = 180.0
TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}[{{ one.role }}]{{ one.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def bytes_tokenizer(folder: Path) -> None:
    """Each byte is a token; beside a tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {one: n for n, one in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    fast.save_pretrained(folder)


class Served:
    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process, self._log = process, log

    def wait(self) -> None:
        until_s = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < until_s:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1.0):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self._log.read_text("utf-8", "replace")[-6000:])

    def post(self, path: str, **body: Any) -> tuple[int, bytes]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60.0) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """A greedy answer of 12 tokens."""
        options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        status, said = self.post(path, **options, **body)
        assert status == 200, said
        told: dict[str, Any] = json.loads(said)
        return told

    def count(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        found = [one for one in lines if one.startswith(f"kdn_vllm_{name}_total")]
        return sum(float(one.split()[-1]) for one in found if "_created" not in one)


@contextmanager
def serving(model: Path, log: Path, transfer: dict[str, Any]) -> Iterator[Served]:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--served-model-name", "m",
        "--max-model-len", "1024", "--api-server-count", "1",
        "--middleware", "kdn.engines.vllm.middleware.KdnMiddleware",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path()},
        )  # fmt: skip
    try:
        served = Served(port, process, log)
        served.wait()
        yield served
    finally:
        process.terminate()
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
