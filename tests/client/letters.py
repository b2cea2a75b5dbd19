"""A tokenizer of single letters for models of 128 tokens, with and without a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Ids:
    def __init__(self, ids: list[int]) -> None:
        self.input_ids = ids


class Letters:
    """Token i is the character i; ids below 3 are special. BOS is 1 where there is one."""

    def __init__(self, chat: bool = True, bos: bool = True) -> None:
        self.chat_template = "letters" if chat else None
        self.bos = bos

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Ids:
        begin = [1] if add_special_tokens and self.bos else []
        return Ids(begin + [ord(letter) % 128 for letter in text])

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in tokens if token > 2)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str:
        assert not tokenize
        shown = "".join(f"[{one['role']}]{one['content']}<end>" for one in messages)
        return "\x01" + shown + ("[assistant]" if add_generation_prompt else "")
