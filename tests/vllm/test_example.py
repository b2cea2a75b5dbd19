"""examples/vllm_offline.py in a real vLLM: a second engine knows what the first has read."""

from __future__ import annotations

import os
import subprocess
import sys

from kdn.engines.models import smollm2_folder
from tests.vllm.harness import ENVIRONMENT, ROOT, START_S, Node, python_path

CODE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
settings = dict(host_bytes=0, dtype="float32", enforce_eager=True, max_model_len=1024)
known, text = module.main(sys.argv[2], sys.argv[3], 4, **settings)
print("known", known)
"""


def run(url: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(ROOT / "examples" / "vllm_offline.py"), url,
         str(smollm2_folder())],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path()}, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("known ")]
    return int(line.split()[1])


def test_a_second_engine_knows_what_the_first_has_read(node: Node) -> None:
    assert run(node.url) == 0
    assert run(node.url) >= 256
