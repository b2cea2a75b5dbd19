"""Sums: gradients as columns where layers have windows, and what is resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.spec import ModelSpec
from kdn.calibrate.moments import Columns, Moments


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
