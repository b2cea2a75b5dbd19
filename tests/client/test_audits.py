"""A share of the answers is held against what the model's own cache would have said."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from kdn.client.asynchronous import AsyncClient
from tests.client.clients import QUESTION, TEXT, in_folder


def test_an_audit_of_a_lossless_cache_finds_no_divergence(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), audit_share=1.0)
    async def metrics(client: AsyncClient) -> Any:
        await client.learn("notes", TEXT)
        await client.ask("notes", QUESTION, max_new_tokens=10).read()
        return client.metrics

    assert (metrics.answers, metrics.audits, metrics.audited_tokens) == (1, 1, 10)
    assert metrics.audit_kld < 1e-6  # nothing was lost


def test_only_the_share_that_was_asked_for_is_audited(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), audit_share=0.5, rng=Random(0))
    async def metrics(client: AsyncClient) -> Any:
        await client.learn("notes", TEXT)
        for _ in range(8):
            await client.ask("notes", QUESTION, max_new_tokens=1).read()
        return client.metrics

    # Of the first eight numbers of Random(0), the third, fourth, sixth and eighth are below 0.5.
    assert (metrics.answers, metrics.audits) == (8, 4)


def test_an_audit_that_fails_is_counted_and_harms_nobody(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("kdn.client.audit.divergences", broken)

    @in_folder(tmp_path, tiny_model("llama"), audit_share=1.0)
    async def metrics(client: AsyncClient) -> Any:
        await client.learn("notes", TEXT)
        await client.ask("notes", QUESTION, max_new_tokens=2).read()
        return client.metrics

    assert (metrics.audits, metrics.failed_audits) == (0, 1)
