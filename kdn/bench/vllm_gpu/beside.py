"""Eight requests that decode: alone, beside loads of others, and while kdn publishes what they
compute. All in one engine, one after the other, over and over, so that a drift shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from kdn.bench.vllm_engine import EngineProcess
from kdn.bench.vllm_gpu.measure import BESIDE_TOKENS, KdnBench, Task
from kdn.bench.vllm_gpu.streams import QUALITIES

DECODING = 8
PROMPT_TOKENS = 2048
LOADED_PROMPTS = (11, 12, 13, 14)
EVERY_S = 0.2
CALL_S = 120.0
ALONE, LOADS, SMALL, PUBLISHING = "alone", "beside loads", "beside short prompts", "publishing"
ORDER = (ALONE, LOADS, ALONE, SMALL, ALONE, PUBLISHING)
"""Short prompts load nothing: what a request costs the others without kdn. Each variant is compared
with the runs alone on both sides of it."""


def beside_runs(
    task: Task, bench: KdnBench, engine: EngineProcess, rounds: int, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """One after the other; prompts are new each time, else they would be known."""
    bench.fill({BESIDE_TOKENS: LOADED_PROMPTS})
    loads = [task.prompt(BESIDE_TOKENS, number) for number in LOADED_PROMPTS]
    for prompt in loads:
        bench.kept(engine, prompt, BESIDE_TOKENS, 3)
    variants = [*(ORDER * rounds), ALONE]
    for number, variant in enumerate(["warm-up", *variants]):
        prompts = [
            task.prompt(PROMPT_TOKENS, 1000 + DECODING * number + one) for one in range(DECODING)
        ]
        question = _question(task, variant, prompts, loads, max_tokens)
        run = engine.call(question, CALL_S)
        run |= engine.call({"do": "flush"}, CALL_S) if variant == PUBLISHING else {}
        if variant != "warm-up":
            yield {"variant": variant, "tokens_per_s": run["tokens"] / run["seconds"], **run}


def _question(
    task: Task, variant: str, prompts: Sequence[Any], loads: Sequence[Any], max_tokens: int
) -> dict[str, Any]:
    short = [task.prompt(0, number) for number in range(4)]
    others = {LOADS: list(loads), SMALL: short}.get(variant, [])
    quality = QUALITIES[3]
    return {
        "do": "beside", "prompts": list(prompts), "max_tokens": max_tokens, "every_s": EVERY_S,
        "kdn": {"load": False, "publish": variant == PUBLISHING}, "others": others,
        "other_kdn": {"quality": quality, "publish": False, "load": variant == LOADS},
    }  # fmt: skip


def shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By variant: of the speed alone, the mean and each run's own; how long the others waited."""
    found: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        around = (*runs[max(0, number - 1) : number], *runs[number + 1 : number + 2])
        near = [one["tokens_per_s"] for one in around if one["variant"] == ALONE]
        if run["variant"] != ALONE and near:
            found.setdefault(run["variant"], []).append(run["tokens_per_s"] / mean(near))
            waits.setdefault(run["variant"], []).extend(run["ttft_s"])
    return {
        variant: {
            "share": mean(every), "every": every,
            "ttft_s": median(waits[variant]) if waits[variant] else None,
        }
        for variant, every in found.items()
    }  # fmt: skip
