"""One trace through one policy at one capacity, and through the offline optimum.

A request is answered from the longest chain of its blocks that is present: a block hits only if
all before it hit. Then all its blocks are put, in order, as a publisher would put what it had to
compute; putting a block that is there is a use of it. All blocks of a trace take the same room, the
last, perhaps partly filled one of a prompt too.

The optimum is Belady's: after each request, keep of all blocks that were present or just put those
whose next use is nearest, and no block that is never used again. For blocks of one size and a cache
that may decline a block this gives the most block hits any policy can have, for it picks the most
intervals between two uses of a block such that no more than the capacity overlap. The prefix rule
takes nothing from it: whoever uses a block uses all before it, so a parent's next use is never
later than its child's, and with the deeper block leaving first among equals the kept set always
consists of whole prefixes. It is thus also the optimum under the prefix rule. It counts blocks: its
token hit ratio is the optimum but for the last, partly filled blocks of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from kdn.bench.cache_traces import RequestTrace
from kdn.store.base import Hints
from kdn.store.evict import Policy

# Prefill of a Llama-3.1-8B-shaped model on one H200 took 59, 260, 574 and 1,378 ms for 2,048,
# 8,192, 16,384 and 32,768 tokens: within 1 % of a line plus attention's square.
PREFILL_S_PER_TOKEN = 27.9e-6
PREFILL_S_PER_TOKEN2 = 4.31e-10
BLOCK_BYTES_PER_TOKEN = 4096  # 131,072 bytes a token, 32 times smaller; only the ratio counts


def prefill_s(num_tokens: int) -> float:
    return PREFILL_S_PER_TOKEN * num_tokens + PREFILL_S_PER_TOKEN2 * num_tokens**2


@dataclass(frozen=True)
class HitRatios:
    """What a policy's hits were worth, as parts of all there was to gain."""

    token_hit_ratio: float
    saved_ratio: float
    """Of the seconds of prefill without a cache."""


class Replay:
    """A trace, prepared once for all policies and capacities."""

    def __init__(self, trace: RequestTrace) -> None:
        self.trace = trace
        self.size_bytes = trace.block_tokens * BLOCK_BYTES_PER_TOKEN
        self.keys = [block.to_bytes(8, "big") for block in range(trace.footprint_blocks)]
        self.depths: list[int] = []
        for parent in trace.parents:
            self.depths.append(0 if parent is None else self.depths[parent] + 1)
        self.hints = [self._hints(block) for block in range(trace.footprint_blocks)]

    def _hints(self, block: int) -> Hints:
        start, parent = self.depths[block] * self.trace.block_tokens, self.trace.parents[block]
        saved_s = prefill_s(start + self.trace.block_tokens) - prefill_s(start)
        return Hints(None if parent is None else self.keys[parent], saved_s)

    def outcome(self, hits: list[int]) -> HitRatios:
        """Of the number of blocks that hit in each request."""
        block_tokens, requests = self.trace.block_tokens, self.trace.requests
        pairs = [
            (min(blocks * block_tokens, request.num_tokens), request.num_tokens)
            for blocks, request in zip(hits, requests, strict=True)
        ]
        all_s = sum(prefill_s(total) for _, total in pairs)
        return HitRatios(
            sum(hit for hit, _ in pairs) / sum(total for _, total in pairs),
            sum(prefill_s(hit) for hit, _ in pairs) / all_s,
        )

    def run(self, policy: Policy, capacity_blocks: int) -> HitRatios:
        """What an online policy reaches."""
        keys, present, hits = self.keys, set[bytes](), []
        for request in self.trace.requests:
            chain = [keys[block] for block in request.blocks]
            hits.append(next((i for i, key in enumerate(chain) if key not in present), len(chain)))
            for block, key in zip(request.blocks, chain, strict=True):
                if key in present:
                    policy.touch(key)
                    continue
                policy.add(key, self.size_bytes, self.hints[block])
                present.add(key)
                if len(present) > capacity_blocks:
                    victim = policy.victim()
                    assert victim is not None
                    policy.remove(victim)
                    present.remove(victim)
        return self.outcome(hits)

    def optimum(self, capacity_blocks: int) -> HitRatios:
        """What the best choice in hindsight reaches (see above)."""
        next_use = self._next_uses()
        due: dict[int, int] = {}  # of each kept block, the request that uses it next
        farthest: list[tuple[int, int, int]] = []  # heap of (-due, -depth, block); may be outdated
        hits = []
        for number, request in enumerate(self.trace.requests):
            blocks = request.blocks
            hits.append(
                next((i for i, block in enumerate(blocks) if block not in due), len(blocks))
            )
            for block, use in zip(blocks, next_use[number], strict=True):
                due.pop(block, None)
                if use is not None:
                    due[block] = use
                    heappush(farthest, (-use, -self.depths[block], block))
            while len(due) > capacity_blocks:
                use, _, block = heappop(farthest)
                if due.get(block) == -use:
                    del due[block]
        return self.outcome(hits)

    def _next_uses(self) -> list[list[int | None]]:
        """Of each block of each request, the number of the next request that uses it."""
        upcoming: dict[int, int] = {}
        result: list[list[int | None]] = []
        for number in range(len(self.trace.requests) - 1, -1, -1):
            blocks = self.trace.requests[number].blocks
            result.append([upcoming.get(block) for block in blocks])
            upcoming.update(dict.fromkeys(blocks, number))
        return result[::-1]
