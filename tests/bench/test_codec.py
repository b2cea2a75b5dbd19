"""The whole command on a tiny model: rows that add up, the promised JSON, a plot, a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdn.bench import codec, measure
from kdn.engines.transformers import spec_of
from kdn.errors import FormatError, UnsupportedError

CONTEXT = 512
FIELDS = {
    "codec", "level", "text", "bytes", "bits_per_value", "ratio", "kld", "kld_p99", "recall_kld",
    "top1", "ppl", "encode_s", "decode_s", "prefill_s",
}  # fmt: skip


def letters(content: str, **_: Any) -> Any:
    """A tokenizer of one token per character."""
    return SimpleNamespace(input_ids=[ord(c) % 120 + 3 for c in content])


def write_text(path: Path, length: int, seed: int) -> Path:
    drawn = np.random.default_rng(seed).integers(97, 123, length)
    path.write_text("".join(map(chr, drawn)))
    return path


@pytest.fixture
def bench(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the command and returns its JSON."""
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    model = tiny_model("llama")
    monkeypatch.setattr(codec, "load_model", lambda name, device: (model, letters))

    def run(anew: bool = False, **options: Any) -> dict[str, Any]:
        out = tmp_path / "out.json"
        if anew:
            out.unlink(missing_ok=True)
        calibration = write_text(tmp_path / "other.txt", 2_000, seed=9)
        defaults: dict[str, Any] = {
            "text": [write_text(tmp_path / "long.txt", 3_000, seed=1)],
            "calibration": [calibration], "context": CONTEXT, "contexts": 2, "continuation": 20,
            "calibration_tokens": 1_024, "json_file": out, "codecs": "fp16,drop",
        }  # fmt: skip
        arguments = {**defaults, **options}
        codec.run(**arguments)
        loaded: dict[str, Any] = json.loads(out.read_text())
        return loaded

    return run


