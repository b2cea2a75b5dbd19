"""What the vLLM tests need: engines and nodes in processes of their own, prompts, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdn.bench.servers import free_port

ROOT = Path(__file__).parents[2]
START_S = 300.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def connector(url: str, **settings: Any) -> dict[str, Any]:
    """As in `--kv-transfer-config`; what is decoded is not shared with other engines, and what a
    dead node does not take is not left on disk."""
    defaults = {"deadline_s": 60.0, "lookup_s": 5.0, "host_bytes": 0, "spool_bytes": 0}
    return {
        "kv_connector": "KdnConnector",
        "kv_connector_module_path": "kdn.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": url, **defaults, **settings},
    }


def python_path() -> str:
    """This code, and wherever else vLLM was found."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Engine:
    """`engine.generate(...)` and all else that `engine.Server` has."""

    def __init__(self, log: Path, environ: dict[str, str] | None = None, **settings: Any) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine.py")),
                 str(ours[0]), str(theirs[1])],
                pass_fds=(ours[0], theirs[1]), stdout=file, stderr=file, cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **(environ or {}), "PYTHONPATH": python_path()},
            )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._asks, self._answers = os.fdopen(ours[1], "w"), os.fdopen(theirs[0])
        self._send(settings)
        self._receive()

    def __getattr__(self, name: str) -> Any:
        def call(**given: Any) -> Any:
            self.begin(name, **given)
            return self.end()

        return call

    def begin(self, name: str, **given: Any) -> None:
        self._send([name, given])

    def end(self) -> Any:
        answer = self._receive()
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self._tail()}")
        return answer["answer"]

    def _send(self, message: Any) -> None:
        print(json.dumps(message), file=self._asks, flush=True)

    def _receive(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise AssertionError(f"vLLM has ended\n{self._tail()}")
        return json.loads(line)

    def _tail(self) -> str:
        return self.log.read_text("utf-8", "replace")[-4000:]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._asks.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._answers.close()


class Node:
    """`kdn node`, which can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", "from kdn.cli.main import main; main()", "node"]
        command += ["--port", str(self._port), "--data", str(self._folder)]
        with self._folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": python_path()},
            )  # fmt: skip
        until_s = time.monotonic() + 60.0
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=1.0):
                    return
            except OSError:
                assert time.monotonic() < until_s, "the node did not start"
                time.sleep(0.1)

    def kill(self) -> None:
        """As a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v1/stats", timeout=10.0) as answer:
            told: dict[str, Any] = json.loads(answer.read())
            return told


@contextmanager
def running_node(folder: Path) -> Iterator[Node]:
    node = Node(folder)
    try:
        yield node
    finally:
        node.kill()


TINY_VOCAB, TINY_HIDDEN, TINY_LAYERS = 512, 128, 4


def tiny_model(folder: Path, seed: int = 1, kv_heads: int = 2) -> str:
    """Random, with weights larger than at usual initialisation, so that attention is not uniform:
    what it says depends on every token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCAB, hidden_size=TINY_HIDDEN, intermediate_size=256,
        num_hidden_layers=TINY_LAYERS, num_attention_heads=4, num_key_value_heads=kv_heads,
        head_dim=32, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * 0.15 if parameter.ndim > 1 else 1 + noise * 0.3)
    model.save_pretrained(folder)
    return str(folder)


def tiny_adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter of the tiny model, which changes its keys."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.{}.self_attn.k_proj.lora_{}.weight"
    weights = {}
    for layer in range(TINY_LAYERS):
        weights[name.format(layer, "A")] = torch.randn(8, TINY_HIDDEN, generator=generator) * 0.1
        weights[name.format(layer, "B")] = torch.randn(64, 8, generator=generator) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}))
    return str(folder)


def documents(number: int, num_tokens: int) -> list[list[int]]:
    """Real text, other for each document, as SmolLM2's tokens: Python's topics, or the file that
    KDN_TEST_TEXT names."""
    from transformers import AutoTokenizer

    from kdn.calibrate.corpus import default_texts, load_text
    from kdn.engines.models import smollm2_folder

    own = os.environ.get("KDN_TEST_TEXT")
    text = load_text(Path(own)) if own else default_texts()[0]
    tokens = text.tokens(AutoTokenizer.from_pretrained(smollm2_folder())).tolist()
    assert len(tokens) >= number * num_tokens
    return [tokens[i * num_tokens : (i + 1) * num_tokens] for i in range(number)]


def questions() -> list[list[int]]:
    from transformers import AutoTokenizer

    from kdn.engines.models import smollm2_folder

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    asked = ["What is this text about?", "Which words are important?", "Give an example.",
             "Summarise it in one sentence.", "What comes next?"]  # fmt: skip
    return [tokenizer(f"\n\nQuestion: {text}\nAnswer:")["input_ids"] for text in asked]
