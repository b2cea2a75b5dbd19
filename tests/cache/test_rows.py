"""An engine's memory by slots: arrangements take the same values; what is strange is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.errors import KdnError, MismatchError, UnsupportedError

LAYERS, HEADS, DIM, SLOTS = 2, 4, 8, 40


def cache(num_tokens: int = 6, start: int = 0) -> KVCache:
    shape = (LAYERS, num_tokens, HEADS, DIM)
    keys = torch.randn(shape, generator=torch.Generator().manual_seed(num_tokens))
    return KVCache(keys, keys + 100, start)


def by_tokens(dtype: torch.dtype = torch.float32, heads: int = HEADS) -> TokenRows:
    """vLLM: a key, then a value side by side."""
    memory = [torch.full((SLOTS, heads, 2 * DIM), 7.0).to(dtype) for _ in range(LAYERS)]
    return TokenRows([m[..., :DIM] for m in memory], [m[..., DIM:] for m in memory], range(heads))


def by_heads() -> TokenRows:
    """transformers: each head's tokens one after the other."""
    keys, values = (torch.full((LAYERS, HEADS, SLOTS, DIM), 7.0) for _ in range(2))
    return TokenRows(list(keys.transpose(1, 2)), list(values.transpose(1, 2)), range(HEADS))


def by_blocks() -> TokenRows:
    """Blocks of 4 tokens with each head's tokens together: slots overlap, see the module."""
    views: list[list[torch.Tensor]] = [[], []]
    for side in views:
        for _ in range(LAYERS):
            block = torch.full((10, HEADS, 4, DIM), 7.0)
            slots = (block.numel() - (HEADS - 1) * 4 * DIM) // DIM
            side.append(block.as_strided((slots, HEADS, DIM), (DIM, 4 * DIM, 1)))
    return TokenRows(views[0], views[1], range(HEADS))


@pytest.mark.parametrize("make", [by_tokens, by_heads])
def test_each_token_goes_to_its_slot_and_nowhere_else(make) -> None:  # type: ignore[no-untyped-def]
    rows, given = make(), cache()
    slots = np.array([30, -1, 0, 39, 7, -1])
    rows.write(given, slots)
    untouched = np.setdiff1d(np.arange(SLOTS), slots)
    for layer in range(LAYERS):
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(rows.keys[layer][slot], given.keys[layer, token])
                assert torch.equal(rows.values[layer][slot], given.values[layer, token])
        assert torch.all(rows.keys[layer][untouched] == 7)
        assert torch.all(rows.values[layer][untouched] == 7)


def test_slots_may_overlap_where_blocks_have_their_heads_first() -> None:
    rows, given = by_blocks(), cache(4)
    block = 3
    rows.write(given, block * HEADS * 4 + np.arange(4))
    memory = rows.keys[1].as_strided((10, HEADS, 4, DIM), (HEADS * 4 * DIM, 4 * DIM, DIM, 1))
    assert torch.equal(memory[block].transpose(0, 1), given.keys[1])
    assert torch.all(memory[[b for b in range(10) if b != block]] == 7)


def test_a_share_of_heads_is_taken_from_all() -> None:
    given, whole = cache(), by_tokens(heads=2)
    rows = TokenRows(whole.keys, whole.values, range(1, 3))
    rows.write(given, np.arange(6))
    assert torch.equal(rows.values[1][:6], given.values[1, :, 1:3])


def test_quantised_memory_holds_values_over_scales() -> None:
    plain = by_tokens(torch.float8_e4m3fn)
    rows = TokenRows(plain.keys, plain.values, plain.heads, (0.5, 2.0), (4.0, 0.01))
    given = cache()
    rows.write(given, np.arange(6))
    for layer in range(LAYERS):
        found = rows.keys[layer][:6].float() * rows.key_scales[layer]
        assert torch.allclose(found, given.keys[layer], rtol=0.07, atol=0.01)
    assert torch.allclose(rows.values[0][:6].float() * 4, given.values[0], rtol=0.07)
    assert torch.all(rows.values[1][:6].float() == 448)  # 100 / 0.01 is beyond all it can hold


