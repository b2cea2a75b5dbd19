"""A scheduler's side with made-up requests, a clock, and lookups that a test answers."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from kdn.cache.keys import Namespace, cut
from kdn.delivery.known import Known
from kdn.engines.vllm.early import Prospect
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.join_lookup import Wanted
from kdn.engines.vllm.scheduler import SchedulerSide
from kdn.engines.vllm.settings import Settings

BLOCK = 128
SPACE = Namespace(b"model", b"profile")


class World:
    """A scheduler, a clock, and lookups that are answered when a test says so."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.lookups: list[Future[Known]] = []
        self.limits_s: list[float] = []
        self.prospects: list[Prospect] = []
        self.wanted: list[Wanted] = []
        self.side = SchedulerSide(
            Settings.parse({"url": "x", **settings}), Identity(SPACE), self.look_up, BLOCK,
            clock=lambda: self.now_s, look_up_join=self.look_up_join,
        )  # fmt: skip

    def look_up_join(self, tokens: Any, namespace: Namespace, wanted: Wanted) -> Future[Known]:
        self.wanted.append(wanted)
        self.lookups.append(Future())
        return self.lookups[-1]

    def look_up(
        self, tokens: Any, namespace: Namespace, limit_s: float, prospect: Prospect
    ) -> Future[Known]:
        self.limits_s.append(limit_s)
        self.prospects.append(prospect)
        self.lookups.append(Future())
        return self.lookups[-1]

    def arrive(self, request: Any, known: int | None = 0) -> None:
        """`known` tokens are known; None: no answer yet."""
        self.side.arrived(request)
        if known is not None and self.lookups and not self.lookups[-1].done():
            chunks = tuple(cut(request.prompt_token_ids[:known], SPACE))
            self.lookups[-1].set_result(Known(chunks))

    def step(
        self, *, new: Any = (), cached: Any = (), resumed: Any = (), brought: bool = False
    ) -> Any:
        """`new`: (request, blocks, computed, tokens); `cached`: (request, new blocks, tokens). What
        is computed and kdn has not loaded is in vLLM's prefix cache, of which kdn was told when it
        was asked; `brought`: another connector has loaded it."""
        entries = [*cached, *resumed]
        for r, _, computed, _ in new:
            r.num_computed_tokens = computed
        for r in [*(one[0] for one in new), *(one[0] for one in resumed)]:
            state = self.side.states.get(r.request_id)
            if state is not None and state.own_until < r.num_computed_tokens and not brought:
                self.side.matched(r, r.num_computed_tokens)
        return self.side.step(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=r.request_id, block_ids=(b,), num_computed_tokens=c)
                    for r, b, c, _ in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[entry[0].request_id for entry in entries],
                    resumed_req_ids={entry[0].request_id for entry in resumed},
                    new_block_ids=[(entry[1],) for entry in entries],
                    num_computed_tokens=[entry[0].num_computed_tokens for entry in entries],
                ),
                num_scheduled_tokens={
                    **{r.request_id: n for r, _, _, n in new},
                    **{entry[0].request_id: entry[2] for entry in entries},
                },
                total_num_scheduled_tokens=1,
            )
        )


def request(name: str, num_tokens: int, first: int = 0, **more: Any) -> Any:
    tokens = [first, *range(1, num_tokens)]
    return SimpleNamespace(
        **{
            "request_id": name, "prompt_token_ids": tokens, "all_token_ids": tokens,
            "num_tokens": num_tokens, "num_prompt_tokens": num_tokens, "num_computed_tokens": 0,
            "num_preemptions": 0, "kv_transfer_params": None, "mm_features": [],
            "prompt_embeds": None, "cache_salt": None, "lora_request": None,
            "sampling_params": None, "pooling_params": None, **more,
        }
    )  # fmt: skip


def load_of(world: World, asked: Any) -> Any:
    world.arrive(asked, 768)
    world.side.matched(asked, 0)
    world.side.allocated(asked, list(range(8)), 768)
    [load] = world.step().loads
    return load
