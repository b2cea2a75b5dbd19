"""Sums: gradients as columns where layers have windows, and what is resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.spec import ModelSpec
from kdn.calibrate.moments import Columns, Moments, _drawn
from kdn.errors import UnsupportedError


def test_what_a_window_reads_counts_as_if_all_were_read() -> None:
    """Two layers whose tokens matter alike where they are read: the windowed one is read at the
    last 9 of 90 tokens, and must get the same weight."""
    spec = ModelSpec(2, 1, 2, 10, (None, None), (None, 10), b"\0" * 16)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 90, 1, 2, generator=generator).sign()
    keys[1, :-9] = 0
    columns = Columns(spec, ((0, 1), (1, 2))).of_gradient(keys, keys)
    weight = columns.square().mean(dim=0)
    np.testing.assert_allclose(weight.numpy(), 1.0, rtol=1e-5)


def test_a_window_longer_than_the_context_changes_nothing() -> None:
    spec = ModelSpec(1, 1, 2, 10, (None,), (4096,), b"\0" * 16)
    keys = torch.randn(1, 90, 1, 2)
    columns = Columns(spec, ((0, 1),)).of_gradient(keys, keys)
    assert torch.equal(columns, torch.cat([keys[0, :, 0], keys[0, :, 0]], dim=1))


def test_sums_of_other_shapes_are_restored_in_no_part() -> None:
    device = torch.device("cpu")
    sums = Moments.zeros(5, [slice(0, 4)], device)
    other = Moments.zeros(5, [slice(0, 6)], device)
    other.num_windows = 3
    with pytest.raises(ValueError, match="shapes"):
        sums.restore(other.tensors())
    assert sums.num_windows == 0


def test_a_gradient_that_is_no_number_is_refused_at_once() -> None:
    sums = Moments.zeros(5, [slice(0, 4)], torch.device("cpu"))
    gradient = torch.ones(9, 4)
    sums.add_fisher(gradient, [slice(0, 4)])
    with pytest.raises(UnsupportedError, match="not a number"):
        sums.add_fisher(gradient.index_fill(0, torch.tensor([7]), torch.nan), [slice(0, 4)])
    assert sums.num_gradients == 5
    assert torch.isfinite(sums.fisher[0]).all()


def test_labels_are_drawn_as_likely_as_they_are() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3])
    generator = torch.Generator().manual_seed(0)
    drawn = _drawn(probs.log().expand(20_000, 4), generator)[:, 0]
    found = torch.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(found.numpy(), probs.numpy(), atol=0.015)
    assert found[1] == 0
