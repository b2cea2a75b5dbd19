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

Blocks are layered streams: a policy may cut the finest levels off one instead of dropping it. A
block hits if it has the levels that the default quality asks for. How good hits could be, given the
levels that are there, is told beside them; so is how many are exact, with all levels of their whole
prefix, which is what a context takes that is to grow by what is published.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile

from kdn.bench.cache_traces import RequestTrace
from kdn.store.base import Hints
from kdn.store.evict import Policy

# Prefill of a Llama-3.1-8B-shaped model on one H200 took 59, 260, 574 and 1,378 ms for 2,048,
# 8,192, 16,384 and 32,768 tokens: within 1 % of a line plus attention's square.
PREFILL_S_PER_TOKEN = 27.9e-6
PREFILL_S_PER_TOKEN2 = 4.31e-10
BLOCK_BYTES_PER_TOKEN = 4096  # 131,072 bytes a token, 32 times smaller; only the ratio counts
LEVEL_BITS = (0.107, 0.33, 0.84, 2.8)
"""A value, up to the end of each level: SmolLM2 with its shipped profile (`kdn bench codec`)."""
LEVEL_KLD = (0.092, 0.018, 0.003, 0.0003)
WANTED_LEVELS = 3
"""By a reader at the default quality."""


def prefill_s(num_tokens: int) -> float:
    return PREFILL_S_PER_TOKEN * num_tokens + PREFILL_S_PER_TOKEN2 * num_tokens**2


@dataclass(frozen=True)
class HitRatios:
    """What a policy's hits were worth, as parts of all there was to gain."""

    token_hit_ratio: float
    saved_ratio: float
    """Of the seconds of prefill without a cache."""
    hit_kld: float = LEVEL_KLD[-1]
    """Mean over the tokens that hit, with all levels that are there."""
    exact_hit_ratio: float = 0.0
    """Token hit ratio of those who want all levels."""


class Replay:
    """A trace, prepared once for all policies and capacities."""

    def __init__(self, trace: RequestTrace) -> None:
        self.trace = trace
        self.size_bytes = trace.block_tokens * BLOCK_BYTES_PER_TOKEN
        self.cuts = tuple(round(self.size_bytes * bits / LEVEL_BITS[-1]) for bits in LEVEL_BITS)
        self.keys = [block.to_bytes(8, "big") for block in range(trace.footprint_blocks)]
        self.depths: list[int] = []
        for parent in trace.parents:
            self.depths.append(0 if parent is None else self.depths[parent] + 1)
        self.hints = [self._hints(block) for block in range(trace.footprint_blocks)]

    def _hints(self, block: int) -> Hints:
        start, parent = self.depths[block] * self.trace.block_tokens, self.trace.parents[block]
        saved_s = prefill_s(start + self.trace.block_tokens) - prefill_s(start)
        return Hints(None if parent is None else self.keys[parent], saved_s, self.cuts)

    def outcome(self, hits: list[list[int]]) -> HitRatios:
        """Of the levels of the blocks that hit, in each request."""
        block_tokens, requests = self.trace.block_tokens, self.trace.requests
        totals = [request.num_tokens for request in requests]
        tokens = [min(len(some) * block_tokens, n) for some, n in zip(hits, totals, strict=True)]
        exact = [min(_whole(some) * block_tokens, n) for some, n in zip(hits, totals, strict=True)]
        levels = Counter(level for some in hits for level in some)
        kld = sum(LEVEL_KLD[level - 1] * count for level, count in levels.items())
        return HitRatios(
            sum(tokens) / sum(totals),
            sum(map(prefill_s, tokens)) / sum(map(prefill_s, totals)),
            kld / max(1, levels.total()),
            sum(exact) / sum(totals),
        )

    def run(self, policy: Policy, capacity_blocks: int) -> HitRatios:
        """What an online policy reaches."""
        cache = _Cache(policy, capacity_blocks * self.size_bytes)
        wanted_bytes, hits = self.cuts[WANTED_LEVELS - 1], []
        for request in self.trace.requests:
            chain = [self.keys[block] for block in request.blocks]
            sizes = [cache.sizes.get(key, 0) for key in chain]
            hits.append([self._levels(n) for n in takewhile(lambda n: n >= wanted_bytes, sizes)])
            for block, key in zip(request.blocks, chain, strict=True):
                if key in cache.sizes:
                    policy.touch(key, 0, wanted_bytes)
                else:
                    cache.put(key, self.size_bytes, self.hints[block])
        return self.outcome(hits)

    def _levels(self, size_bytes: int) -> int:
        return sum(cut <= size_bytes for cut in self.cuts)

    def optimum(self, capacity_blocks: int) -> HitRatios:
        """What the best choice in hindsight reaches (see above)."""
        next_use = self._next_uses()
        due: dict[int, int] = {}  # of each kept block, the request that uses it next
        farthest: list[tuple[int, int, int]] = []  # heap of (-due, -depth, block); may be outdated
        hits: list[list[int]] = []
        for number, request in enumerate(self.trace.requests):
            blocks = request.blocks
            hits.append([len(LEVEL_BITS) for _ in takewhile(due.__contains__, blocks)])
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


class _Cache:
    """Blocks within a capacity, as a store keeps them."""

    def __init__(self, policy: Policy, capacity_bytes: int) -> None:
        self.sizes: dict[bytes, int] = {}
        self._policy = policy
        self._free_bytes = capacity_bytes

    def put(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        self._policy.add(key, size_bytes, hints)
        self._resize(key, size_bytes)
        while self._free_bytes < 0:
            victim = self._policy.victim()
            assert victim is not None
            kept_bytes = self._policy.kept_bytes(victim)
            if kept_bytes:
                self._policy.cut(victim, kept_bytes, kept_bytes)
            else:
                self._policy.remove(victim)
            self._resize(victim, kept_bytes)

    def _resize(self, key: bytes, size_bytes: int) -> None:
        self._free_bytes -= size_bytes - self.sizes.pop(key, 0)
        if size_bytes:
            self.sizes[key] = size_bytes


def _whole(levels: list[int]) -> int:
    """How many of the first blocks have all levels."""
    return len(list(takewhile(lambda level: level == len(LEVEL_BITS), levels)))
