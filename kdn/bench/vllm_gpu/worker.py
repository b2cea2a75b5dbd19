"""One vLLM engine on a GPU that does what it is told on its standard input, and times it.

Run as a file by the interpreter that has vLLM, so it imports nothing of kdn: the settings are the
first line of standard input, every later line is a call of one of `Engine`'s methods, and every
line of standard output what came of it, all in JSON. Whatever vLLM prints goes to standard error.

The engine runs in this process and its loop is here: so a request's first token is seen in the
step that made it, and other requests can be sent at given times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

SETTLE_S = 30.0
MAX_ENDS = 32
"""Of the last steps before a first token: when each ended is told, to see what was waited for."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    started_s = time.perf_counter()
    engine = Engine(settings)
    _tell(answers, {"ready": True, "start_s": time.perf_counter() - started_s, **engine.facts()})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = getattr(engine, asked.pop("do"))(**asked)
        except Exception as error:
            told = {"error": repr(error)}
        _tell(answers, told)
    engine.close()


def _tell(answers: TextIO, told: dict[str, Any]) -> None:
    answers.write(json.dumps(told) + "\n")


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        """`engine`: vLLM's own settings; `transfer`: its kv_transfer_config, or None."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._used_before = _used_bytes()
        options: dict[str, Any] = dict(settings["engine"])
        if settings["transfer"] is not None:
            options["kv_transfer_config"] = KVTransferConfig(**settings["transfer"])
        self._llm = LLM(skip_tokenizer_init=True, seed=0, **options)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._caches = bool(options["enable_prefix_caching"])
        self._number = 0

    def facts(self) -> dict[str, Any]:
        import vllm

        cache = self._engine.vllm_config.cache_config
        scheduling = self._engine.vllm_config.scheduler_config
        return {
            "vllm": vllm.__version__,
            "block_tokens": cache.block_size,
            "blocks": cache.num_gpu_blocks,
            "batch_tokens": scheduling.max_num_batched_tokens,
        }

    # time to first token

    def ask(
        self,
        tokens: list[int],
        repeats: int = 1,
        max_tokens: int = 1,
        limit_s: float = 60.0,
        kdn: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The first token of the same prompt, several times, with nothing in vLLM's own prefix
        cache. After `limit_s`, and two answers, it ends early."""
        began_s, answers = time.monotonic(), list[dict[str, Any]]()
        for _ in range(repeats):
            self.settle()
            before = self._counts()
            answers.append(self._timed(tokens, max_tokens, kdn))
            answers[-1]["counts"] = dict(self._counts() - before)
            if time.monotonic() - began_s > limit_s and len(answers) >= 2:
                break
        self.settle()
        return {"answers": answers}

    def _timed(
        self, tokens: list[int], max_tokens: int, kdn: dict[str, Any] | None
    ) -> dict[str, Any]:
        started_s = time.perf_counter()
        name = self._add(tokens, max_tokens, kdn)
        ends_ms = [1000 * (time.perf_counter() - started_s)]
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            ends_ms.append(round(1000 * (time.perf_counter() - started_s), 2))
            for told in outputs:
                if told.request_id == name and told.outputs and told.outputs[0].token_ids:
                    return {
                        "ttft_s": time.perf_counter() - started_s,
                        "hit_tokens": int(told.num_cached_tokens or 0),
                        "token": int(told.outputs[0].token_ids[0]),
                        "ends_ms": ends_ms[-MAX_ENDS:],
                    }
        raise RuntimeError("no token came back")

    def settle(self) -> dict[str, Any]:
        """Until vLLM has ended what goes on behind answers, and has forgotten all prompts. Its
        connectors keep theirs (`reset_connector` is false)."""
        until_s = time.monotonic() + SETTLE_S
        while self._scheduler.requests or self._scheduler.has_finished_requests():
            self._engine.step()
            if time.monotonic() > until_s:
                raise RuntimeError("requests do not end")
        while self._caches and not self._llm.reset_prefix_cache():
            self._engine.step()
            if time.monotonic() > until_s:
                raise RuntimeError("vLLM's prefix cache is not emptied")
            time.sleep(0.01)
        return {}

    def _add(self, tokens: list[int], max_tokens: int, kdn: dict[str, Any] | None) -> str:
        from vllm import SamplingParams

        self._number += 1
        name = str(self._number)
        extra = {"kv_transfer_params": {"kdn": kdn}} if kdn else None
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            extra_args=extra,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    # requests beside others

    def beside(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        kdn: dict[str, Any] | None = None,
        others: Sequence[list[int]] = (),
        every_s: float = 0.2,
        other_kdn: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Tokens a second of requests that decode, from where all have begun until one ends;
        meanwhile one of the others is sent every so often, for one token."""
        self.settle()
        before = self._counts()
        lengths = {self._add(tokens, max_tokens, kdn): 0 for tokens in prompts}
        while not all(lengths.values()):
            self._step(lengths, {}, [])
        made, began_s = sum(lengths.values()), time.perf_counter()
        sent: dict[str, float] = {}
        ttft_s: list[float] = []
        now_s, steps, number = began_s, 0, 0
        while max(lengths.values()) < max_tokens:
            if others and now_s >= began_s + number * every_s:
                sent[self._add(others[number % len(others)], 1, other_kdn)] = now_s
                number += 1
            self._step(lengths, sent, ttft_s)
            now_s, steps = time.perf_counter(), steps + 1
        made = sum(lengths.values()) - made
        while self._engine.has_unfinished_requests():
            self._step(lengths, sent, ttft_s)
        self.settle()
        return {
            "tokens": made, "seconds": now_s - began_s, "steps": steps, "sent": number,
            "ttft_s": ttft_s, "counts": dict(self._counts() - before),
        }  # fmt: skip

    def _step(self, lengths: dict[str, int], sent: dict[str, float], ttft_s: list[float]) -> None:
        for told in self._engine.step():
            count = len(told.outputs[0].token_ids) if told.outputs else 0
            if told.request_id in lengths:
                lengths[told.request_id] = count
            elif count and told.request_id in sent:
                ttft_s.append(time.perf_counter() - sent.pop(told.request_id))

    # kdn's own

    def _counts(self) -> Counter[str]:
        """What kdn's connector has counted, if there is one."""
        found: Counter[str] = Counter()
        for side in self._kdn_sides():
            found.update(side.counts)
        return found

    def _kdn_sides(self) -> list[Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connector = self._scheduler.connector
        if connector is None or type(connector).__name__ != "KdnConnector":
            return []
        worker = get_kv_transfer_group()._worker if has_kv_transfer_group() else None
        return [side for side in (connector._scheduler, worker) if side is not None]

    def flush(self, limit_s: float = 60.0) -> dict[str, Any]:
        """Until all that kdn publishes is published."""
        publisher = self._scheduler.connector._shared.session.publisher
        began_s = time.monotonic()
        time.sleep(0.05)
        while publisher._under_way and time.monotonic() < began_s + limit_s:
            time.sleep(0.02)
        took_s, left = time.monotonic() - began_s, bool(publisher._under_way)
        return {"flush_s": took_s, "left": left, "published": dict(vars(publisher.counts))}

    def memory(self) -> dict[str, Any]:
        """Bytes on the GPU: what it has taken since this engine began, what of that PyTorch holds,
        and what kdn says it holds; and what kdn says it has pinned in main memory."""
        import torch

        told: dict[str, Any] = {}
        if torch.cuda.is_available():
            told = {
                "used_bytes": _used_bytes() - self._used_before,
                "torch_bytes": torch.cuda.memory_allocated(),
                "reserved_bytes": torch.cuda.memory_reserved(),
            }
        if self._kdn_sides():
            codec = self._scheduler.connector._shared.session.codec
            told["kdn_bytes"], told["pinned_bytes"] = codec.gpu_memory_bytes()
        return told

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _used_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    free, whole = torch.cuda.mem_get_info()
    return int(whole - free)


if __name__ == "__main__":
    main()
