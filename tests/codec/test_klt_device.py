"""What is left to the reference when a GPU has too little memory, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.rows import TokenRows
from kdn.codec.base import Coded
from kdn.codec.klt import device as device_module
from kdn.codec.klt.device import GpuDecoding
from tests.codec.klt_profile import make_profile
from tests.codec.test_klt_input import SPEC


class Decoding(GpuDecoding):
    """On a device that never has enough."""

    def __init__(self) -> None:
        self.now_s, self.asked = 0.0, 0
        super().__init__(SPEC, make_profile(SPEC), lambda: self.now_s)

    def _decoder(self, device: torch.device, heads: range) -> Any:
        self.asked += 1
        raise torch.OutOfMemoryError("no")


def test_a_device_that_refused_is_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    decoding, asked = Decoding(), []
    side = [torch.zeros(8, SPEC.num_kv_heads, SPEC.head_dim) for _ in range(SPEC.num_layers)]
    rows = TokenRows(side, side, range(SPEC.num_kv_heads))
    chunk = cut([1] * 256, Namespace(b"", b""))[0]
    one = Coded(None, chunk, 1, np.zeros(256, np.int64))  # type: ignore[arg-type]
    for now_s in (0.0, 1.0, device_module.REFUSED_S - 0.1, device_module.REFUSED_S, 61.0):
        decoding.now_s = now_s
        assert decoding.begin_rows([one, one], rows).left() == [0, 1]
        asked.append(decoding.asked)
    assert asked == [1, 1, 1, 2, 3]
    assert caplog.text.count("lower --gpu-memory-utilization") == 2  # at once, and a minute later