def test_every_rival_side_by_side(
    bench: Any,
    tmp_path: Path,
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kdn.bench.calibration.KVTC_RATIOS", (16.0, 4.0))
    monkeypatch.setattr("kdn.bench.rivals.shipped.Shipped.labels", ("32/16",))
    names = "fp16,exact,int8,cachegen-shipped,cachegen,kvtc,kvtc-nowindow,drop"
    short = write_text(tmp_path / "short.txt", 700, seed=2)
    long = write_text(tmp_path / "long.txt", 3_000, seed=1)
    found = bench(codecs=names, text=[long, short], plot_file=tmp_path / "out.png")
    rows = found["rows"]
    assert all(set(row) == FIELDS for row in rows)
    assert {row["text"] for row in rows} == {"long", "short"}
    assert list(found["ratio_at_quality"]) == names.split(",")
    values = spec_of(tiny_model("llama")).values_per_token * CONTEXT
    for row in rows:
        assert row["bits_per_value"] == pytest.approx(8 * row["bytes"] / values)
        assert row["ratio"] == pytest.approx(16 / row["bits_per_value"])
        assert row["kld"] >= 0
        assert row["prefill_s"] > 0
    half, whole = ([r for r in rows if r["codec"] == name] for name in ("fp16", "exact"))
    assert [r["bytes"] for r in half] == [2 * values] * 2
    assert [r["kld"] for r in half] == [r["kld"] for r in whole]
    by_text = [r for r in rows if r["codec"] == "kvtc-nowindow" and r["text"] == "long"]
    assert [r["level"] for r in by_text] == list(range(len(found["levels"]["kvtc-nowindow"])))
    assert by_text[0]["kld"] > by_text[-1]["kld"] > half[0]["kld"]
    assert found["settings"]["contexts"] == {"long": 2, "short": 2}
    assert any("short" in note and "overlap" in note for note in found["notes"])
    assert found["commit"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "cachegen-shipped" in shown
    assert "Ratio at quality" in shown


def test_contexts_follow_the_seed(bench: Any) -> None:
    one, same, other = (bench(seed=seed, anew=True)["rows"] for seed in (0, 0, 1))
    assert [r["kld"] for r in one] == [r["kld"] for r in same]
    assert [r["kld"] for r in one] != [r["kld"] for r in other]


def test_says_what_text_and_calibration_share(bench: Any, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    write_text(text, 3_000, seed=1)
    found = bench(calibration=[text])
    assert found["calibration"]["overlap"] == {"long": 1.0}
    assert any("100% of its 8-grams" in note for note in found["notes"])
    assert bench()["calibration"]["overlap"]["long"] < 0.01


def test_texts_of_one_name_are_told_apart(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    paths = [write_text(tmp_path / p, 1_500, i) for i, p in enumerate(("a.txt", "b/a.txt"))]
    assert set(bench(text=paths, contexts=1)["ratio_at_quality"]["drop"]) == {"a", "a-2"}


def test_refusals(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        bench(context=515)
    with pytest.raises(UnsupportedError, match="found 'nope'"):
        bench(codecs="fp16,nope")
    with pytest.raises(FormatError, match="tiny: expected at least 533 tokens, found 100"):
        bench(text=[write_text(tmp_path / "tiny.txt", 100, 0)])


def test_what_is_no_profile_is_refused_before_any_work(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(codec, "load_model", loaded)
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(b"no profile")
    for path in (wrong, tmp_path / "absent.safetensors"):
        with pytest.raises(FormatError, match="kdn klt profile"):
            bench(profile=path)


def test_contexts_begin_as_prompts_do(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    probe = measure.QualityProbe

    def watched(model: Any, ids: Any, context: int) -> Any:
        read.append(list(ids[:2]))
        return probe(model, ids, context)

    monkeypatch.setattr(measure, "QualityProbe", watched)
    monkeypatch.setattr(codec, "prompt_head", lambda _: np.array([1], dtype=np.uint32))
    found = bench(codecs="fp16")
    assert found["settings"]["begins_with"] == [1]
    assert {first for first, _ in read} == {1}
    assert all(second > 2 for _, second in read)


def stop_after(points: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stops the benchmark when so many were measured; counts them."""
    measured: list[Any] = []
    one = measure._point

    def counted(*given: Any) -> Any:
        if len(measured) == points:
            raise KeyboardInterrupt
        measured.append(given)
        return one(*given)

    monkeypatch.setattr(measure, "_point", counted)
    return measured


def test_a_run_that_was_stopped_goes_on_where_it_stood(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bench(codecs="fp16,drop,int8")
    (tmp_path / "out.json").unlink()
    levels = [len(whole["levels"][name]) for name in ("fp16", "drop", "int8")]
    total = 2 * sum(levels)  # two contexts
    with monkeypatch.context() as patch:
        stop_after(total - 2, patch)
        with pytest.raises(KeyboardInterrupt):
            bench(codecs="fp16,drop,int8")
    half = json.loads((tmp_path / "out.json").read_text())
    assert half["rows"]
    assert half["unfinished"]
    with monkeypatch.context() as patch:
        measured = stop_after(total, patch)
        resumed = bench(codecs="fp16,drop,int8")
    assert len(measured) == 2
    assert "rows already" in capsys.readouterr().err
    assert "unfinished" not in resumed
    exact = ("codec", "level", "text", "bytes", "kld", "kld_p99", "recall_kld", "top1", "ppl")
    assert [[row[k] for k in exact] for row in resumed["rows"]] == [
        [row[k] for k in exact] for row in whole["rows"]
    ]


def test_rows_are_kept_when_another_codec_is_asked_for(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench(codecs="fp16")
    measured = stop_after(1000, monkeypatch)
    found = bench(codecs="drop")
    assert len(measured) == 2 * len(found["levels"]["drop"])
    assert {row["codec"] for row in found["rows"]} == {"fp16", "drop"}
    assert set(found["levels"]) == {"fp16", "drop"}


@pytest.mark.parametrize("change", [{"seed": 1}, {"continuation": 21}, {"contexts": 1}])
def test_what_was_measured_otherwise_is_moved_aside(
    bench: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    first = bench(codecs="fp16")
    other = bench(codecs="fp16", **change)
    assert json.loads((tmp_path / "out.json.before").read_text())["rows"] == first["rows"]
    assert other["rows"][0]["kld"] != first["rows"][0]["kld"]


@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"settings": 3}', b"\xff\xfe"])
def test_another_file_is_not_lost(bench: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.json").write_bytes(content)
    assert bench(codecs="fp16")["rows"]
    assert (tmp_path / "out.json.before").read_bytes() == content
