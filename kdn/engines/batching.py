"""Several questions after one context, answered together.

Rows are padded on the left, between what is known and each question: padding is masked, and
positions are counted without it, so that every row sees what it would see alone. A sliding window
counts padding as well, and so does a recurrent layer; for such models the rows go one by one, each
on a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kdn.engines.generating import Sampling, generate, stop_tokens
from kdn.engines.reading import read
from kdn.engines.states import keeps_states


def answer_all(
    model: PreTrainedModel, past: Cache, rows: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[int]]:
    """An answer's tokens for each row of a question's. Greedy; `past` is used up."""
    assert rows, "expected at least one question"
    assert all(rows), "expected at least one token in each question"
    assert not sampling.temperature, "a batch is answered greedily"
    if keeps_states(past) or any(getattr(layer, "is_sliding", False) for layer in past.layers):
        return [_answer(model, deepcopy(past), row, sampling) for row in rows]
    if len(rows) == 1:
        return [_answer(model, past, rows[0], sampling)]
    return _together(model, past, rows, sampling)


def _answer(
    model: PreTrainedModel, past: Cache, row: Sequence[int], sampling: Sampling
) -> list[int]:
    return list(generate(model, read(model, list(row), past), past, sampling))


@torch.inference_mode()
def _together(
    model: PreTrainedModel, past: Cache, rows: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[int]]:
    held, device, stops = past.get_seq_length(), model.device, stop_tokens(model)
    width = max(map(len, rows))
    pads = torch.tensor([width - len(row) for row in rows], device=device)[:, None]
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    columns = torch.arange(width, device=device)[None]
    mask = torch.cat([torch.ones(len(rows), held, device=device), columns >= pads], 1).long()
    positions = held + (columns - pads).clamp(min=0)
    past.batch_repeat_interleave(len(rows))
    answers: list[list[int]] = [[] for _ in rows]
    open_rows = [True] * len(rows)
    for _ in range(sampling.max_new_tokens):
        picked = _step(model, past, ids, mask, positions)
        for row, token in enumerate(picked.tolist()):
            open_rows[row] = open_rows[row] and token not in stops
            answers[row] += [token] * open_rows[row]
        if not any(open_rows):
            break
        ids, positions = picked[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return answers


def _step(
    model: Any, past: Cache, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The most likely next token of each row."""
    logits = model(
        ids, past_key_values=past, attention_mask=mask, position_ids=positions, use_cache=True
    ).logits
    picked: torch.Tensor = logits[:, -1].argmax(-1)
    return picked
