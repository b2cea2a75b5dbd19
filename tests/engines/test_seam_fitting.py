"""Seams are fitted on joins, and keep what they promise on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.blend.seams import Block, Seams
from kdn.engines.join_quality import AnswerProbe
from kdn.engines.join_reading import (
    Drawn,
    _read_together,
    cache_of,
    columns_of,
    put_together,
    read_apart,
    read_in_full,
    read_join,
)
from kdn.engines.prompts import Prompts
from kdn.engines.seam_fitting import (
    Example,
    Klds,
    SeamOptions,
    _Asked,
    _Fitting,
    fit_seams,
    repaired_join,
)
from kdn.engines.seam_halves import in_halves
from kdn.engines.seam_moments import JoinSums, Moments, block_columns, fit_block, left_over
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.client.letters import Letters

SMALL = SeamOptions(joins=8, answers=4, made_up=2, pieces=5, join_tokens=256, rank=16)


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
    probe = AnswerProbe(model, [full], [7, 8, 9], count=4)
    same, plain = probe.measure(0, [full, joined])
    assert same.klds.max() < 1e-6
    some, every = probe.measure_recomputed(0, joined, drawn.tokens, drawn.moved_from, (0.0, 1.0))
    assert every.klds.max() < 1e-6
    assert some.klds == pytest.approx(plain.klds, abs=1e-6)
    assert some.mean > 1e-3
    assert torch.equal(joined.keys, kept)


def test_too_little_text_is_refused_with_what_is_needed(model: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"at least 1,024 tokens .* found [\d,]+ tokens in 2 and 2"
    ):
        fit_seams(model, Prompts(Letters()), spec_of(model), pieces(4), options=SMALL)


def test_a_model_that_cannot_be_looked_into_promises_what_it_can(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "attn_logit_softcapping", 5.0, raising=False)
    options = replace(SMALL, joins=4, answers=1)
    seams = fit_seams(model, Prompts(Letters()), spec_of(model), pieces(), options=options)
    assert list(seams.expected) == [0.0]


def test_several_contexts_are_answered_as_each_by_itself(model: Any) -> None:
    spec, own = spec_of(model), pieces(4)
    orders = [Drawn([1, 5, 9], [own[i] for i in order]) for order in ((0, 1, 2, 3), (2, 0, 3, 1))]
    fulls = [read_in_full(model, one.tokens) for one in orders]
    joins = [read_join(model, spec, one) for one in orders]
    both = AnswerProbe(model, fulls, [7, 8, 9], count=4)
    for row in range(2):
        alone = AnswerProbe(model, [fulls[row]], [7, 8, 9], count=4)
        assert both.answers[row] == alone.answers[0]
        (found,), (expected,) = (
            probe.measure(at, [joins[row]]) for probe, at in ((both, row), (alone, 0))
        )
        assert found.klds == pytest.approx(expected.klds, abs=1e-4)


def test_pieces_are_read_together_as_each_by_itself(model: Any) -> None:
    head, own = [1, 5, 9], pieces(4)
    together = _read_together(model, read_in_full(model, head), own)
    for found, expected in zip(together, read_apart(model, head, own), strict=True):
        assert torch.allclose(found.keys, expected.keys, atol=1e-4)
        assert torch.allclose(found.values, expected.values, atol=1e-4)
    spec = spec_of(model)
    found, expected = put_together(spec, together, 3), read_join(model, spec, Drawn(head, own))
    assert torch.allclose(found.keys, expected.keys, atol=1e-4)
    assert torch.allclose(found.values, expected.values, atol=1e-4)


def test_sums_of_two_halves_are_the_sums_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    joins = [torch.randn(2, 2, 60, 2, 8, generator=generator) for _ in range(8)]
    every, first = JoinSums([(0, 1), (1, 2)]), JoinSums([(0, 1), (1, 2)])
    for joined, full in joins:
        every.add(joined, full, 10)
    for joined, full in joins[:4]:
        first.add(joined, full, 10)
    second = first.empty()
    for joined, full in joins[4:]:
        second.add(joined, full, 10)
    first.merge(second)
    assert first.num_joins == 8
    for found, expected in zip(first.solved([0.1, 1], 4), every.solved([0.1, 1], 4), strict=True):
        assert torch.allclose(found.down @ found.up, expected.down @ expected.up, atol=1e-4)
        assert torch.allclose(found.bias, expected.bias, atol=1e-4)


def test_no_ridge_is_chosen_on_pieces_that_were_fitted_on_in_another_order() -> None:
    generator = torch.Generator().manual_seed(0)
    sums = JoinSums([(0, 1)])
    for _ in range(8):
        for again in (False, True, True):
            sums.add(*torch.randn(2, 1, 50, 2, 8, generator=generator), 20, again)
    assert sums.num_joins == 8
    assert sums._every[0].count == 8 * 3 * 30
    assert sums._checked[0].count == 2 * 3 * 30  # of the fourth join and of the eighth, all orders


Part = tuple[int, ...]


def parts(count: int, length: int = 40) -> list[Part]:
    return [tuple(range(number, number + length)) for number in range(1000, 1000 + count)]


def examples_of(*about: list[Part]) -> list[Example]:
    return [Example(f"{number}?", own) for number, own in enumerate(about)]


def test_no_half_is_fitted_on_what_the_other_is_asked_about() -> None:
    own = parts(70)
    random = np.random.default_rng(0)
    examples = examples_of(*(own[at : at + 6] for at in range(0, 60, 5)))  # one piece in common
    halves = in_halves([*own[60:], own[3]], examples, random)
    assert [len(half.examples) for half in halves] == [6, 6]
    for half, other in (halves, halves[::-1]):
        asked = {piece for one in other.examples for piece in one.pieces}
        assert not asked & set(half.pieces)
        assert len(half.pieces) == len(set(half.pieces)) > 25
    together = {*halves[0].pieces, *halves[1].pieces}
    shared = halves[0].asked_about & halves[1].asked_about
    assert together | shared == set(own)
    assert len(shared) < 8  # of 11: questions about the same pieces stay together if they can
    known = halves[0].examples[0]
    assert halves[0].is_own(known.pieces) == (not shared & set(known.pieces))
    assert not halves[1].is_own(known.pieces)


def test_questions_about_one_text_leave_others_to_be_fitted_on() -> None:
    own = parts(40)
    halves = in_halves(own, examples_of(own[:3], own[:3]), np.random.default_rng(0))
    assert not any(half.is_own(own[:3]) for half in halves)
    assert sorted(len(half.pieces) for half in halves) == [18, 19]
    with pytest.raises(UnsupportedError, match="found 0 tokens in 0 and 0"):
        in_halves([], examples_of(own, own), np.random.default_rng(0))


def test_pieces_alone_are_halved() -> None:
    first, second = in_halves(parts(31), [], np.random.default_rng(0))
    assert sorted([len(first.pieces), len(second.pieces)]) == [15, 16]
    assert not set(first.pieces) & set(second.pieces)


def fitting_of(model: Any, examples: list[Example], **options: Any) -> _Fitting:
    work = _Fitting(model, Prompts(Letters()), spec_of(model), [1], replace(SMALL, **options))
    work.take([], examples)
    return work


def test_few_questions_are_asked_in_more_orders(model: Any) -> None:
    examples = examples_of(*(parts(60)[at : at + 5] for at in range(0, 60, 5)))

    def orders(**options: Any) -> list[int]:
        work = fitting_of(model, examples, **options)
        found: list[_Asked] = [one for half in work.halves for one in work._asked(half)]
        for one in found:
            assert one.orders[0] == (0, 1, 2, 3, 4)
            assert all(sorted(order) == [0, 1, 2, 3, 4] for order in one.orders)
            assert len(set(one.orders)) == len(one.orders)
        return sorted(len(one.orders) for one in found)

    assert orders(answers=12) == [1] * 12
    assert orders(answers=18) == [1] * 6 + [2] * 6
    assert orders(answers=999) == [6] * 12
    assert orders(answers=5) == [1] * 5
    assert orders(answers=12, questions=4) == [3] * 4


def test_a_question_is_measured_about_all_of_its_passages(model: Any) -> None:
    """Also where they are more than a join that is drawn."""
    passages = parts(24, length=100)
    examples = examples_of(passages[:8], *(passages[at : at + 4] for at in range(8, 24, 4)))
    work = fitting_of(model, examples)  # joins of at most 256 tokens
    asked = {one.question: one.pieces for half in work.halves for one in half.examples}
    assert asked["0?"] == passages[:8]
    least = fitting_of(model, examples, asked_tokens=300)
    asked = {one.question: one.pieces for half in least.halves for one in half.examples}
    assert asked["0?"] == passages[:3]


def test_a_long_passage_that_is_also_a_text_is_not_fitted_on_twice(model: Any) -> None:
    passages = parts(20, length=120)  # texts are cut into 64 tokens, passages are not
    examples = examples_of(*(passages[at : at + 4] for at in range(0, 20, 4)))
    work = fitting_of(model, examples)
    work.take([*passages, *parts(1, length=99)], examples)
    own = [piece for half in work.halves for piece in half.pieces]
    assert sorted(map(len, own)) == [35, 64, *[120] * 20]


def test_every_question_is_measured_by_seams_that_have_not_seen_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [tuple(piece) for piece in pieces(60)]
    examples = examples_of(*(every[at : at + 5] for at in range(0, 60, 5)))
    work = fitting_of(model, examples, answers=12)
    fitted: dict[int, set[Part]] = {}
    known: dict[int, set[Part]] = {}
    measured = []
    add, solved, measure = work._add, work._solved, work._measured

    def adds(sums: JoinSums, drawn: Drawn, *read: Any, **named: Any) -> None:
        fitted.setdefault(id(sums), set()).update(map(tuple, drawn.pieces))
        add(sums, drawn, *read, **named)

    def solves(sums: JoinSums) -> Seams:
        seams = solved(sums)
        known[id(seams)] = set(fitted[id(sums)])
        return seams

    def measures(asked: _Asked, half: Any, seams: Seams, sums: JoinSums) -> Any:
        assert not set(map(tuple, asked.pieces)) & known[id(seams)]
        measured.append(asked.questions[0])
        return measure(asked, half, seams, sums)

    monkeypatch.setattr(work, "_add", adds)
    monkeypatch.setattr(work, "_solved", solves)
    monkeypatch.setattr(work, "_measured", measures)
    said: dict[str, Klds] = {}
    work.on_measured = lambda pieces, questions, klds: said.update(dict.fromkeys(questions, klds))
    told: list[float] = []
    seams = work.run(lambda what, done, left_s: told.append(done))
    assert sorted(measured) == sorted(one.question for one in examples)
    assert told[-1] == 1.0
    means = np.mean([*said.values()], axis=0)
    assert [seams.joined, *seams.expected.values()] == [pytest.approx(one) for one in means]
    assert set(seams.intervals) == set(seams.expected)
    for share, (first, mean) in seams.expected.items():
        for figure, (low, high) in zip((first, mean), seams.intervals[share], strict=True):
            assert 0 <= low <= figure <= high


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
