"""As vLLM runs by default: scheduler and worker in processes of their own, which the other tests do
not have, since they look into them. What the benchmark measures is here a test, on a small task."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from kdn.bench.vllm import make_task, measure
from kdn.bench.vllm_systems import LOOPBACK, KdnSystem


def test_one_engine_reads_and_another_loads(tmp_path: Path) -> None:
    task, _ = make_task("smollm2", None, context=700, documents=1, answer=4, seed=0)
    system = KdnSystem(sys.executable, shares_memory=False)
    [row] = measure(task, [system], [LOOPBACK], tmp_path, Console(stderr=True))
    assert row.answers[0]["hit_tokens"] == 640  # whole blocks of 128 of two chunks and a tail
    # A machine that is busy may ask for something twice.
    assert 2 * row.stored_bytes > row.moved_bytes[0] > 100_000
