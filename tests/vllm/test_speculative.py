"""Speculative decoding in a real vLLM: the same text, and nothing published that was only drafted.

Drafts are found in the prompt itself (n-grams), which repeats itself, so many are accepted and many
are not. What one engine publishes of its answers, another one loads and goes on from.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.harness import Engine, Node, connector, tiny_model

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
          "prompt_lookup_min": 1}  # fmt: skip
SETTINGS = {"max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True}
OPTIONS = {"max_tokens": 160, "detokenize": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompts() -> list[list[int]]:
    """Each says something over and over."""
    return [[5 + (7 * i * (one + 3)) % 200 for i in range(40)] * 9 for one in range(3)]


def test_answers_with_drafts_are_loaded_as_they_are(node: Node, logs: Path, model: str) -> None:
    with Engine(logs / "plain", model=model, **SETTINGS) as plain:
        truth = plain.generate(prompts=prompts(), **OPTIONS)["tokens"]
        going_on = [p + t[:-1] for p, t in zip(prompts(), truth, strict=True)]
        more = plain.generate(prompts=going_on, **OPTIONS)["tokens"]
    with Engine(
        logs / "drafting", model=model, speculative_config=DRAFTS,
        kv_transfer_config=connector(node.url, codec="exact"), **SETTINGS,
    ) as drafting:  # fmt: skip
        assert drafting.generate(prompts=prompts(), **OPTIONS)["tokens"] == truth
        assert drafting.flush()["published"] >= 6  # of 360 tokens and some of the answers
        drafted, accepted = drafting.drafts()
        assert 0 < accepted < drafted
    with Engine(
        logs / "loading", model=model, kv_transfer_config=connector(node.url, codec="exact"),
        **SETTINGS,
    ) as loading:  # fmt: skip
        answer = loading.generate(prompts=going_on, **OPTIONS)
        assert min(answer["cached"]) >= 512  # the second chunk has 152 tokens of the answer
        assert answer["tokens"] == more
