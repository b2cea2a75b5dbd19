"""What a session knows of vLLM's prompts, asked as the connector asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kdn.delivery.known import Known
from kdn.engines.vllm.shared import SharedSession
from tests.engines.vllm_working import (
    AWAY,
    TOKENS,
    publish,
    shared_session,
)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedSession]:
    with shared_session(tmp_path / "folder") as shared:
        yield shared


def know(
    shared: SharedSession, tokens: list[int], block_tokens: int = 16, limit_s: float = 10.0
) -> Known:
    return shared.submit(
        lambda: shared.session.know(tokens, block_tokens=block_tokens, whole=True, limit_s=limit_s)
    ).result(20)


@pytest.mark.parametrize(
    ("num_tokens", "block_tokens", "expected"),
    [
        (600, 16, [256, 512, 592]),
        (700, 16, [256, 512]),  # another tail
        (594, 128, [256, 512]),  # a tail that adds no whole block is not asked for
        (400, 16, [256]),
        (100, 16, []),
    ],
)
def test_the_longest_known_prefix(
    num_tokens: int, block_tokens: int, expected: list[int], shared: SharedSession
) -> None:
    publish(shared)
    tokens = TOKENS[:num_tokens] if num_tokens <= 600 else TOKENS[:590] + list(range(110))
    known = know(shared, tokens, block_tokens)
    assert [chunk.end for chunk in known.chunks] == expected
    assert not known.is_late


def test_exact_values_of_another_dtype_are_not_known(shared: SharedSession) -> None:
    publish(shared)
    assert know(shared, TOKENS).end == 592
    shared.session.dtype = torch.bfloat16
    assert know(shared, TOKENS).end == 0


def test_nobody_answers() -> None:
    with shared_session(AWAY) as shared:
        known = know(shared, TOKENS, limit_s=0.2)
        assert (known.end, known.is_late) == (0, True)
        assert know(shared, TOKENS[:200], limit_s=0.2).is_late  # with a tail only, too
