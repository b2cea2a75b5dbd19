"""Paged layouts against a reference that places every element by hand; ranks and their heads."""

from __future__ import annotations

import pytest
import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import Heads, Layout, PagedCache, Scales, layout_of, views
from kdn.errors import MismatchError, UnsupportedError

LAYERS, HEADS, DIM, BLOCKS, BLOCK = 3, 2, 8, 7, 4
SHAPES = {
    Layout.HEADS_FIRST: (BLOCKS, HEADS, BLOCK, 2 * DIM),
    Layout.CPU: (BLOCKS, HEADS, BLOCK, 2 * DIM),
    Layout.PAIR_FIRST: (2, BLOCKS, BLOCK, HEADS, DIM),
    Layout.PAIR_SECOND: (BLOCKS, 2, BLOCK, HEADS, DIM),
}


def spec(heads: int = HEADS) -> ModelSpec:
    return ModelSpec(LAYERS, heads, DIM, 100, (None,) * LAYERS, (None,) * LAYERS, b"m" * 16)


def random_cache(tokens: int, heads: int = HEADS, start: int = 0) -> KVCache:
    generator = torch.Generator().manual_seed(tokens)
    keys, values = torch.randn(2, LAYERS, tokens, heads, DIM, generator=generator)
    return KVCache(keys, values, start)


def reference(layer: torch.Tensor, layout: Layout, block: int, token: int, head: int) -> tuple:
    """One token's key and value, picked element by element out of flat memory."""
    flat = layer.reshape(-1)
    if layout is Layout.CPU:
        base = (block * HEADS + head) * BLOCK * 2 * DIM
        keys = [flat[base + d * BLOCK + token] for d in range(DIM)]
        values = [flat[base + BLOCK * DIM + token * DIM + d] for d in range(DIM)]
    elif layout is Layout.HEADS_FIRST:
        base = ((block * HEADS + head) * BLOCK + token) * 2 * DIM
        keys, values = (list(flat[base + i * DIM : base + (i + 1) * DIM]) for i in (0, 1))
    elif layout is Layout.PAIR_FIRST:
        at = [(((i * BLOCKS + block) * BLOCK + token) * HEADS + head) * DIM for i in (0, 1)]
        keys, values = (list(flat[a : a + DIM]) for a in at)
    else:
        at = [(((block * 2 + i) * BLOCK + token) * HEADS + head) * DIM for i in (0, 1)]
        keys, values = (list(flat[a : a + DIM]) for a in at)
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize("layout", list(Layout))
def test_every_element_is_where_the_reference_says(layout: Layout) -> None:
    layers = [torch.zeros(SHAPES[layout]) for _ in range(LAYERS)]
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, layout)
    cache = random_cache(12)
    block_ids = [5, 0, 3]
    paged.write(cache, 0, 12, block_ids)
    for layer in range(LAYERS):
        for token in range(12):
            for head in range(HEADS):
                block = block_ids[token // BLOCK]
                key, value = reference(layers[layer], layout, block, token % BLOCK, head)
                assert torch.equal(key, cache.keys[layer, token, head])
                assert torch.equal(value, cache.values[layer, token, head])
    untouched = torch.stack([torch.stack(views(layer, layout)) for layer in layers])
    assert not untouched[:, :, [1, 2, 4, 6]].any()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("start", "end"), [(0, 12), (4, 8), (3, 9), (8, 11)])
def test_what_was_written_is_read(layout: Layout, start: int, end: int) -> None:
    layers = [torch.full(SHAPES[layout], 9.0) for _ in range(LAYERS)]
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, layout)
    cache = random_cache(12)
    paged.write(cache, 0, 12, [6, 2, 1])
    found = paged.read(start, end, [6, 2, 1, 4])
    assert (found.start, found.end) == (start, end)
    assert torch.equal(found.keys, cache.keys[:, start:end])
    assert torch.equal(found.values, cache.values[:, start:end])


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    ("start", "end"), [(12, 16), (9, 15), (9, 11), (11, 13), (8, 13), (10, 16)]
)
def test_only_the_tokens_of_a_part_are_written(layout: Layout, start: int, end: int) -> None:
    """Whole blocks or not: chunks that meet within a block are written one after the other."""
    layers = [torch.full(SHAPES[layout], 9.0) for _ in range(LAYERS)]
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, layout)
    cache = random_cache(8, start=8)  # tokens 8 to 16 of a context
    paged.write(cache, start, end, [1, 2, 3, 4])
    found = paged.read(0, 16, [1, 2, 3, 4])
    for here, given in ((found.keys, cache.keys), (found.values, cache.values)):
        assert torch.equal(here[:, start:end], given[:, start - 8 : end - 8])
        here[:, start:end] = 9.0
        assert (here == 9.0).all()
    assert all((view[[0, 5, 6]] == 9.0).all() for layer in layers for view in views(layer, layout))


