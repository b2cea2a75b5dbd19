"""Every reason why a chunk is not known, brought about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kdn.cache.keys import cut
from kdn.client import explain as reasons
from kdn.client.asynchronous import AsyncClient
from kdn.client.explain import Finding, explain, explain_join
from tests.client.clients import TEXT, in_folder
from tests.client.joins import NAMES, join_of, learn_all


def spans(findings: list[Finding]) -> list[tuple[int, int, bool]]:
    return [(one.start, one.end, one.known) for one in findings]


def test_tells_what_is_known_unknown_or_too_short(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        tokens, _ = client.engine.prompts.learn(TEXT)  # 709: two whole chunks, 192, and 5
        await client.learn("notes", TEXT)
        found = (await explain(client, tokens)).findings
        assert spans(found) == [
            (0, 256, True), (256, 512, True), (512, 704, True), (704, 709, False),
        ]  # fmt: skip
        assert found[-1].why == reasons.SHORT
        found = (await explain(client, [*tokens, *[7] * 300])).findings
        assert spans(found) == [
            (0, 256, True), (256, 512, True), (512, 704, True), (704, 768, False),
            (768, 1008, False), (1008, 1009, False),
        ]  # fmt: skip
        assert {one.why for one in found[3:5]} == {reasons.UNKNOWN}
        assert spans((await explain(client, [7] * 9)).findings) == [(0, 9, False)]


def test_tells_what_was_evicted_and_what_came_after_it(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        tokens, _ = client.engine.prompts.learn(TEXT)
        await client.learn("notes", TEXT)
        store = client.session.places.publish_to.store
        await store.delete(cut(tokens, client.session.namespace)[0].key)
        found = (await explain(client, tokens)).findings
        assert [one.why for one in found[:3]] == [
            reasons.EVICTED.format("notes"), reasons.ORPHAN, reasons.ORPHAN,
        ]  # fmt: skip


def test_tells_of_other_models_secrets_and_profiles(tiny_model: Any, tmp_path: Path) -> None:
    learner = tiny_model("llama")

    @in_folder(tmp_path, learner)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)

    @in_folder(tmp_path, tiny_model("qwen2"))
    async def _(client: AsyncClient) -> None:
        found = (await explain(client, client.engine.prompts.learn(TEXT)[0])).findings
        assert "another model" in found[0].why

    @in_folder(tmp_path, learner, secret=b"own")
    async def _(client: AsyncClient) -> None:
        found = (await explain(client, client.engine.prompts.learn(TEXT)[0])).findings
        assert found[0].why == reasons.OTHER_SECRET

    @in_folder(tmp_path, learner)
    async def _(client: AsyncClient) -> None:
        client.session.namespace = replace(client.session.namespace, profile=b"p" * 16)
        found = (await explain(client, client.engine.prompts.learn(TEXT)[0])).findings
        assert found[0].why == reasons.OTHER_PROFILE.format("exact")


def test_a_join_says_what_moves_and_what_is_gone(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        join = await join_of(client)
        gone = join.pieces[2].chunks[0]
        assert await client.session.places.publish_to.store.delete(gone.key)
        found = (await explain_join(client, NAMES)).findings
        assert [(one.start, one.end, one.known) for one in found] == [
            (0, 256, True), (256, 309, True), (309, 431, True), (431, 680, False),
            (680, 713, True),
        ]  # fmt: skip
        assert [one.why for one in found[:3]] == ["known", "known", "known, moved by 302 positions"]
        assert found[3].why == "evicted or deleted: the name faq still points to it"
        assert found[4].why == "known, moved by 424 positions"
