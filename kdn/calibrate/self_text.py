"""Calibration text that the model writes itself: `kdn calibrate --text self`.

Many texts are sampled side by side, after short openings of many kinds, after a few words drawn
from the vocabulary, or after nothing but what prompts begin with. Where a text ends, another one
opens. A text that repeats itself leaves the batch and is counted: its statistics would be those of
a loop. Small models loop sooner or later, so a window is put together from several texts, each
written from the beginning. `Manner` says how they are drawn.

Deterministic for a seed, a device and a memory limit: the limit decides how many rows share a
random generator.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdn.cache.keys import TokenIds
from kdn.calibrate.corpus import distinct_ngrams
from kdn.calibrate.steps import Progress
from kdn.engines.generating import stop_tokens
from kdn.engines.grouped import grouped_reading
from kdn.engines.reading import new_cache
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

SELF = Path("self")
"""Given in the place of text files. A file of that name can be given by its whole path."""

LOOP_TOKENS = 256
LOOP_EVERY = 64
LEAST_DISTINCT = 0.6
"""Part of a stretch's 8-grams that must differ from each other. Of 40 windows of real text, the
least had 0.70."""
MAX_TRIES = 4
"""Times the texts asked for."""
SPARE = 1 / 8
"""Part of the texts written beyond those asked for: else the first that is dropped would cost as
much time as a whole batch."""
MAX_ROWS = 512
MEMORY_BYTES = 4 << 30
"""For the caches of a batch; on a GPU a third of what its memory holds beside the weights. Not of
what is free just now: a run that is resumed must write the same text again."""

OPENINGS = (
    "The history of", "In recent years,", "Once upon a time", "It was late in the evening when",
    "Abstract\n\n", "1. Introduction\n\n", "Chapter 1\n\n", "# Getting started\n\n",
    "def main():\n", "import ", "/* ", "#include <", "SELECT ", "{\n  \"", "<html>\n",
    "Question: ", "Q: What is", "How do I", "Dear ", "Hello,", "- ", "1. ", "Summary: ",
    "According to the report,", "The purpose of this document is to", "The patient",
    "Under the terms of this agreement,", "Let x be", "Theorem 1.", "The recipe calls for",
    "\"I don't know,\" she said.", "My grandmother used to", "Scientists have found that",
    "The city of", "He was born in", "The company announced", "NAME\n\n", "Usage: ",
    "Step 1:", "Interviewer: ", "Warning:", "El ", "La ville de", "Die ",
)  # fmt: skip
"""Of many kinds of text; short, so that the model chooses what to write about."""


WORDS_OF_OPENING = (2, 5)
"""At least, and fewer than."""
LEAST_LETTERS = 3
"""Of a token that stands for a word."""
WORD_BEGINS = (" ", "\u0120", "\u2581")
"""How tokenizers write the space before a word; decoding one token alone may drop it."""
WORD_TRIES = 100


@dataclass(frozen=True)
class Manner:
    """How texts are written. Calibration needs text that surprises the model as often as other
    people's does. Drawn from likely tokens alone, it hardly ever does: rare tokens are missing, and
    what matters is measured where next to nothing is uncertain."""

    temperatures: tuple[float, ...] = (0.8, 0.9, 1.0)
    """In turn. At 1 a token comes as often as the model says, but a small model then wanders off:
    after a while it says more unlikely things than people do."""
    least_chance: float = 0.0
    """Tokens this much less likely than the likeliest are not drawn."""
    bare: float = 0.25
    """Part of the texts that begin with nothing but what prompts begin with."""
    words: float = 0.5
    """Part of the texts that begin with a few words from anywhere in the vocabulary."""
    surprises: float = 0.005
    """Part of the tokens that are drawn from the whole vocabulary, all alike: names, figures and
    typing errors of which the model knows nothing."""
    text_tokens: int = 1000
    """At least so many in a text, if a window has as many."""


USUAL = Manner()
LIKELY = Manner((0.8, 0.9, 1.0, 1.1), least_chance=0.02, words=0, surprises=0, text_tokens=640)
"""Text that keeps the thread. Of longer ones, SmolLM2 spoilt three of four by repeating itself."""


@dataclass(frozen=True)
class SelfText:
    """Windows of token ids, without the head that stood before each, and how many texts were
    dropped because they repeated themselves."""

    windows: list[TokenIds]
    dropped: int


def write_text(
    model: Any,
    tokenizer: Any,
    length: int,
    count: int,
    *,
    head: Sequence[int] | TokenIds = (),
    manner: Manner = USUAL,
    seed: int = 0,
    progress: Progress = lambda *_: None,
    memory_bytes: int | None = None,
) -> SelfText:
    """`count` windows of `length` tokens each, written by the model after `head` (what prompts
    begin with, if they do)."""
    per_window = max(1, length // manner.text_tokens)
    own, wanted = math.ceil(length / per_window), per_window * count
    openings = _Openings(tokenizer, model, manner, seed)
    room = batch_rows(model, len(head) + own, memory_bytes)
    texts: list[TokenIds] = []
    dropped, batch = 0, 0
    with grouped_reading(model):
        while len(texts) < wanted:
            if len(texts) + dropped >= MAX_TRIES * wanted:
                raise UnsupportedError(
                    f"the model repeats itself: {dropped} of {len(texts) + dropped} texts were "
                    "dropped; calibrate with text of your own (--text FILES)"
                )
            missing = wanted - len(texts)
            rows = min(room, missing + math.ceil(SPARE * missing))
            writing = _Batch(model, openings, rows, head, own, (seed, batch), manner)
            for step in range(own):
                progress("writing text", len(texts) * own + step * min(rows, missing), wanted * own)
                writing.step()
            written = writing.finished()
            texts += written
            dropped, batch = dropped + rows - len(written), batch + 1
    progress("writing text", wanted * own, wanted * own)
    parts = (texts[at : at + per_window] for at in range(0, wanted, per_window))
    return SelfText([np.concatenate(part)[:length] for part in parts], dropped)


def batch_rows(model: Any, length: int, memory_bytes: int | None = None) -> int:
    """How many texts fit into memory side by side, with room for a copy of one layer at a time
    and for the chances of all tokens."""
    if memory_bytes is None:
        memory_bytes = _device_bytes(model)
    spec = spec_of(model)
    caches = 1.5 * length * spec.values_per_token * model.dtype.itemsize
    chances = 4 * 4 * spec.vocab_size
    return int(min(MAX_ROWS, max(1, memory_bytes // (caches + chances))))


def _device_bytes(model: Any) -> int:
    if model.device.type != "cuda":
        return MEMORY_BYTES
    own = [one for one in model.parameters() if one.device == model.device]
    weights = sum(int(one.nbytes) for one in own)
    total = int(torch.cuda.get_device_properties(model.device).total_memory)
    return (total - weights) // 3


def repeats(tokens: TokenIds) -> bool:
    """Whether a stretch of text says the same over and over."""
    return distinct_ngrams(tokens) < LEAST_DISTINCT


class _Openings:
    """Token ids of openings in a seeded order, and what stands between two texts."""

    def __init__(self, tokenizer: Any, model: Any, manner: Manner, seed: int) -> None:
        def ids(text: str) -> list[int]:
            return [int(t) for t in tokenizer(text, add_special_tokens=False).input_ids]

        self._tokenizer, self._manner = tokenizer, manner
        self._random = np.random.default_rng(seed)
        self._ids = [found for found in map(ids, OPENINGS) if found]
        self._between = ids("\n\n")
        self.ends = stop_tokens(model) | _special(tokenizer)
        # Embeddings may be padded beyond what the tokenizer knows.
        self._known = min(spec_of(model).vocab_size, getattr(tokenizer, "vocab_size", 1 << 62))
        told = (getattr(tokenizer, "bos_token_id", None), *stop_tokens(model))
        self.start = next((int(token) for token in told if token is not None), self._ids[0][0])
        """Read before a text where prompts begin with nothing of their own."""

    def next(self) -> list[int]:
        kind = self._random.random()
        if kind < self._manner.bare:
            return []
        if kind < self._manner.bare + self._manner.words:
            return [self._word() for _ in range(self._random.integers(*WORDS_OF_OPENING))]
        return self._ids[self._random.integers(len(self._ids))]

    def surprise(self) -> int | None:
        """Now and then, any token but a special one."""
        if self._random.random() >= self._manner.surprises:
            return None
        token = int(self._random.integers(self._known))
        return None if token in self.ends else token

    def _word(self) -> int:
        """A token that begins a word, where there are such."""
        for _ in range(WORD_TRIES):
            token = int(self._random.integers(self._known))
            begin = (self._tokenizer.convert_ids_to_tokens(token) or "")[:1]
            word = self._tokenizer.decode([token]).strip()
            if begin in WORD_BEGINS and word.isalpha() and len(word) >= LEAST_LETTERS:
                break
        return token if token not in self.ends else self.start

    def after_end(self) -> list[int]:
        """At least one token: another text where one has ended."""
        return [*self._between, *self.next()] or self._ids[0]


def _special(tokenizer: Any) -> set[int]:
    """Those with a name (begin, end, padding) and all others that are marked so."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {int(token) for token, told in added.items() if told.special}
    return marked | {int(token) for token in getattr(tokenizer, "all_special_ids", ())}


