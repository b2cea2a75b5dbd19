"""Seams are fitted on joins, and keep what they promise on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.blend.seams import Block, Seams
from kdn.engines.join_quality import AnswerProbe
from kdn.engines.join_reading import Drawn, cache_of, columns_of, read_in_full, read_join
from kdn.engines.prompts import Prompts
from kdn.engines.seam_fitting import Example, SeamOptions, _Fitting, fit_seams, repaired_join
from kdn.engines.seam_moments import Moments, block_columns, fit_block, left_over
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.client.letters import Letters

SMALL = SeamOptions(joins=8, questions=4, made_up=2, pieces=5, join_tokens=256, rank=16)


def pieces(count: int = 24, seed: int = 0) -> list[list[int]]:
    """Words of a small language: what comes next depends on what was there."""
    random = np.random.default_rng(seed)
    words = [
        "".join(chr(97 + c) for c in random.integers(0, 26, n)) for n in random.integers(2, 7, 40)
    ]
    found = []
    for _ in range(count):
        text = " ".join(words[i] for i in random.integers(0, 40, random.integers(6, 14)))
        found.append([ord(letter) for letter in text + "\n\n"])
    return found


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


def test_a_join_of_one_piece_is_what_is_read(model: Any) -> None:
    spec = spec_of(model)
    drawn = Drawn([1, 5, 9], pieces(3))
    joined, full = read_join(model, spec, drawn), read_in_full(model, drawn.tokens)
    start = drawn.moved_from
    assert torch.allclose(joined.keys[:, :start], full.keys[:, :start], atol=1e-5)
    assert not torch.allclose(joined.values[-1, start:], full.values[-1, start:], atol=1e-2)
    # in the first layer a token knows of no other: only its position differs
    assert torch.allclose(joined.keys[0], full.keys[0], atol=1e-4)
    back = cache_of(columns_of(full, spec), spec)
    assert torch.allclose(back.keys, full.keys, atol=1e-4)
    assert torch.equal(back.values, full.values)


def test_a_block_is_found_back_from_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(24, 3, generator=generator), torch.randn(3, 24, generator=generator)
    bias = torch.randn(24, generator=generator)
    sums, other = (Moments.zeros((0, 2), torch.full((24,), 3.0)) for _ in range(2))
    for one in (sums, sums, other):
        inputs = torch.randn(300, 24, generator=generator) + 3
        one.add(inputs, inputs + inputs @ down @ up + bias)
    weight = torch.ones(24)
    block = fit_block(sums.centred(), weight, 1e-6, 3)
    assert torch.allclose(block.down @ block.up, down @ up, atol=1e-2)
    assert torch.allclose(block.bias, bias, atol=1e-1)
    assert left_over(block, other, weight) < 1e-4
    assert left_over(fit_block(sums.centred(), weight, 1e-6, 2), other, weight) > 1e-2
    none = Block((0, 2), torch.zeros(24, 1), torch.zeros(1, 24), torch.zeros(24))
    assert left_over(none, other, weight) == pytest.approx(1, abs=1e-4)
    first = sums.without(sums)
    assert first.count == 0


def test_columns_that_never_change_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    sums = Moments.zeros((0, 1), torch.zeros(16))
    inputs = torch.randn(500, 16, generator=generator)
    inputs[:, 3], inputs[:, 5] = 7.0, 0.0
    full = inputs * 1.5
    full[:, 3], full[:, 5] = 7.0, 0.0
    sums.add(inputs, full)
    block = fit_block(sums.centred(), torch.ones(16), 0.01, 16)
    fixed = inputs + block.added(inputs)
    assert torch.allclose(fixed, full, atol=0.05)


def test_fitted_seams_bring_a_join_nearer_to_the_full_reading(model: Any) -> None:
    spec = spec_of(model)
    prompts, told = Prompts(Letters()), []
    seams = fit_seams(
        model, prompts, spec, pieces(), options=SMALL, on_progress=lambda *one: told.append(one)
    )
    seams.check_for(spec)
    assert set(seams.expected) == {0.0, 0.05, 0.15, 0.3}
    assert seams.joined is not None
    assert all(one > 0 for one in seams.joined)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1:] == (1.0, 0.0)

    drawn = Drawn(prompts.begin(), pieces(5, seed=7))
    joined, full = read_join(model, spec, drawn), read_in_full(model, drawn.tokens)
    fixed = repaired_join(seams, spec, joined, drawn.moved_from)
    columns = [columns_of(one, spec) for one in (joined, fixed, full)]
    before, after = ((one - columns[2]).square().mean((1, 2, 3)) for one in columns[:2])
    assert (after[1:] < 0.9 * before[1:]).all()
    again = fit_seams(model, prompts, spec, pieces(), options=SMALL)
    assert again.to_bytes() == seams.to_bytes()


def test_recomputing_everything_is_the_full_reading(model: Any) -> None:
    spec = spec_of(model)
    drawn = Drawn([1, 5, 9], pieces(4))
    joined, full = read_join(model, spec, drawn), read_in_full(model, drawn.tokens)
    kept = joined.keys.clone()
    probe = AnswerProbe(model, full, [7, 8, 9], count=4)
    assert probe.measure(full).klds.max() < 1e-6
    some, every = probe.measure_recomputed(joined, drawn.tokens, drawn.moved_from, (0.0, 1.0))
    assert every.klds.max() < 1e-6
    assert some.klds == pytest.approx(probe.measure(joined).klds, abs=1e-6)
    assert some.mean > 1e-3
    assert torch.equal(joined.keys, kept)


def test_too_little_text_is_refused_with_what_is_needed(model: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"at least 1,024 tokens .* found \d+ in 4"):
        fit_seams(model, Prompts(Letters()), spec_of(model), pieces(4), options=SMALL)


def test_a_model_that_cannot_be_looked_into_promises_what_it_can(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "attn_logit_softcapping", 5.0, raising=False)
    options = replace(SMALL, joins=4, questions=1)
    seams = fit_seams(model, Prompts(Letters()), spec_of(model), pieces(), options=options)
    assert list(seams.expected) == [0.0]


def test_examples_that_are_asked_are_not_fitted_on(model: Any) -> None:
    every = [piece[:40] for piece in pieces(60)]
    examples = [Example("?", every[at : at + 5]) for at in range(0, 60, 5)]
    work = _Fitting(model, Prompts(Letters()), spec_of(model), [1], SMALL)
    work.take(examples[0].pieces, examples)
    assert len(work.asked) == SMALL.questions
    asked = {tuple(piece) for one in work.asked for piece in one.pieces}
    assert not asked & {tuple(piece) for piece in work.fitted_on}
    assert len(asked) + len(work.fitted_on) == 60


def test_windows_are_refused(tiny_model: Any) -> None:
    model = tiny_model("mistral", sliding_window=64)
    with pytest.raises(UnsupportedError, match="sliding windows"):
        fit_seams(model, Prompts(Letters()), spec_of(model), pieces())


def test_columns_are_ordered_as_seams_expect_them(model: Any) -> None:
    """A map that adds to one column changes what `Seams.repair` says it does."""
    spec = spec_of(model)
    cache = read_in_full(model, pieces(1)[0])
    width = 2 * 2 * spec.num_kv_heads * spec.head_dim
    bias = torch.arange(width).float()
    zero = torch.zeros(width, 1)
    rest = torch.zeros(width)
    blocks = [Block((0, 2), zero, zero.T, bias), Block((2, 4), zero, zero.T, rest)]
    fixed = Seams(spec.fingerprint, blocks).repair(cache, spec)
    before, after = (block_columns(columns_of(one, spec), (0, 2), 0) for one in (cache, fixed))
    assert torch.allclose(after - before, bias.expand_as(before), atol=1e-3)
