"""What is held against what: exact caches, and a report against other text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kdn.bench.models import handover
from kdn.bench.models.handover import HandedOver, hand_over
from kdn.bench.models.judging import Judged
from kdn.bench.models.report import Row, document, plot, print_report
from kdn.bench.models.training import Trained
from kdn.cache.tensors import KVCache
from tests.conftest import LATENTS

CONTEXT = 272
WINDOW = np.random.default_rng(0).integers(3, 128, CONTEXT + 40).astype(np.uint32)
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 16,
    },
    "deepseek_v3": LATENTS | {"first_k_dense_replace": 4},
}


class Tokenizer:
    """Nothing is tokenised here: contexts are token ids."""

    chat_template = None
    all_special_ids = (1,)

    def __call__(self, text: str, **_: Any) -> Any:
        raise AssertionError("nothing is to be tokenised")


@pytest.mark.parametrize("family", SHAPES)
def test_a_model_goes_on_from_a_folder_token_for_token(
    family: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model(family, **SHAPES[family])
    found = hand_over(model, model, Tokenizer(), [WINDOW], CONTEXT)
    assert (found.contexts, found.tokens, found.same_tokens) == (1, 24, 24)
    assert found.same_bits
    assert found.is_exact


def test_a_wrong_cache_shows(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, through = tiny_model("llama"), handover._through_folder

    def wrong(*given: Any) -> tuple[KVCache, KVCache]:
        own, loaded = through(*given)
        return own, KVCache(loaded.keys.flip(1), loaded.values)

    monkeypatch.setattr(handover, "_through_folder", wrong)
    found = hand_over(model, model, Tokenizer(), [WINDOW], CONTEXT)
    assert not found.same_bits
    assert found.same_tokens < found.tokens
    assert not found.is_exact


def report(klds: list[float], ratio: float, speed: float) -> dict[str, Any]:
    levels = [{"ratio": 100.0 / 3**i, "kld": kld} for i, kld in enumerate(klds)]
    figures = {"ratio_at_quality": ratio, "prefill_over_decode": speed, "kld": klds[1]}
    return {"levels": levels, "figures": figures, "default_level": 1, "context": 512}


def judged(off: float = 0.2, ratio: float = 25.0, on_cpu: float = 20.0, same: int = 24) -> Judged:
    return Judged(
        report([0.1, 0.01], 30.0, 3.0), report([0.1, 0.01 * (1 + off)], ratio, 3.0), on_cpu,
        HandedOver(1, 24, same, True), 60.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "failing"),
    [
        (judged(), None),
        (judged(off=-0.2), None),
        (judged(off=0.3), "KLD within 25% of the report's"),
        (judged(off=-0.3), "KLD within 25% of the report's"),
        (judged(ratio=19.0), "ratio at quality at least 20"),
        (judged(on_cpu=15.0), "decoding at most 1/16 of prefill"),
        (judged(same=23), "exact token for token"),
    ],
)
def test_each_bar_fails_by_itself(told: Judged, failing: str | None) -> None:
    assert [name for name, passed in told.passes().items() if not passed] == (
        [failing] if failing else []
    )


def test_the_report_says_what_was_measured(tmp_path: Path) -> None:
    trained = Trained(
        "", "mha", 96_000_000, 10, 330_000, 60.0, 0.1, 3.5, 4.0, 7.0, 4.1, 0.5, 9_000, 0
    )
    rows = {"mha": Row(trained, judged(off=0.3))}
    results = document(rows, "cpu")
    assert json.loads(json.dumps(results))["models"]["mha"]["judged"]["off"] == pytest.approx(0.3)
    assert results["passes"]["mha: KLD within 25% of the report's"] is False
    console = Console(record=True, width=200)
    print_report(console, rows, results)
    said = console.export_text()
    assert "0.0130 (+30%)" in said
    assert "mha: KLD within 25% of the report's: FAILS" in said
    plot(tmp_path / "models.png", rows)
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