class _Batch:
    """Rows that are written token by token, all as far."""

    def __init__(
        self, model: Any, openings: _Openings, rows: int, head: Sequence[int] | TokenIds,
        length: int, seed: tuple[int, int], manner: Manner,
    ) -> None:  # fmt: skip
        self._model, self._openings = model, openings
        self._length = length
        device = model.device
        entropy = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
        self._random = torch.Generator(device).manual_seed(entropy)
        self._past = new_cache(model)
        before = [int(token) for token in head] or [openings.start]
        self._next = torch.tensor(before, device=device).expand(rows, -1)
        self._least_chance = manner.least_chance
        chosen = [manner.temperatures[row % len(manner.temperatures)] for row in range(rows)]
        self._temperatures = torch.tensor(chosen, device=device)[:, None]
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._given = [deque(openings.next()) for _ in range(rows)]
        """What rows go on with before they are free again."""

    @torch.inference_mode()
    def step(self) -> None:
        """One more token in each row; rows that loop are left out from then on."""
        if not self._rows:
            return
        logits = self._model(self._next, past_key_values=self._past, use_cache=True).logits[:, -1]
        # Of a model spread over devices they are on the last one.
        drawn = self._draw(logits.to(self._model.device).float()).tolist()
        for row, token in enumerate(drawn):
            self._rows[row].append(self._chosen(row, token))
        last = [row[-1] for row in self._rows]
        self._next = torch.tensor(last, device=self._model.device)[:, None]
        if len(self._rows[0]) % LOOP_EVERY == 0:
            self._leave_out([not repeats(np.array(row[-LOOP_TOKENS:])) for row in self._rows])

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(logits / self._temperatures, dim=-1)
        likely = chances >= self._least_chance * chances.amax(dim=-1, keepdim=True)
        return torch.multinomial(chances * likely, 1, generator=self._random)[:, 0]

    def _chosen(self, row: int, token: int) -> int:
        """What was drawn, unless something is given; after a text's end another one opens."""
        given = self._given[row]
        if not given and token in self._openings.ends:
            given.extend(self._openings.after_end())
        if given:
            return given.popleft()
        surprise = self._openings.surprise()
        return token if surprise is None else surprise

    def _leave_out(self, kept: list[bool]) -> None:
        if len(self._rows[0]) < LOOP_TOKENS or all(kept):
            return
        numbers = [row for row, stays in enumerate(kept) if stays]
        self._rows = [self._rows[row] for row in numbers]
        self._given = [self._given[row] for row in numbers]
        if numbers:
            chosen = torch.tensor(numbers, device=self._model.device)
            self._past.batch_select_indices(chosen)
            self._next, self._temperatures = self._next[chosen], self._temperatures[chosen]

    def finished(self) -> list[TokenIds]:
        whole = [np.array(row[: self._length], dtype=np.uint32) for row in self._rows]
        return [window for window in whole if not repeats(window)]
