"""Questions over pieces as token ids, and the pieces as a model reads each of them by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdn.bench.blend.items import Item
from kdn.blend.pieces import Join, Piece
from kdn.cache.keys import Namespace, TokenIds, cut
from kdn.cache.tensors import KVCache
from kdn.engines.prompts import CHAT, PLAIN, Prompts
from kdn.engines.reading import forward, last_tokens, new_cache


@dataclass(frozen=True)
class Prompt:
    """A head, own tokens of each piece behind it, and a question."""

    head: TokenIds
    pieces: tuple[TokenIds, ...]
    question: TokenIds

    @classmethod
    def of(cls, item: Item, tokenizer: Any) -> Prompt:
        texts = [f"{text}\n\n" for text in item.pieces]
        return cls.of_texts(texts, item.question, tokenizer)

    @classmethod
    def of_texts(cls, texts: Sequence[str], question: str, tokenizer: Any) -> Prompt:
        prompts = Prompts(tokenizer)
        style = CHAT if prompts.has_template else PLAIN
        pieces = tuple(ids_of(text, tokenizer) for text in texts)
        return cls(_ids(prompts.begin()), pieces, _ids(prompts.ask(question, style)))

    @property
    def tokens(self) -> TokenIds:
        """What one reader of everything reads before the question."""
        return np.concatenate([self.head, *self.pieces])

    def reordered(self, order: Sequence[int]) -> Prompt:
        return Prompt(self.head, tuple(self.pieces[i] for i in order), self.question)

    def join(self, namespace: Namespace) -> Join:
        """Pieces that were learned behind the head."""
        return Join(
            tuple(_piece(np.concatenate([self.head, own]), len(self.head), namespace)
                  for own in self.pieces)
        )  # fmt: skip

    def headless(self, namespace: Namespace) -> Join:
        """The same tokens, each piece learned without any head: that stands first, as one more
        piece."""
        return Join(tuple(_piece(own, 0, namespace) for own in (self.head, *self.pieces)))


def ids_of(text: str, tokenizer: Any) -> TokenIds:
    """A template brings special tokens itself."""
    return _ids(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _ids(tokens: Sequence[int]) -> TokenIds:
    return np.asarray(tokens, dtype=np.uint32)


def _piece(tokens: TokenIds, head: int, namespace: Namespace) -> Piece:
    return Piece(tokens, head, tuple(cut(tokens, namespace, whole=True)))


def read_pieces(model: Any, pieces: Sequence[Piece]) -> list[KVCache]:
    """What a model's cache holds of each piece by itself. Their head, which they share, is read
    once."""
    past, head = new_cache(model), pieces[0].head
    if head:
        forward(model, pieces[0].tokens[:head], past)
    caches = []
    for piece in pieces:
        forward(model, piece.tokens[head:], past)
        caches.append(last_tokens(past, 0))
        past = past if head else new_cache(model)
        if head:
            past.crop(-piece.num_own)
    return caches
