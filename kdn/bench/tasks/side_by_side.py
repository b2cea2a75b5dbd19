"""Several questions after one context, in one pass and over one copy of its cache.

All rows lie one after another in the cache. A mask lets each token see the context and the earlier
tokens of its own row, at the positions that it would have alone. So every row reads what it would
read by itself, and no key is copied for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kdn.cache.tensors import KVCache
from kdn.engines.generating import stop_tokens
from kdn.engines.reading import forward
from kdn.engines.transformers import to_dynamic_cache

_CONTEXT, _NOBODY = -1, -2

Row = Sequence[int]


class SideBySide:
    """Rows of tokens after the cache of one context, which is left as it was."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model, self._held = model, cache.num_tokens
        keys, values = (side.to(model.device, model.dtype) for side in (cache.keys, cache.values))
        given = KVCache(keys, values, cache.start, cache.valid_from)
        self._past = to_dynamic_cache(given, model.config.get_text_config(decoder=True))
        self._owner = torch.full((self._held,), _CONTEXT, device=model.device)
        self._lengths: dict[int, int] = {}

    def read(self, rows: Mapping[int, Row]) -> dict[int, torch.Tensor]:
        """Append tokens to some rows, by number: logits [tokens, vocabulary] after each of them."""
        assert all(rows.values()), "expected at least one token in each row"
        device, sizes = self._model.device, [len(row) for row in rows.values()]
        owner = torch.tensor(np.repeat(list(rows), sizes), device=device)
        begins = [self._lengths.get(number, 0) for number in rows]
        positions = np.concatenate([b + np.arange(n) for b, n in zip(begins, sizes, strict=True)])
        before = len(self._owner)
        self._owner = torch.cat([self._owner, owner])
        ids = [token for row in rows.values() for token in row]
        logits = forward(
            self._model, ids, self._past, every=True, mask=self._mask(owner, before),
            positions=torch.tensor(self._held + positions, device=device),
        )  # fmt: skip
        for number, row in rows.items():
            self._lengths[number] = self._lengths.get(number, 0) + len(row)
        return dict(zip(rows, torch.split(logits, sizes), strict=True))

    def take_back(self, number: int, count: int) -> None:
        """The last `count` tokens of a row: nobody sees them any more."""
        assert 0 <= count <= self._lengths[number]
        if count:
            own = (self._owner == number).nonzero()[:, 0]
            self._owner[own[-count:]] = _NOBODY
            self._lengths[number] -= count

    def _mask(self, owner: torch.Tensor, before: int) -> torch.Tensor:
        """[1, 1, new tokens, all tokens], 0 where one sees the other."""
        places = torch.arange(len(self._owner), device=owner.device)
        own = (self._owner == owner[:, None]) & (places <= before + places[: len(owner), None])
        seen = (self._owner == _CONTEXT) | own
        mask = torch.zeros(seen.shape, dtype=self._model.dtype, device=owner.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        return mask[None, None]


def log_likelihoods(
    model: Any, cache: KVCache, rows: Sequence[tuple[Row, Row]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each row (what is given, what follows): the log-likelihood of every token that follows,
    and the token that the model holds most likely in its place."""
    given = {number: [*row, *then[:-1]] for number, (row, then) in enumerate(rows)}
    found = []
    logits = SideBySide(model, cache).read(given)
    for number, (row, then) in enumerate(rows):
        log_probs = torch.log_softmax(logits[number][len(row) - 1 :].float(), dim=-1)
        targets = torch.tensor(list(then), device=log_probs.device)
        likely = log_probs.gather(-1, targets[:, None])[:, 0]
        found.append((likely.double().cpu(), log_probs.argmax(-1).cpu()))
    return found


def answers(
    model: Any, cache: KVCache, questions: Sequence[Row], most: int,
    drafts: Sequence[Row] | None = None,
) -> list[list[int]]:  # fmt: skip
    """A greedy answer of at most `most` tokens to each question, without the token that ends it.

    `drafts` are answers that are likely to be right, such as those from another cache of the same
    context: they are read along with the questions, and only what follows a
    wrong token is made step by step. The answers are the same as without them.
    """
    stops, rows = stop_tokens(model), SideBySide(model, cache)
    drafts = drafts or [[] for _ in questions]
    read = {n: [*question, *drafts[n]] for n, question in enumerate(questions)}
    found: list[list[int]] = [[] for _ in questions]
    pending: dict[int, Row] = {}
    for number, logits in rows.read(read).items():
        best = logits[len(questions[number]) - 1 :].argmax(-1).tolist()
        draft = list(drafts[number])
        agreed = _agreed(draft, best)
        rows.take_back(number, len(draft) - agreed)
        found[number] = best[: agreed + 1]
        pending[number] = best[agreed : agreed + 1]
    while pending := {n: new for n, new in pending.items() if _is_open(found[n], stops, most)}:
        for number, logits in rows.read(pending).items():
            pending[number] = [int(logits[-1].argmax())]
            found[number] += pending[number]
    return [_ended(answer, stops, most) for answer in found]


def _agreed(draft: Row, best: Row) -> int:
    """How many tokens of a draft are right; `best` has one more."""
    pairs = enumerate(zip(draft, best[:-1], strict=True))
    return next((i for i, (one, other) in pairs if one != other), len(draft))


def _is_open(answer: Row, stops: frozenset[int], most: int) -> bool:
    return len(answer) < most and not stops & set(answer)


def _ended(answer: Row, stops: frozenset[int], most: int) -> list[int]:
    end = next((i for i, token in enumerate(answer) if token in stops), most)
    return list(answer[:end])
