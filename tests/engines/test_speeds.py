"""Speeds are measured once, and kept for this model on this machine."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kdn.codec.exact import ExactCodec
from kdn.delivery.sink import GPU_BATCH_CHUNKS
from kdn.engines.speeds import MeasuredSpeeds, measure, measured_speeds
from kdn.engines.transformers import spec_of


def test_the_arithmetic() -> None:
    speeds = MeasuredSpeeds(1e-3, 1e-6, (1e-4, 2e-4))
    assert speeds.decode_s(256, 2) == pytest.approx(0.0512)
    whole = speeds.prefill_s(0, 1000)
    assert whole == pytest.approx(1 + 1)
    assert speeds.prefill_s(0, 300) + speeds.prefill_s(300, 1000) == pytest.approx(whole)


def test_pieces_tell_what_reading_takes(tiny_model: Any) -> None:
    """With a clock that counts how often it is asked, every piece takes 1."""
    model = tiny_model("llama")
    codec = ExactCodec(spec_of(model))
    ticks = count()
    speeds = measure(model, codec, clock=lambda: float(next(ticks)))
    assert speeds.prefill_s(0, 256) == pytest.approx(1)
    assert speeds.prefill_s_per_token2 == 0
    assert speeds.decode_s(256, 1) == pytest.approx(1)


def test_they_are_kept(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    codec = ExactCodec(spec_of(model))
    first = measured_speeds(model, codec, folder=tmp_path)
    assert first.prefill_s_per_token > 0 < first.decode_s_per_token[0]
    [path] = tmp_path.iterdir()
    assert measured_speeds(model, codec, folder=tmp_path, clock=forbidden) == first
    other = tiny_model("qwen2")
    measured_speeds(other, ExactCodec(spec_of(other)), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for odd in ("", "{}", json.dumps({"prefill_s_per_token": -1})):
        path.write_text(odd)
        again = measured_speeds(model, codec, folder=tmp_path)
        assert again.prefill_s_per_token > 0


def forbidden() -> float:
    raise AssertionError("measured again")


def test_a_gpu_is_measured_on_several_chunks(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded by slots, as deliveries to a GPU are."""
    monkeypatch.setattr("kdn.engines.speeds.is_written_by_rows", lambda *_: True)
    model = tiny_model("llama")
    ticks = count()
    speeds = measure(model, ExactCodec(spec_of(model)), clock=lambda: float(next(ticks)))
    assert speeds.decode_s(GPU_BATCH_CHUNKS * 256, 1) == pytest.approx(1)
