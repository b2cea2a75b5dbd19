"""Tokens and text, one by one."""

from __future__ import annotations

from typing import Any

import torch

from kdn.engines.generating import Sampling, TextPieces, generate, stop_tokens
from kdn.engines.reading import forward, new_cache

TOKENS = [3 + i * i % 120 for i in range(60)]


def answer(model: Any, sampling: Sampling) -> tuple[list[int], int]:
    past = new_cache(model)
    logits = forward(model, TOKENS, past)
    tokens = list(generate(model, logits, past, sampling))
    return tokens, past.get_seq_length()


def test_greedy_is_what_transformers_generates(tiny_model: Any) -> None:
    model = tiny_model("llama")
    tokens, held = answer(model, Sampling(20))
    expected = model.generate(torch.tensor([TOKENS]), max_new_tokens=20, do_sample=False)
    expected = [token for token in expected[0, len(TOKENS) :].tolist() if token != 2]
    assert tokens == expected
    assert held == len(TOKENS) + len(tokens) - (len(tokens) == 20)


def test_sampling_follows_its_seed(tiny_model: Any) -> None:
    model = tiny_model("llama")
    first, again, other = (answer(model, Sampling(20, 1.5, seed))[0] for seed in (1, 1, 2))
    assert first == again != other


def test_it_stops(tiny_model: Any) -> None:
    model = tiny_model("llama")
    free, _ = answer(model, Sampling(20))
    model.generation_config.eos_token_id = [2, free[3]]
    assert stop_tokens(model) == {2, free[3]}
    assert answer(model, Sampling(20))[0] == free[: free.index(free[3])]
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert stop_tokens(model) == frozenset()


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_text_comes_in_whole_characters() -> None:
    text = TextPieces(Bytes())
    assert [text.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert text.rest() == ""
    assert text.add(0xE2) == ""
    assert text.rest() == "\ufffd"
