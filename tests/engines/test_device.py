"""Which device and dtype a model is loaded on and as, and models that were loaded by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdn.client.engine import load_pair
from kdn.engines.device import MIN_FREE_BYTES, check_placed, chosen_device, chosen_dtype
from kdn.errors import UnsupportedError
from tests.client.letters import Letters

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (MIN_FREE_BYTES, 80 << 30))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_used_if_there_is_one() -> None:
    assert chosen_device() == chosen_device("auto") == chosen_device("cuda") == FIRST
    assert chosen_device(torch.device("cuda:1")) == chosen_device("cuda:1") == SECOND
    assert chosen_device("cpu") == CPU
    with pytest.raises(UnsupportedError, match="no cuda:2 here, torch sees 2"):
        chosen_device("cuda:2")


@pytest.mark.usefixtures("two_gpus")
def test_one_that_others_use_is_not_taken_unasked(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen_device("auto", lambda _: MIN_FREE_BYTES - 1) == CPU
    assert len(caplog.records) == 1
    assert "cuda:0 has 4.0 GiB of memory free" in caplog.text
    assert chosen_device("cuda", lambda _: 0) == FIRST


@pytest.mark.usefixtures("two_gpus")
def test_one_that_is_too_full_to_be_asked_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.device) -> tuple[int, int]:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    assert chosen_device() == CPU


@pytest.mark.usefixtures("no_gpu")
def test_without_one_the_cpu_is() -> None:
    assert chosen_device() == CPU
    with pytest.raises(UnsupportedError, match="no cuda here, torch sees 0"):
        chosen_device("cuda")


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), torch.bfloat16), ((7, 5), torch.float32)]
)
def test_the_dtype_is_the_devices(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert chosen_dtype(None, FIRST) == expected
    assert chosen_dtype(None, CPU) == torch.float32
    for device in (CPU, FIRST):
        assert chosen_dtype("float16", device) == torch.float16
        assert chosen_dtype(torch.bfloat16, device) == torch.bfloat16


def test_a_model_that_is_given_stays_as_it_is(tiny_model: Any) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    for device, dtype in (("auto", None), ("cpu", None), ("auto", "bfloat16")):
        assert load_pair((model, Letters()), device, dtype)[0] is model
    assert model.dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match=r"expected torch.bfloat16, the model's own"):
        load_pair((model, Letters()), "cpu", "float32")


@pytest.mark.usefixtures("two_gpus")
def test_one_that_is_elsewhere_is_not_moved(tiny_model: Any) -> None:
    with pytest.raises(UnsupportedError, match="expected cpu, the model's own, found cuda"):
        load_pair((tiny_model("llama"), Letters()), "cuda")


def test_one_that_is_spread_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedError, match="spread over several devices: cpu, meta"):
        check_placed(model, "auto", None)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cpu", None, torch.float32), ("auto", "bfloat16", torch.bfloat16)],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_model_is_loaded_as_told(
    device: str, dtype: str | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(*arguments: Any) -> tuple[Any, Any]:
        asked.append(arguments)
        raise UnsupportedError("enough")

    monkeypatch.setattr("kdn.engines.models.load_model", load)
    with pytest.raises(UnsupportedError, match="enough"):
        load_pair("smollm2", device, dtype)
    assert asked == [("smollm2", expected, CPU)]
