"""Answers of many ways to one question, made together: a step of a small model takes hardly longer
for a dozen rows than for one, which reads the same weights.

Rows differ in how many tokens they hold by a few only. Each ends where the new tokens begin; what
is free before its first token is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kdn.cache.spec import ModelSpec
from kdn.engines.growing import GrowingLayer, growing_cache


@dataclass
class Together:
    """`add` rows, then `finish` them: `most` tokens each."""

    model: Any
    spec: ModelSpec
    max_rows: int
    max_held: int
    most: int
    _lengths: list[int] = field(default_factory=list)
    _begun: list[list[int]] = field(default_factory=list)
    _memory: list[torch.Tensor] = field(default_factory=list)
    """Keys and values [layers, rows, heads, tokens, channels]."""

    def add(self, past: Any, begun: Sequence[int]) -> int:
        """A row that goes on from what `past` holds with the last token of `begun`, which is not
        among that. Its number."""
        if not self._memory:
            spec, room = self.spec, self.max_held + self.most
            shape = (spec.num_layers, self.max_rows, spec.num_kv_heads, room, spec.head_dim)
            like = {"dtype": self.model.dtype, "device": self.model.device}
            self._memory = [torch.zeros(shape, **like) for _ in range(2)]
        row, count = len(self._lengths), past.get_seq_length()
        held = slice(self.max_held - count, self.max_held)
        for index, layer in enumerate(past.layers):
            for memory, values in zip(self._memory, (layer.keys, layer.values), strict=True):
                memory[index, row, :, held] = values[0]
        self._lengths.append(count)
        self._begun.append(list(begun))
        return row

    def finish(self) -> list[list[int]]:
        """All rows, each with `most` tokens, also after an end."""
        rows = self._begun
        if not rows:
            return []
        past = growing_cache(self.model.config.get_text_config(decoder=True))
        keys, values = (one[:, : len(rows)] for one in self._memory)
        past.layers = [
            GrowingLayer.holding(keys[index], values[index], self.max_held)
            for index in range(self.spec.num_layers)
        ]
        lengths = torch.tensor(self._lengths, device=self.model.device)
        for step in range(self.most - min(map(len, rows))):
            for row, token in zip(rows, self._step(past, rows, lengths, step), strict=True):
                row.append(token)
        return [row[: self.most] for row in rows]

    def _step(
        self, past: Any, rows: list[list[int]], lengths: torch.Tensor, step: int
    ) -> list[int]:
        """One more token of each."""
        device = lengths.device
        places = torch.arange(self.max_held + step + 1, device=device)
        mask = (places >= self.max_held - lengths[:, None]).long()
        ids = torch.tensor([[row[-1]] for row in rows], device=device)
        with torch.inference_mode():
            logits = self.model(
                ids, past_key_values=past, attention_mask=mask, use_cache=True,
                position_ids=(lengths + step)[:, None],
            ).logits  # fmt: skip
        return [int(token) for token in logits[:, -1].argmax(-1)]
