"""Text that a tiny model writes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.calibrate import command, self_text
from kdn.calibrate.command import Request, num_windows
from kdn.calibrate.report import KEPT_WINDOWS
from kdn.calibrate.run import CalibrationOptions
from kdn.calibrate.self_text import LIKELY, SELF, Manner, batch_rows, repeats, write_text
from kdn.errors import UnsupportedError

END = 2
WORDS = range(40, 70)
GREEDY = Manner((1e-4,), bare=1.0, words=0.0, surprises=0.0)


class Letters:
    """A tokenizer that knows single characters."""

    bos_token_id, all_special_ids = 1, (0, 1, END)

    def __call__(
        self, text: str, *, add_special_tokens: bool, verbose: bool = True
    ) -> SimpleNamespace:
        before = [self.bos_token_id] if add_special_tokens else []
        return SimpleNamespace(input_ids=before + [3 + ord(one) % 125 for one in text])

    def decode(self, ids: list[int]) -> str:
        """Drops the space before a word, as SentencePiece does."""
        return "word" if ids[0] in WORDS or ids[0] % 2 else "."

    def convert_ids_to_tokens(self, token: int) -> str:
        return "\u2581word" if token in WORDS else "word" if token % 2 else "."


@pytest.fixture
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama")


def test_writes_as_many_windows_as_asked_for_and_the_same_again(model: Any) -> None:
    told: list[tuple[str, int, int]] = []
    found = write_text(
        model, Letters(), 70, 5, head=[1, 7], seed=3, progress=lambda *step: told.append(step)
    )
    again = write_text(model, Letters(), 70, 5, head=[1, 7], seed=3)
    other = write_text(model, Letters(), 70, 5, head=[1, 7], seed=4)
    assert [len(window) for window in found.windows] == [70] * 5
    np.testing.assert_array_equal(found.windows, again.windows)
    assert not np.array_equal(found.windows, other.windows)
    assert len({bytes(window) for window in found.windows}) == 5
    assert told[-1] == ("writing text", 350, 350)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert model.config._attn_implementation == "sdpa"


def test_special_tokens_are_not_written(model: Any) -> None:
    # Likely at every step: each time another text opens instead.
    with torch.no_grad():
        model.lm_head.weight[END] = 4 * model.lm_head.weight.abs().mean()
    found = write_text(model, Letters(), 120, 4)
    assert not np.isin(found.windows, Letters.all_special_ids).any()


def test_nor_are_those_that_are_only_marked_as_special(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Letters, "vocab_size", 128, raising=False)
    marked = {token: SimpleNamespace(special=token < 90) for token in range(80, 100)}
    monkeypatch.setattr(Letters, "added_tokens_decoder", marked, raising=False)
    found = write_text(model, Letters(), 200, 8, manner=Manner(bare=1, words=0, surprises=0.5))
    drawn = set(np.concatenate(found.windows).tolist())
    assert not drawn & set(range(80, 90))
    assert drawn & set(range(90, 100))


def test_tokens_are_what_the_model_would_say(model: Any, monkeypatch: Any) -> None:
    """Near temperature 0, after the opening: each token is the most likely one."""
    monkeypatch.setattr(self_text, "repeats", lambda _: False)
    head = [1, 9, 30]
    (window, _) = write_text(model, Letters(), 20, 2, head=head, manner=GREEDY).windows
    with torch.no_grad():
        logits = model(torch.tensor([[*head, *window.tolist()]])).logits[0, 2:-1]
    free = ~np.isin(logits.argmax(-1).numpy(), Letters.all_special_ids)
    assert free.sum() > 10
    first_end = int(np.argmin(free)) if not free.all() else len(free)
    assert first_end > 0
    np.testing.assert_array_equal(logits.argmax(-1).numpy()[:first_end], window[:first_end])


def test_texts_open_with_words_of_the_vocabulary(model: Any) -> None:
    found = write_text(model, Letters(), 30, 6, manner=Manner(bare=0, words=1, surprises=0))
    assert np.isin([window[:2] for window in found.windows], list(WORDS)).all()
    assert len({bytes(window[:2]) for window in found.windows}) > 1


def test_a_vocabulary_without_words_opens_with_any_token(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Letters, "decode", lambda *_: "")
    found = write_text(model, Letters(), 30, 6, manner=Manner(bare=0, words=1, surprises=0))
    assert len({int(window[0]) for window in found.windows}) > 1


def test_some_tokens_come_from_anywhere(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(self_text, "repeats", lambda _: False)
    known = 100
    monkeypatch.setattr(Letters, "vocab_size", known, raising=False)
    plain = write_text(model, Letters(), 300, 4, manner=GREEDY).windows
    assert np.concatenate(plain).max() >= known
    drawn = write_text(model, Letters(), 300, 4, manner=replace(GREEDY, surprises=1.0)).windows
    # All of them, but where a special one was drawn: there the model says what comes.
    counts = np.bincount(np.concatenate(drawn), minlength=known)
    assert (counts[3:known] > 0).all()
    assert counts[known:].sum() < 4 * 300 * 2 * 3 / known


def test_unlikely_tokens_may_be_left_out(model: Any) -> None:
    likely = write_text(model, Letters(), 100, 4, manner=replace(LIKELY, least_chance=0.9))
    every = write_text(model, Letters(), 100, 4, manner=replace(LIKELY, least_chance=0.0))
    assert len(np.unique(likely.windows)) < len(np.unique(every.windows))


def test_finds_loops() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 256).astype(np.uint32)
    assert not repeats(text)
    assert repeats(np.tile(text[:60], 5)[:256])
    assert repeats(np.full(256, 7, dtype=np.uint32))
    assert not repeats(np.concatenate([text[:200], text[:56]]))


def test_windows_that_loop_are_dropped_and_counted(model: Any, monkeypatch: Any) -> None:
    """The first rows of the first batch, as if they looped; the others come out unharmed."""
    calls = []

    def loops(tokens: Any) -> bool:
        calls.append(len(tokens))
        return len(tokens) == 64 and len(calls) <= 2

    monkeypatch.setattr(self_text, "LOOP_TOKENS", 64)
    monkeypatch.setattr(self_text, "repeats", loops)
    found = write_text(model, Letters(), 100, 4)
    assert found.dropped == 2
    assert [len(window) for window in found.windows] == [100] * 4


@pytest.mark.parametrize("windowed", [False, True])
def test_rows_that_stay_go_on_from_their_own_past(
    tiny_model: Callable[..., Any], monkeypatch: Any, windowed: bool
) -> None:
    """Greedy rows are the same whether or not another row leaves the batch."""
    model = tiny_model("mistral", sliding_window=32) if windowed else tiny_model("llama")
    monkeypatch.setattr(self_text._Openings, "after_end", lambda _: [5])
    manner = replace(GREEDY, bare=0.25)
    monkeypatch.setattr(self_text, "LOOP_TOKENS", 64)
    monkeypatch.setattr(self_text, "LEAST_DISTINCT", 0.0)
    whole = write_text(model, Letters(), 100, 3, manner=manner).windows
    first = bytes(whole[0][:64])
    monkeypatch.setattr(self_text, "repeats", lambda ids: bytes(np.uint32(ids))[:256] == first)
    left = write_text(model, Letters(), 100, 3, manner=manner)
    assert left.dropped >= 1
    np.testing.assert_array_equal(left.windows[:2], whole[1:])


def test_a_model_that_only_loops_is_refused(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(self_text, "repeats", lambda _: True)
    with pytest.raises(UnsupportedError, match=r"repeats itself: 9 of 9 .*--text FILES"):
        write_text(model, Letters(), 20, 2)


def test_memory_bounds_the_batch(model: Any) -> None:
    per_token = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, channels, bytes
    most = 3 * (1.5 * 1000 * per_token + 16 * 128)
    assert batch_rows(model, 1000, int(most)) in (2, 3)
    assert batch_rows(model, 1000, 1) == 1
    assert batch_rows(model, 10, 1 << 40) == self_text.MAX_ROWS
    alone = write_text(model, Letters(), 40, 3, memory_bytes=1)
    assert [len(window) for window in alone.windows] == [40] * 3


def test_the_command_calibrates_on_it_behind_what_prompts_begin_with(model: Any) -> None:
    options = CalibrationOptions(context=64)
    told: list[str] = []
    windows, same, source = command._windows(
        Request("tiny", [SELF], tokens=640), model, Letters(), [], options, KEPT_WINDOWS,
        lambda stage, *_: told.append(stage),
    )  # fmt: skip
    assert same == options
    assert source == {"texts": ["self"], "dropped_texts": 0}
    assert len(windows) == num_windows(640, 64)
    assert {len(window) for window in windows} == {options.window}
    assert {int(window[0]) for window in windows} == {Letters.bos_token_id}
    assert set(told) == {"writing text"}