def test_a_strided_tensor_is_written_through() -> None:
    """On a GPU heads and tokens may lie in memory in either order."""
    raw = [torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM) for _ in range(LAYERS)]
    layers = [one.transpose(1, 2) for one in raw]
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, Layout.HEADS_FIRST)
    cache = random_cache(4)
    paged.write(cache, 0, 4, [2])
    assert torch.equal(raw[1][2, :, :, :DIM], cache.keys[1])
    assert torch.equal(raw[1][2, :, :, DIM:], cache.values[1])


def test_kernels_with_smaller_blocks() -> None:
    small = [torch.zeros(4 * BLOCKS, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    paged = PagedCache(small, spec(), Heads(0, HEADS), 4 * BLOCK)
    cache = random_cache(32)
    paged.write(cache, 0, 32, [3, 1])
    keys, _ = views(small[0], Layout.CPU)
    assert torch.equal(keys[12:16].flatten(0, 1), cache.keys[0, :16])
    assert torch.equal(keys[4:8].flatten(0, 1), cache.keys[0, 16:])
    assert torch.equal(paged.read(5, 20, [3, 1]).values, cache.values[:, 5:20])
    paged.write(random_cache(32), 6, 21, [2, 0])
    assert torch.equal(paged.read(6, 21, [2, 0]).keys, cache.keys[:, 6:21])


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
    ],
)
def test_heads_of_ranks(heads: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    found = [Heads.of_rank(heads, rank, ranks) for rank in range(ranks)]
    assert [(one.first, one.count) for one in found] == expected


def test_uneven_ranks_are_refused() -> None:
    for heads, ranks in ((3, 2), (2, 3)):
        with pytest.raises(UnsupportedError, match="ranks"):
            Heads.of_rank(heads, 0, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_takes_its_heads(ranks: int) -> None:
    """Together the ranks hold the whole cache."""
    cache = random_cache(8, heads=4)
    found = []
    for rank in range(ranks):
        heads = Heads.of_rank(4, rank, ranks)
        layers = [torch.zeros(BLOCKS, heads.count, BLOCK, 2 * DIM) for _ in range(LAYERS)]
        paged = PagedCache(layers, spec(4), heads, BLOCK)
        paged.write(cache, 0, 8, [1, 0])
        found.append(paged.read(0, 8, [1, 0]))
    assert torch.equal(torch.cat([one.keys for one in found], dim=2), cache.keys)
    assert torch.equal(torch.cat([one.values for one in found], dim=2), cache.values)


def test_another_dtype_is_rounded() -> None:
    layers = [torch.zeros(SHAPES[Layout.CPU], dtype=torch.bfloat16) for _ in range(LAYERS)]
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK)
    cache = random_cache(4)
    paged.write(cache, 0, 4, [0])
    assert torch.equal(paged.read(0, 4, [0]).keys, cache.keys.bfloat16())


def test_layouts_are_told_by_shape() -> None:
    assert layout_of(torch.zeros(SHAPES[Layout.CPU]), HEADS, DIM) is Layout.CPU
    on_meta = torch.zeros(SHAPES[Layout.HEADS_FIRST], device="meta")
    assert layout_of(on_meta, HEADS, DIM) is Layout.HEADS_FIRST
    for layout in (Layout.PAIR_FIRST, Layout.PAIR_SECOND):
        assert layout_of(torch.zeros(SHAPES[layout]), HEADS, DIM) is layout
    for shape in ((BLOCKS, BLOCK, 2 * DIM), (BLOCKS, HEADS, BLOCK, DIM), (3, 4, BLOCK, HEADS, 9)):
        with pytest.raises(UnsupportedError, match="no layout"):
            layout_of(torch.zeros(shape), HEADS, DIM)


def test_what_does_not_fit_is_refused() -> None:
    layers = [torch.zeros(SHAPES[Layout.CPU]) for _ in range(LAYERS)]
    with pytest.raises(UnsupportedError, match="2 layers"):
        PagedCache(layers[:2], spec(), Heads(0, HEADS), BLOCK)
    with pytest.raises(UnsupportedError, match="blocks of 6"):
        PagedCache(layers, spec(), Heads(0, HEADS), 6)
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK)
    with pytest.raises(MismatchError, match="not in 1 blocks"):
        paged.write(random_cache(8), 0, 6, [0])
    with pytest.raises(MismatchError, match="not in 1 blocks"):
        paged.read(0, 8, [0])


def physical(layout: Layout, tokens_first: bool = False) -> torch.Tensor:
    """A layer as vLLM has it, whose heads and tokens may lie in memory in either order."""
    if not tokens_first:
        return torch.zeros(SHAPES[layout])
    return torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)


