"""The check of a GPU, on one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kdn.doctor.check import OK, Situation
from kdn.doctor.model import check_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and find_spec("triton")),
        reason="needs a CUDA device and Triton",
    ),
]


def test_a_sound_gpu_decodes_as_the_cpu_does() -> None:
    found = check_gpu(Situation())
    assert found.status == OK
    assert torch.cuda.get_device_name() in found.told
