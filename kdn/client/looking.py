"""Computing anew what a question looks at, in a join of pieces that were learned apart.

How much follows from the quality that is asked for and from what the seams promise
(`kdn/blend/shares.py`), and from the time that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kdn.blend.shares import (
    LEAST_LOADING,
    UNMEASURED,
    WHOLE,
    Expected,
    recompute_s,
    share_in_time,
    wanted_share,
)
from kdn.engines.device import wait_for_model
from kdn.engines.own_attention import check_attention
from kdn.engines.ranking import choose, crop, rank, read_question
from kdn.engines.recomputing import recompute
from kdn.errors import UnsupportedError
from kdn.session.quality import enough_join_kld

if TYPE_CHECKING:
    from kdn.client.answers import Stats
    from kdn.client.contexts import Contexts, Options
    from kdn.client.engine import Context, Engine

Questions = Sequence[Sequence[int]]
"""Token ids of each."""


@dataclass(frozen=True)
class Looking:
    """Which tokens of a join may be computed anew, where a question looks, and how many."""

    share: float
    """Of all tokens."""
    within: Sequence[tuple[int, int]]
    """Positions of those that were loaded and stand elsewhere than they were learned."""
    reading_s: float
    """That the model would take to read all; 0: not known."""
    until_s: float
    """By then the question should have been read."""


@dataclass(frozen=True)
class Looks:
    contexts: Contexts

    def share(
        self,
        num_tokens: int,
        expected: Expected | None,
        options: Options,
        left_s: float,
        stats: Stats,
    ) -> float:
        """How much of a join to compute anew: the least that is good enough, and that there is time
        for beside loading; 1: it is read. `expected`: what the seams say, if there are any."""
        if options.recompute_share is not None:
            return options.recompute_share
        contexts = self.contexts
        quality = contexts.quality if options.quality is None else options.quality
        share = wanted_share(expected or UNMEASURED, enough_join_kld(quality))
        if contexts.speeds is None:  # the model is to compute nothing but what is missing
            return WHOLE if enough_join_kld(quality) == 0 else 0.0
        time_s = (1 - LEAST_LOADING) * left_s
        return _in_time(share, self.reading_s(num_tokens), time_s, stats)

    def recompute_s(self, share: float, num_tokens: int) -> float:
        return recompute_s(share, self.reading_s(num_tokens))

    def reading_s(self, num_tokens: int) -> float:
        """0: not known."""
        speeds = self.contexts.speeds
        return 0.0 if speeds is None else speeds.prefill_s(0, num_tokens)

    async def look(
        self, context: Context, questions: Questions, stats: Stats, *, read: bool = False
    ) -> None:
        """Compute anew what the questions look at. `read`: there is one, and it is read, too."""
        looking, context.looking = context.looking, None
        if looking is None:
            return
        began_s, held = self.contexts.clock(), context.num_tokens
        share = _in_time(looking.share, looking.reading_s, looking.until_s - began_s, stats)
        if not share:
            return
        engine = self.contexts.engine
        try:
            count = await engine.run(_look, engine, context, questions, looking.within, share, read)
        except UnsupportedError as error:
            context.check()
            stats.troubles += (f"nothing is recomputed: {error}",)
            return
        stats.recomputed_tokens += count
        stats.computed_tokens += count + context.num_tokens - held
        stats.recompute_s += self.contexts.clock() - began_s


def _in_time(share: float, reading_s: float, left_s: float, stats: Stats) -> float:
    """As `share_in_time`, and says so if it is less."""
    found = share_in_time(share, reading_s, left_s)
    if found < share:
        stats.troubles += (
            f"{found:.1%} of the join are computed anew, not {share:.1%}: no time left",
        )
    return found


def _look(
    engine: Engine,
    context: Context,
    questions: Questions,
    within: Sequence[tuple[int, int]],
    share: float,
    read: bool,
) -> int:
    """All in one thread: whoever is cancelled meanwhile leaves tokens and values in step."""
    finish_check = engine.unchanged.begin()
    past, held, model = context.past, context.num_tokens, engine.model
    check_attention(model, past)
    one = questions[0] if read else ()
    with context.going_on():
        if one:
            logits, scores = read_question(model, past, one)
        else:
            scores = torch.stack([rank(model, past, asked) for asked in questions]).sum(0)
        chosen = choose(scores, share, within)
        if len(chosen):
            crop(past, held)
            logits = recompute(model, past, context.tokens[:held], chosen, one)
            context.is_mended = True
        finish_check()
        wait_for_model(engine.device)
    if one:
        context.logits = logits
        context.tokens[held:] = one
    return len(chosen)
