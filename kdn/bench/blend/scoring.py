"""What a joined cache does to an answer: divergence from the full reading, token by token, and the
words of the answer.

Every way to answer ends in the same two passes, with the same shapes: the question, then the tokens
of the full reading's own greedy answer. So the full reading held against itself scores exactly 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.engines.generating import stop_tokens
from kdn.engines.quality import kld
from kdn.engines.ranking import crop
from kdn.engines.reading import forward

ANSWER_TOKENS = 16

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """How a model answers after one reading of everything."""

    answer: tuple[int, ...]
    """Its ANSWER_TOKENS most likely tokens, also what comes after an end."""
    log_probs: torch.Tensor
    """[answer, vocabulary], before each of them."""

    @classmethod
    def of(cls, model: Any, logits: torch.Tensor, past: Any) -> Reading:
        """`logits` follow the question, which `past` holds. It is left as it was."""
        length = past.get_seq_length()
        answer = greedy(model, logits, past)
        crop(past, length)
        return cls(tuple(answer), _log_probs(model, logits, past, answer))


@dataclass(frozen=True)
class Score:
    """Of one way to answer one question."""

    klds: Floats
    """KL(full || this) in nats at each token of the full reading's answer."""
    same_first: bool
    begun: tuple[int, ...]
    """Its own greedy answer, up to where it is not the full reading's any more: all before is the
    same in both."""

    @property
    def kld_first(self) -> float:
        return float(self.klds[0])

    @property
    def kld(self) -> float:
        return float(self.klds.mean())


def score(model: Any, reading: Reading, logits: torch.Tensor, past: Any) -> Score:
    """`logits` follow the question, which `past` holds. That is left with what the answer begins
    with, as far as it is the full reading's: all but the last token of `Score.begun`."""
    length = past.get_seq_length()
    found = _log_probs(model, logits, past, reading.answer)
    best = found.argmax(-1).tolist()
    agreed = _agreed(best, reading.answer)
    begun = (*reading.answer[:agreed], *best[agreed : agreed + 1])
    crop(past, length + len(begun) - 1)
    return Score(kld(reading.log_probs, found), best[0] == reading.answer[0], begun)


def until_end(model: Any, answer: Sequence[int]) -> list[int]:
    """Without the token that ends it, and what follows."""
    stops = stop_tokens(model)
    return list(takewhile(lambda token: token not in stops, answer))


def greedy(model: Any, logits: torch.Tensor, past: Any, count: int = ANSWER_TOKENS) -> list[int]:
    """The most likely tokens. `past` grows by all but the last."""
    answer = [int(logits.argmax())]
    while len(answer) < count:
        answer.append(int(forward(model, answer[-1:], past).argmax()))
    return answer


def _log_probs(model: Any, logits: torch.Tensor, past: Any, answer: Sequence[int]) -> torch.Tensor:
    """Of every token of an answer: of the first after the question, of the others in one pass."""
    rows = [logits[None]]
    if len(answer) > 1:
        rows.append(forward(model, answer[:-1], past, every=True))
    return torch.log_softmax(torch.cat(rows).float(), dim=-1)


def _agreed(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens from the front are the same."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((i for i, (one, other) in pairs if one != other), len(others))


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words_of(text: str) -> list[str]:
    """As SQuAD compares answers: no case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, expected: Sequence[str]) -> float:
    """Of words, against the expected answer that it is nearest to."""
    return max(_f1(words_of(answer), words_of(one)) for one in expected)


def _f1(found: Sequence[str], expected: Sequence[str]) -> float:
    if not found or not expected:
        return float(found == expected)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected))
