"""The canonical layout refuses what does not fit and slices by absolute position."""

from __future__ import annotations

import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.errors import MismatchError


def numbered(num_layers: int = 2, num_tokens: int = 6, start: int = 0) -> KVCache:
    keys = torch.arange(num_layers * num_tokens * 3 * 4, dtype=torch.float32)
    keys = keys.reshape(num_layers, num_tokens, 3, 4)
    return KVCache(keys, -keys, start)


def test_axes_have_names() -> None:
    cache = numbered(start=10)
    assert (cache.num_layers, cache.num_tokens, cache.num_kv_heads, cache.head_dim) == (2, 6, 3, 4)
    assert (cache.start, cache.end) == (10, 16)
    assert cache.dtype == torch.float32
    assert cache.size_bytes == 2 * 2 * 6 * 3 * 4 * 4


def test_every_layer_is_complete_by_default() -> None:
    assert numbered(start=10).valid_from == (10, 10)
    assert numbered(start=10).is_complete


def test_a_window_layer_says_what_it_lacks() -> None:
    cache = numbered(start=10)
    windowed = KVCache(cache.keys, cache.values, 10, (10, 13))
    assert not windowed.is_complete
    assert windowed.slice(11, 14).valid_from == (11, 13)
    assert windowed.slice(14, 16).valid_from == (14, 14)
    assert windowed.slice(10, 12).valid_from == (10, 12)  # holds none of it


def test_slice_is_by_position_and_a_view() -> None:
    cache = numbered(start=10)
    part = cache.slice(12, 15)
    assert part.start == 12
    assert part.end == 15
    assert torch.equal(part.keys, cache.keys[:, 2:5])
    assert torch.equal(part.values, cache.values[:, 2:5])
    part.keys.zero_()
    assert cache.keys[:, 2:5].abs().max() == 0


def test_slice_may_be_empty() -> None:
    assert numbered(start=10).slice(12, 12).num_tokens == 0


@pytest.mark.parametrize(("start", "end"), [(9, 12), (12, 17), (14, 12)])
def test_slice_outside_is_refused(start: int, end: int) -> None:
    with pytest.raises(MismatchError, match="not within"):
        numbered(start=10).slice(start, end)


def test_a_copy_has_memory_of_its_own() -> None:
    part = numbered(start=10).slice(12, 15)
    copied = part.copy()
    part.keys.zero_()
    assert copied.keys.abs().sum() > 0
    assert (copied.start, copied.end, copied.valid_from) == (12, 15, part.valid_from)
    assert copied.ready is None
    assert copied.queued() is copied, "what a CPU has computed is there"


def test_empty_is_zeroed() -> None:
    cache = KVCache.empty(2, 5, 3, 4, dtype=torch.float16, start=7, valid_from=(7, 9))
    assert tuple(cache.keys.shape) == (2, 5, 3, 4)
    assert cache.dtype == torch.float16
    assert cache.valid_from == (7, 9)
    assert not cache.keys.any()
    assert not cache.values.any()


@pytest.mark.parametrize(
    ("keys", "values", "start", "valid_from"),
    [
        (torch.zeros(2, 6, 3), torch.zeros(2, 6, 3), 0, ()),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 5), 0, ()),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4).half(), 0, ()),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4, device="meta"), 0, ()),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4), -1, ()),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4), 0, (0,)),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4), 0, (0, 7)),
        (torch.zeros(2, 6, 3, 4), torch.zeros(2, 6, 3, 4), 5, (5, 4)),
    ],
    ids=["rank", "shape", "dtype", "device", "start", "too few", "after end", "before start"],
)
def test_what_does_not_fit_is_refused(
    keys: torch.Tensor, values: torch.Tensor, start: int, valid_from: tuple[int, ...]
) -> None:
    with pytest.raises(MismatchError):
        KVCache(keys, values, start, valid_from)
