"""One vLLM engine that answers prompts from its standard input: what `kdn bench vllm` times.

Run as a file by the interpreter that has vLLM, so it imports nothing of kdn: the settings are the
first line of standard input, every later line is a prompt, and every line of standard output an
answer, all in JSON. Whatever vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    started_s = time.perf_counter()
    llm = start(settings)
    _tell(answers, {"ready": True, "start_s": time.perf_counter() - started_s, **facts(llm)})
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        _tell(answers, answer(llm, str(number), asked["tokens"], asked["max_tokens"]))


def _tell(answers: TextIO, told: dict[str, Any]) -> None:
    answers.write(json.dumps(told) + "\n")


def start(settings: dict[str, Any]) -> Any:
    """An engine as the documentation of vLLM's CPU backend advises, with or without a connector."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if settings["transfer"] is not None:
        options["kv_transfer_config"] = KVTransferConfig(**settings["transfer"])
    return LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=settings["max_tokens"],
        max_num_batched_tokens=settings["max_tokens"],  # ExampleConnector stores one step's tokens
        disable_hybrid_kv_cache_manager=True,
        seed=0,
        **options,
    )


def facts(llm: Any) -> dict[str, Any]:
    import vllm

    cache = llm.llm_engine.vllm_config.cache_config
    return {"vllm": vllm.__version__, "block_tokens": cache.block_size}


def answer(llm: Any, name: str, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy; the time from handing the prompt over until its first token is back."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine = llm.llm_engine
    first_s, last = None, None
    started_s = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": tokens}, params)
    while engine.has_unfinished_requests():
        for last in engine.step():
            if first_s is None and last.outputs and last.outputs[0].token_ids:
                first_s = time.perf_counter() - started_s
    if first_s is None or last is None:
        return {"error": "no token came back"}
    return {
        "ttft_s": first_s,
        "total_s": time.perf_counter() - started_s,
        "hit_tokens": int(last.num_cached_tokens or 0),
        "tokens": list(last.outputs[0].token_ids),
    }


if __name__ == "__main__":
    main()
