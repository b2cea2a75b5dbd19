"""A delivery from nginx beside one from a node, over a slow link: the same levels and time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdn.bench.export import Document, Goal, compare, measure
from kdn.cache.tensors import KVCache
from tests.delivery.world import make_world, run
from tests.places.exports import needs_nginx

pytestmark = [needs_nginx, pytest.mark.alone]


def test_nginx_delivers_as_a_node_does(tmp_path: Path) -> None:
    world = make_world(6)
    size_bytes = sum(map(len, world.streams))
    parts = [[getattr(one, name) for one in world.caches] for name in ("keys", "values")]
    cache = KVCache(*(torch.cat(each, 1) for each in parts))
    mbit = 8 * size_bytes / 3.0 / 1e6  # all of it takes so many seconds
    document = Document(world.codec, world.chunks, cache, world.expected_kld)
    rows = run(measure(tmp_path, document, [mbit], [Goal(1.8, 0.0), Goal(None, 0.0)], 1), 60.0)
    assert not any(row.troubles for row in rows)
    partial, whole = compare(rows)
    assert partial.node_s < whole.node_s
    assert partial.nginx_s < whole.nginx_s
    assert abs(partial.nginx_level - partial.node_level) <= 1.0
    for level in (partial.node_level, partial.nginx_level):
        assert 0 < level < world.codec.num_levels
    assert whole.same_levels
    assert whole.nginx_level == world.codec.num_levels
    assert 0.6 < whole.ratio < 1.6
