"""A real vLLM in a process of its own, told what to do in JSON lines. Run by `harness.py`."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any


class Server:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        defaults = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False}
        self.llm = LLM(seed=0, **{**defaults, **settings})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 16, **options: Any
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        salt = options.pop("salt", None)
        lora = self._lora(options.pop("lora", None))
        if scores := options.pop("scores", False):
            options["prompt_logprobs"] = 0
        params = options.pop("kdn", None)
        extra = {"kv_transfer_params": {"kdn": params}} if params else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **options
        )
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        began_s = time.monotonic()
        outputs = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return {
            "scores": [self._of_prompt(output) for output in outputs] if scores else None,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
            "took_s": time.monotonic() - began_s,
        }

    def generate_each(self, asked: list[dict[str, Any]], max_tokens: int = 16) -> dict[str, Any]:
        """Many at once, each with its own `prompt`, and `kdn` and `salt` if it has them."""
        from vllm import SamplingParams

        def sampling(one: dict[str, Any]) -> Any:
            extra = {"kv_transfer_params": {"kdn": one["kdn"]}} if one.get("kdn") else None
            return SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra,
                detokenize=False,
            )  # fmt: skip

        prompts = [
            {"prompt_token_ids": one["prompt"],
             **({"cache_salt": one["salt"]} if one.get("salt") else {})}
            for one in asked
        ]  # fmt: skip
        outputs = self.llm.generate(prompts, [sampling(one) for one in asked], use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
        }

    def expected_next(self, asked: dict[str, Any]) -> list[float]:
        """How probable the model finds each token behind a prompt, as logarithms."""
        model = self.core.model_executor.driver_worker.worker.model_runner.model
        seen, original = [], model.compute_logits

        def compute_logits(hidden: Any, *rest: Any) -> Any:
            seen.append(original(hidden, *rest))
            return seen[-1]

        model.compute_logits = compute_logits
        try:
            self.generate_each([asked], 1)
        finally:
            model.compute_logits = original
        found: list[float] = seen[-1][-1].float().log_softmax(-1).tolist()
        return found

    def loaded_values(self, asked: dict[str, Any], path: str) -> int:
        """Has a prompt loaded, and writes what its blocks hold then to a file; how many tokens
        that are."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker, orders = get_kv_transfer_group()._worker, []
        begin = worker.loader.begin
        worker.loader.begin = lambda order: (orders.append(order), begin(order))
        try:
            self.generate_each([asked], 1)
        finally:
            worker.loader.begin = begin
        [order] = orders
        values = worker._paged.read(0, order.end, order.block_ids)
        torch.save((values.keys, values.values), path)
        return int(order.end)

    @staticmethod
    def _of_prompt(output: Any) -> list[float]:
        """How probable the model finds each token of the prompt but the first."""
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [probable[token].logprob for token, probable in pairs]

    @staticmethod
    def _lora(given: list[Any] | None) -> Any:
        from vllm.lora.request import LoRARequest

        return None if given is None else LoRARequest(*given)

    def keep_hits(self) -> None:
        """From now on vLLM's scheduler takes every hit that the connector reports, as those before
        0.32 do, even for requests that must not read a cache."""
        connector = self.scheduler.connector
        matched = connector.get_num_new_matched_tokens

        def matched_and_kept(request: Any, num_computed_tokens: int) -> Any:
            found = matched(request, num_computed_tokens)
            request.skip_reading_prefix_cache = False
            return found

        connector.get_num_new_matched_tokens = matched_and_kept

    def load_weights(self, folder: str) -> None:
        """Others, in the running engine, as reinforcement learning does."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def change_weights(self) -> None:
        """In their place."""

        def change(model: Any) -> None:
            for parameter in model.parameters():
                parameter.data.mul_(1.05)

        self.llm.apply_model(change)

    def abandon(self, prompts: list[list[int]], steps: int) -> int:
        """Begins these and gives all up after a few steps; how many were unfinished then."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=100, detokenize=False)
        names = [
            engine.add_request(f"abandoned-{number}", {"prompt_token_ids": prompt}, sampling)
            for number, prompt in enumerate(prompts)
        ]
        for _ in range(steps):
            engine.step()
        unfinished = engine.get_num_unfinished_requests()
        engine.abort_request(names, internal=True)
        until_s = time.monotonic() + 60.0
        while self.scheduler.requests and time.monotonic() < until_s:
            engine.step()
        assert not self.scheduler.requests, "abandoned requests stay"
        return int(unfinished)

    def reset(self) -> bool:
        """Empties vLLM's own prefix cache."""
        return bool(self.llm.reset_prefix_cache())

    def flush(self, limit_s: float = 120.0) -> dict[str, int]:
        """Waits until everything is published."""
        publisher = self.scheduler.connector._shared.session.publisher
        until_s = time.monotonic() + limit_s
        time.sleep(0.05)
        while publisher._under_way and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not publisher._under_way, "not everything was published in time"
        return dict(vars(publisher.counts))

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank has done, when all that they gather is published."""
        until_s = time.monotonic() + 60.0
        time.sleep(0.1)
        while True:
            told = list(self.llm.collective_rpc(_rank_state))
            if not any(one["waiting"] for one in told):
                return told
            assert time.monotonic() < until_s, "not everything was published in time"
            time.sleep(0.05)

    def deafen(self, rank: int) -> None:
        """From now on that rank hears nothing of the others."""
        self.llm.collective_rpc(_deafen, args=(rank,))

    def scheduler_state(self) -> dict[str, int]:
        """What can be seen where workers have processes of their own."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "free_blocks": pool.get_num_free_blocks(),
            "blocks": pool.num_gpu_blocks,
            "loading": len(self.scheduler.connector._scheduler.loading),
        }

    def state(self) -> dict[str, Any]:
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        ctypes.CDLL(None).malloc_trim(0)  # what is free, and only kept by malloc, is no leak
        with open("/proc/self/statm") as file:
            rss_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        pool = self.scheduler.kv_cache_manager.block_pool
        told = {
            "rss_bytes": rss_bytes,
            "free_blocks": pool.get_num_free_blocks(),
            "blocks": pool.num_gpu_blocks,
            "requests": len(self.scheduler.requests),
            "preemptions": self._metric("vllm:num_preemptions"),
            "gpu_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        }
        if self.scheduler.connector is not None:
            side, worker = self.scheduler.connector._scheduler, get_kv_transfer_group()._worker
            fetcher = self.scheduler.connector._shared.session.fetcher
            told |= {
                "scheduler": dict(side.counts),
                "worker": dict(worker.counts),
                "states": len(side.states),
                "loading": len(side.loading) + len(worker.loader),
                "lossy_blocks": len(side.lossy),
                "orders": 0 if fetcher is None else fetcher._count,
                "fingerprint": self.scheduler.connector._spec.fingerprint.hex(),
                "hits": self._metric("vllm:external_prefix_cache_hits"),
            }
        return told

    def gap(self, prompt: list[int], token: int) -> float:
        """By how many nats the model finds its own next token more probable than this one."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False)
        [told] = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        every = {one: told.logprob for one, told in told.outputs[0].logprobs[0].items()}
        return float(max(every.values()) - every.get(token, -1e9))

    def drafts(self) -> tuple[int, int]:
        """Tokens that were drafted, and those of them that were accepted."""
        names = ("num_draft_tokens", "num_accepted_tokens")
        drafted, accepted = (self._metric(f"vllm:spec_decode_{name}") for name in names)
        return drafted, accepted

    def hit_sources(self) -> dict[str, int]:
        """Where the tokens that kdn loaded came from, as vLLM counts them."""
        found: dict[str, int] = {}
        for one in self.llm.get_metrics():
            if one.name == "vllm:prompt_tokens_cached_by_source":
                found[one.labels["source"]] = int(one.value)
        return {source: count for source, count in found.items() if count}

    def _metric(self, name: str) -> int:
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == name)

    def teach(self, prompt: list[int], num_scored: int, runs: list[dict[str, Any]]) -> list[Any]:
        """Reads the same prompt once for each of `runs` and compares with the first what the model
        expects after each of the last `num_scored` tokens: mean KL divergence, top-1 agreement."""
        import torch

        model = self.core.model_executor.driver_worker.worker.model_runner.model
        seen: list[torch.Tensor] = []
        original = model.compute_logits

        def compute_logits(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            logits = original(hidden, *rest)
            seen.append(logits.float().clone())
            return logits

        model.compute_logits = compute_logits
        told: list[dict[str, Any]] = []
        expected: torch.Tensor | None = None
        try:
            for run in runs:
                seen.clear()
                options = {"prompt_logprobs": 1, "skip_reading_prefix_cache": False,
                           "detokenize": False, **run}  # fmt: skip
                cached = self.generate([prompt], 1, **options)["cached"][0]
                rows = max(seen, key=len)  # the other has one row, to sample from
                found = torch.log_softmax(rows[-num_scored:], dim=-1)
                expected = found if expected is None else expected
                kld = (expected.exp() * (expected - found)).sum(-1).mean()
                top1 = (expected.argmax(-1) == found.argmax(-1)).float().mean()
                told.append({"cached": cached, "kld": kld.item(), "top1": top1.item(),
                             "rows": rows.shape[0]})  # fmt: skip
                self.reset()
        finally:
            model.compute_logits = original
        return told


def _rank_state(_: Any) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    ranks, publisher = connector._ranks, connector._shared.session.publisher
    gathering = ranks and ranks._gathering
    return {
        "heads": [connector._worker._paged.heads.first, connector._worker._paged.heads.count],
        "counts": dict(connector._worker.counts),
        "waiting": len(publisher._under_way) + (len(gathering._waiting) if gathering else 0),
        "sent": dict(vars(publisher.counts)),
    }


def _deafen(_: Any, rank: int) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kdn.engines.vllm.rank_streams import StreamsIn

    if get_kv_transfer_group()._ranks.share.rank == rank:
        StreamsIn.has_more = lambda self: False  # type: ignore[method-assign]


def main() -> None:
    asked, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
    server = Server(json.loads(asked.readline()))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in asked:
        name, given = json.loads(line)
        try:
            answer = {"answer": getattr(server, name)(**given)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)
    server.core.shutdown()


if __name__ == "__main__":
    main()