def test_what_a_layer_lacks_is_not_written() -> None:
    rows, given = by_tokens(), cache(start=10)
    windowed = KVCache(given.keys, given.values, 10, (10, 13))
    slots = np.arange(6)
    with pytest.raises(UnsupportedError, match="lacks tokens"):
        rows.write(windowed, slots)
    assert torch.all(rows.keys[0] == 7)
    rows.write(windowed, np.where(slots < 3, -1, slots))
    assert torch.equal(rows.keys[1][3:6], given.keys[1, 3:])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (np.arange(5), "6 slots"),
        (np.arange(6, dtype=np.int32), "int64"),
        (np.array([0, 1, 2, 3, 4, SLOTS]), "found 0 to 40"),
        (np.array([0, 1, 2, -2, 4, 5]), "found -2 to 5"),
    ],
)
def test_slots_are_checked_before_anything_is_written(slots: np.ndarray, message: str) -> None:
    rows = by_tokens()
    with pytest.raises(MismatchError, match=message):
        rows.write(cache(), slots)
    assert torch.all(rows.keys[0] == 7)


def test_caches_of_other_shapes_are_refused() -> None:
    rows = by_tokens()
    other = torch.zeros((LAYERS, 6, HEADS - 1, DIM))
    with pytest.raises(MismatchError, match="at least 4 heads"):
        rows.write(KVCache(other, other), np.arange(6))


def layers(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]


def strange_rows() -> list[tuple[type[KdnError], str, tuple[object, ...]]]:
    plain = layers(SLOTS, HEADS, DIM)
    wide = [one[:, :, ::2] for one in layers(SLOTS, HEADS, 2 * DIM)]
    padded = [plain[0], torch.zeros(SLOTS, HEADS, DIM + 8)[..., :DIM]]
    turned = [one.transpose(0, 1) for one in layers(HEADS, SLOTS, DIM)]
    return [
        (MismatchError, "as many layers", (plain, plain[:1], range(HEADS))),
        (MismatchError, "as many layers", ([], [], range(HEADS))),
        (MismatchError, "3 heads", (plain, plain, range(3))),
        (MismatchError, "neighbouring heads", (plain, plain, range(0, 8, 2))),
        (MismatchError, "neighbouring heads", (plain, plain, range(-4, 0))),
        (UnsupportedError, "channels 2 apart", (wide, wide, range(HEADS))),
        (MismatchError, "in every layer", (padded, plain, range(HEADS))),
        (MismatchError, "in every layer", ([plain[0], turned[0]], plain, range(HEADS))),
        (MismatchError, "one shape", (plain, layers(SLOTS, HEADS, 4), range(HEADS))),
        (MismatchError, "one dtype",
         (plain, layers(SLOTS, HEADS, DIM, dtype=torch.float16), range(HEADS))),
        (UnsupportedError, "int32", (layers(9, 4, 8, dtype=torch.int32),) * 2 + (range(HEADS),)),
        (MismatchError, "a scale for each", (plain, plain, range(HEADS), (1.0,))),
        (MismatchError, "above zero", (plain, plain, range(HEADS), (1.0, 0.0))),
        (MismatchError, "above zero", (plain, plain, range(HEADS), (), (1.0, float("nan")))),
    ]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "args"), strange_rows())
def test_strange_memory_is_refused_by_name(
    error: type[KdnError], message: str, args: tuple[object, ...]
) -> None:
    with pytest.raises(error, match=message):
        TokenRows(*args)  # type: ignore[arg-type]


def test_keys_and_values_may_have_different_strides() -> None:
    turned = [one.transpose(0, 1) for one in layers(HEADS, SLOTS, DIM)]
    rows = TokenRows(layers(SLOTS, HEADS, DIM), turned, range(HEADS))
    assert (rows.num_slots, rows.num_layers, rows.head_dim) == (SLOTS, LAYERS, DIM)
    rows.write(cache(), np.arange(6))
    assert torch.equal(rows.values[1][:6], cache().values[1])
