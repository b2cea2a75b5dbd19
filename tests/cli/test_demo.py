"""The demo's figures, on a tiny model with the lossless codec: what they must be is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.cache.keys import Namespace, cut
from kdn.cli import demo
from kdn.codec.exact import ExactCodec
from kdn.engines.quality import QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import MismatchError

CONTEXT = 400


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("mistral", {"sliding_window": 64})],
    ids=["full", "windows"],
)
def test_the_lossless_codec_changes_nothing(
    family: str, settings: dict[str, Any], tiny_model: Any
) -> None:
    model = tiny_model(family, **settings)
    codec = ExactCodec(spec_of(model))
    tokens = np.random.default_rng(3).integers(3, 128, CONTEXT + demo.CONTINUATION_TOKENS)
    probe = QualityProbe(model, tokens, CONTEXT)
    chunks = cut(tokens[:CONTEXT], Namespace(codec.spec.fingerprint, codec.profile_id))
    streams = codec.encode_all(chunks, probe.cache)
    row = demo.compare(codec, chunks, streams, probe, codec.num_levels)
    assert row.size_bytes == sum(map(len, streams))
    assert row.quality.kld == 0
    assert row.quality.recall_kld == 0
    assert row.quality.top1 == 1
    assert row.decode_s > 0


def test_the_whole_demo(
    tiny_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "story.txt"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(CONTEXT + 130)))
    monkeypatch.setattr(demo, "load_model", lambda name: (tiny_model("llama"), letters))
    monkeypatch.setattr("kdn.codec.open_codec", lambda name, spec: ExactCodec(spec), raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    demo.run("tiny", text, CONTEXT)
    shown = capsys.readouterr().out
    assert f"KV cache of {CONTEXT} tokens of story" in shown
    assert f"{2 * 2 * CONTEXT * 4 * 2 * 16 / 1e6:.2f}" in shown  # fp16 megabytes
    assert "100.0%" in shown


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **options: Any) -> Any:
        self.input_ids = [ord(letter) for letter in text]
        return self


letters = Letters()


def test_a_text_too_short(tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a" * 100)
    monkeypatch.setattr(demo, "load_model", lambda name: (tiny_model("llama"), letters))
    monkeypatch.setattr("kdn.codec.open_codec", lambda name, spec: ExactCodec(spec), raising=False)
    with pytest.raises(MismatchError, match="100 tokens"):
        demo.run("tiny", text, CONTEXT)


@pytest.mark.model
def test_the_demo_as_shipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    demo.run("smollm2", None, 1024)
    shown = capsys.readouterr().out
    assert "KV cache of 1024 tokens" in shown
