"""What is asked of single chunks adds up to what is asked of all."""

from __future__ import annotations

import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.codec.exact import ExactCodec
from kdn.delivery.request import Request, worst_kld
from kdn.delivery.sink import HostSink

SPEC = ModelSpec(1, 1, 8, 1000, (None,), (None,), b"m" * 16)


@pytest.mark.parametrize("num_tokens", [16, 256, 272, 512, 528, 800, 3504])
def test_chunks_that_are_good_enough_are_so_in_the_mean(num_tokens: int) -> None:
    codec = ExactCodec(SPEC)
    chunks = cut(range(num_tokens), Namespace(SPEC.fingerprint, codec.profile_id))
    request = Request(
        chunks, codec, (0.0,) * codec.num_levels, HostSink.of(codec, chunks, torch.float32)
    )
    worst = [worst_kld(chunk, num_tokens, 0.01) for chunk in chunks]
    parts = [
        chunk.num_tokens * weight for chunk, weight in zip(chunks, request.weights(), strict=True)
    ]
    mean = sum(part * kld for part, kld in zip(parts, worst, strict=True)) / sum(parts)
    assert 0 < mean <= 0.01
    assert worst[-1] == min(worst)


def test_an_end_that_is_not_known_is_far_away() -> None:
    [chunk] = cut(range(256), Namespace(b"m", b"p"))
    assert worst_kld(chunk, None, 0.01) > 0.01 > worst_kld(chunk, 256, 0.01)
    assert worst_kld(chunk, None, 0.0) == 0.0


def test_the_end_of_a_join_is_that_of_its_last_piece() -> None:
    """Wherever its chunks were learned."""
    space, codec = Namespace(b"m", b"p"), ExactCodec(SPEC)
    first, second, last = (
        cut(range(begin, begin + 280), space, whole=True) for begin in (0, 300, 600)
    )
    sink = HostSink.of(codec, first, torch.float32)
    request = Request([*first, *second, *last], codec, (0.0,), sink)
    assert request.num_tokens == 840
    weights = request.weights()
    assert weights[:4] == [1.0] * 4
    assert min(weights[4:]) > 2
