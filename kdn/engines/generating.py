"""Answers, token by token, on top of a cache. Greedy unless a temperature is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kdn.checked import MAX_SEED, checked_count, checked_number
from kdn.defaults import MAX_NEW_TOKENS
from kdn.engines.reading import forward

MAX_TEMPERATURE = 100.0
"""Nearly any token is as likely as any other."""
REPLACEMENT = "\ufffd"
"""What an unfinished character decodes to."""


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0
    """0: always the most likely token."""
    seed: int = 0

    def __post_init__(self) -> None:
        checked_count("max_new_tokens", self.max_new_tokens)
        checked_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        checked_count("seed", self.seed, 0, MAX_SEED)


def generate(
    model: PreTrainedModel, logits: torch.Tensor, past: Cache, sampling: Sampling
) -> Iterator[int]:
    """Tokens up to the end of the answer, which is not among them. `logits` follow what `past`
    holds; it grows by every token but the last."""
    stops = stop_tokens(model)
    random = torch.Generator(device=logits.device).manual_seed(sampling.seed)
    for count in range(1, sampling.max_new_tokens + 1):
        token = _pick(logits, sampling.temperature, random)
        if token in stops:
            return
        yield token
        if count < sampling.max_new_tokens:
            logits = forward(model, [token], past)


def _pick(logits: torch.Tensor, temperature: float, random: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    chances = torch.softmax(logits.float() / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=random))


def stop_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Any of these ends an answer."""
    told = getattr(model.generation_config, "eos_token_id", None)
    if told is None:
        told = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if told is None:
        return frozenset()
    return frozenset([told] if isinstance(told, int) else told)


class TextPieces:
    """Text of tokens as they come: a character is handed on when all its tokens are there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text()
        return "" if text.endswith(REPLACEMENT) else self._news(text)

    def rest(self) -> str:
        """What is left when no more tokens come."""
        return self._news(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _news(self, text: str) -> str:
        # A tokenizer may still change what it showed before (spaces); never take anything back.
        news = text[len(self._shown) :]
        self._shown += news
        return news