@pytest.mark.parametrize(
    ("layout", "tokens_first"),
    [(Layout.HEADS_FIRST, False), (Layout.HEADS_FIRST, True),
     (Layout.PAIR_FIRST, False), (Layout.PAIR_SECOND, False)],
)  # fmt: skip
@pytest.mark.parametrize("per_block", [1, 2])
def test_a_slot_is_where_the_views_have_its_token(
    layout: Layout, tokens_first: bool, per_block: int
) -> None:
    layers = [physical(layout, tokens_first) for _ in range(LAYERS)]
    for layer in layers:
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(1)))
    block = BLOCK * per_block
    paged = PagedCache(layers, spec(), Heads(0, HEADS), block, layout)
    rows = paged.rows
    assert rows is not None
    ids = [2, 0, 1] if per_block == 2 else [5, 0, 3]
    slots = paged.slots(1, 3 * block - 1, ids)
    keys, values = views(layers[1], layout)
    for token, slot in zip(range(1, 3 * block - 1), slots, strict=True):
        kernel = ids[token // block] * per_block + token % block // BLOCK
        assert torch.equal(rows.keys[1][slot], keys[kernel, token % BLOCK])
        assert torch.equal(rows.values[1][slot], values[kernel, token % BLOCK])
    assert rows.num_slots > int(slots.max())


def test_no_slots_where_blocks_lie_at_odd_distances() -> None:
    """As with pages that are padded; and not in the CPU's layout. They are read and written all
    the same."""
    padded = HEADS * BLOCK * 2 * DIM + 6
    layers = [
        torch.zeros(BLOCKS * padded).as_strided(
            (BLOCKS, HEADS, BLOCK, 2 * DIM), (padded, 2 * DIM, HEADS * 2 * DIM, 1)
        )
        for _ in range(LAYERS)
    ]
    paged = PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, Layout.HEADS_FIRST)
    assert paged.rows is None
    cache = random_cache(8)
    paged.write(cache, 0, 8, [1, 2])
    assert torch.equal(paged.read(0, 8, [1, 2]).values, cache.values)
    cpu = [torch.zeros(SHAPES[Layout.CPU]) for _ in range(LAYERS)]
    assert PagedCache(cpu, spec(), Heads(0, HEADS), BLOCK).rows is None


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e4m3fn])
def test_a_cache_of_8_bit_holds_scaled_values(kind: torch.dtype) -> None:
    layers = [torch.zeros(SHAPES[Layout.HEADS_FIRST], dtype=torch.uint8) for _ in range(LAYERS)]
    scales = Scales((0.5, 1.0, 2.0), (4.0, 1.0, 0.25))
    paged = PagedCache(
        [layer.view(kind) for layer in layers], spec(), Heads(0, HEADS), BLOCK,
        Layout.HEADS_FIRST, scales, torch.bfloat16,
    )  # fmt: skip
    assert paged.dtype is torch.bfloat16
    cache = random_cache(8)
    paged.write(cache, 0, 8, [1, 2])
    found = paged.read(0, 8, [1, 2])
    assert found.dtype is torch.bfloat16
    for layer in range(LAYERS):
        for side, given, scale in (
            (found.keys, cache.keys, scales.keys[layer]),
            (found.values, cache.values, scales.values[layer]),
        ):
            stored = (given[layer] / scale).to(torch.float8_e4m3fn)
            assert torch.equal(side[layer], (stored.float() * scale).bfloat16())
    raw = views(layers[0].view(torch.float8_e4m3fn), Layout.HEADS_FIRST)[0][1, 0]
    assert torch.equal(raw.float(), (cache.keys[0, 0] / 0.5).to(torch.float8_e4m3fn).float())
    # What was read and is written again is what was there: nothing is lost on the way.
    before = [layer.clone() for layer in layers]
    paged.write(found, 0, 8, [1, 2])
    assert all(torch.equal(a, b) for a, b in zip(before, layers, strict=True))


def test_kinds_of_elements_that_nobody_expects_are_refused() -> None:
    layers = [torch.zeros(SHAPES[Layout.CPU], dtype=torch.uint8) for _ in range(LAYERS)]
    with pytest.raises(UnsupportedError, match="uint8"):
        PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, dtype=torch.bfloat16)
    scales = Scales((1.0,) * LAYERS, (1.0,) * LAYERS)
    with pytest.raises(UnsupportedError, match="8 bit"):
        PagedCache(layers, spec(), Heads(0, HEADS), BLOCK, scales=scales, dtype=torch.bfloat16)
    floats = [torch.zeros(SHAPES[Layout.CPU]) for _ in range(LAYERS)]
    with pytest.raises(UnsupportedError, match="float32"):
        PagedCache(floats, spec(), Heads(0, HEADS), BLOCK, scales=scales, dtype=torch.bfloat16)
    mixed = [*layers[:2], layers[2].view(torch.int8)]
    with pytest.raises(UnsupportedError, match="different"):
        PagedCache(mixed, spec(), Heads(0, HEADS), BLOCK)
    uneven = [*floats[:2], torch.zeros(BLOCKS + 1, HEADS, BLOCK, 2 * DIM)]
    with pytest.raises(UnsupportedError, match="different"):
        PagedCache(uneven, spec(), Heads(0, HEADS), BLOCK)
