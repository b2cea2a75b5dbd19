"""Every family that transformers registers: exact, klt, or refused, as docs/models.md says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kdn.engines.handover_probe import check_handover
from kdn.engines.reading import new_cache
from kdn.engines.transformers import from_dynamic_cache, to_dynamic_cache
from kdn.errors import UnsupportedError
from tests.engines import family_table
from tests.engines.family_models import FAMILIES, build
from tests.engines.family_trials import NO, UNKNOWN, YES

SAMPLE = (
    "bloom", "cpmant", "deepseek_v3", "falcon_h1", "gemma3_text", "gemma3n_text",
    "gemma4_text", "gpt2", "gpt_oss", "gptj", "llama", "llama, dynamic NTK", "llama4_text",
    "mamba", "mimo_v2_flash", "mllama", "moshi", "moss_transcribe_diarize", "nanochat",
    "phi3, longrope", "qwen2, windows", "qwen3_next", "roformer",
)  # fmt: skip
"""One of each kind: what runs in every `make test`."""


@pytest.fixture(scope="module")
def table() -> dict[str, family_table.Row]:
    return family_table.read()


def test_the_table_names_every_family(table: dict[str, family_table.Row]) -> None:
    assert sorted(table) == sorted([*FAMILIES, *family_table.VARIANTS])
    assert family_table.made_with() == transformers.__version__
    for row in table.values():
        assert row.exact in (YES, NO, UNKNOWN)
        assert (row.exact == YES) == (row.klt == YES)
        assert row.exact == YES or row.remarks, f"{row.family}: why not?"


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_table(name: str, table: dict[str, family_table.Row]) -> None:
    assert family_table.trial_of(name) == table[name]


@pytest.mark.families
@pytest.mark.parametrize("name", sorted({*FAMILIES, *family_table.VARIANTS} - set(SAMPLE)))
def test_the_rest_of_the_table(name: str, table: dict[str, family_table.Row]) -> None:
    assert family_table.trial_of(name) == table[name]


def test_the_probe_sees_what_a_handover_loses() -> None:
    """A value of one layer, or a token."""
    model = build("llama")

    def hand_over(past: Any, spoil: Any) -> Any:
        cache = from_dynamic_cache(past)
        spoil(cache)
        return to_dynamic_cache(cache, model.config)

    def check(spoil: Any) -> None:
        check_handover(model, lambda: new_cache(model), lambda past: hand_over(past, spoil))

    check(lambda cache: None)
    for spoil in (
        lambda cache: cache.values[1].zero_(),
        lambda cache: cache.keys[:, 3].zero_(),
        lambda cache: cache.keys.copy_(cache.keys.roll(1, dims=3)),
    ):
        with pytest.raises(UnsupportedError, match="other logits"):
            check(spoil)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text", "gpt2"])
def test_the_probe_allows_for_rounding(family: str, dtype: torch.dtype, tmp_path: Any) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=dtype)
    config = model.config.get_text_config(decoder=True)
    check_handover(
        model,
        lambda: new_cache(model),
        lambda past: to_dynamic_cache(from_dynamic_cache(past), config),
    )
