"""What several tests of the vLLM connector share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdn.engines.vllm.shared import SharedSession
from tests.engines.vllm_working import shared_session


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedSession]:
    with shared_session(tmp_path / "folder") as shared:
        yield shared
