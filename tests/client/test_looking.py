"""What a question makes the model compute anew in a join, with tiny models and the lossless codec.

If all that has moved is computed anew, a join is what the model would have read.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.blend.seams import Block, Seams
from kdn.blend.shares import COST
from kdn.cache.spec import ModelSpec
from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.contexts import Options
from kdn.engines.generating import Sampling
from kdn.errors import UnsupportedError
from kdn.session.seams import share_seams
from tests.client.clients import QUESTION, TEXT, client_at, in_folder, own_answer, prompt_of
from tests.client.joins import SlowToRead
from tests.node.harness import run

TEXTS = {"rules": TEXT[:300], "report": TEXT[300:420], "faq": TEXT[420:700]}
NAMES = list(TEXTS)
ALL = 0.9999
MOVED = 404
ASKED = len(QUESTION) + len("<end>[assistant]")
WHOLE_TEXT = "\n\n".join(TEXTS.values())


async def learn_all(client: AsyncClient) -> None:
    for name, text in TEXTS.items():
        await client.learn(name, text)


def seams_that_promise(spec: ModelSpec, expected: dict[float, tuple[float, float]]) -> Seams:
    """And change nothing."""
    columns = spec.values_per_token
    block = Block(
        (0, spec.num_layers), torch.zeros(columns, 1), torch.zeros(1, columns), torch.zeros(columns)
    )
    return Seams(spec.fingerprint, [block], expected)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_all_that_moved_computed_anew_is_reading(
    family: str, tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model(family, **({"head_dim": 16} if family == "qwen3" else {}))
    expected = own_answer(model, prompt_of(WHOLE_TEXT, QUESTION), 20)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        answer = client.ask(NAMES, QUESTION, max_new_tokens=20, recompute_share=ALL)
        assert await answer.read() == expected
        stats = answer.stats
        assert (stats.recomputed_tokens, stats.computed_tokens) == (MOVED, MOVED + ASKED)
        assert stats.recompute_s > 0
        assert (stats.known_tokens, stats.moved_tokens) == (713, MOVED)
        assert not stats.troubles

        answer = client.ask(NAMES, QUESTION, max_new_tokens=20, recompute_share=0.0)
        assert await answer.read() != expected
        assert answer.stats.recomputed_tokens == 0

        some = client.ask(NAMES, QUESTION, max_new_tokens=20, recompute_share=0.1)
        await some.read()
        assert some.stats.recomputed_tokens == 71
        assert client.metrics.recomputed_tokens == MOVED + 71


def test_what_is_too_good_for_a_join_is_read(tiny_model: Any, tmp_path: Path) -> None:
    """And only the first piece is loaded, wherever else it stands."""
    model = tiny_model("llama")
    names = ["report", "rules", "report"]
    text = "\n\n".join(TEXTS[name] for name in names)
    expected = own_answer(model, prompt_of(text, QUESTION), 20)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        for wish in ({"recompute_share": 1.0}, {"quality": "exact"}):
            answer = client.ask(names, QUESTION, max_new_tokens=20, **wish)
            assert await answer.read() == expected
            assert answer.stats.moved_tokens == answer.stats.recomputed_tokens == 0
            assert answer.stats.known_tokens == len("\x01[user]") + 122
        joined = await client.join(names, quality="exact")
        assert joined.stats.moved_tokens == 0
        assert joined.num_tokens == 7 + 122 + 302 + 122


def test_conversations_and_batches(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = own_answer(model, prompt_of(WHOLE_TEXT, QUESTION), 6)
    other = "and before that?"

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        talk = client.converse(NAMES, max_new_tokens=6, recompute_share=ALL)
        assert await talk.ask(QUESTION).read() == first
        again = talk.ask(other)
        await again.read()
        assert again.stats.recomputed_tokens == 0

        found = await client.ask_all(
            NAMES, [QUESTION, other], max_new_tokens=6, recompute_share=ALL
        )
        assert found == [own_answer(model, prompt_of(WHOLE_TEXT, q), 6) for q in (QUESTION, other)]
        assert client.metrics.recomputed_tokens == 2 * MOVED
        before = client.metrics.computed_tokens
        alone = await client.ask_all(NAMES, [QUESTION], max_new_tokens=6, recompute_share=ALL)
        assert alone == [first], "a batch of one reads its question once"
        assert client.metrics.computed_tokens - before == MOVED + ASKED


def test_requests_at_once_do_not_see_each_other(tiny_model: Any, tmp_path: Path) -> None:
    """Each has its memory, its own attention in its pass, and what it chose; some are cancelled."""
    asked = [(NAMES, 0.2), (NAMES[::-1], 0.5), (NAMES[:2], ALL), (NAMES, 0.0), (NAMES[1:], 0.3)]

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        async def ask(names: list[str], share: float) -> str:
            answer = client.ask(names, QUESTION, max_new_tokens=6, recompute_share=share)
            return await answer.read()

        await learn_all(client)
        expected = [await ask(*one) for one in asked]
        assert len(set(expected)) == len(asked)
        for stopped_s in (0.0, 0.02, 0.1):
            begun = [asyncio.create_task(ask(*one)) for one in [*asked, *asked]]
            await asyncio.sleep(stopped_s)
            for task in begun[: len(asked)]:
                task.cancel()
            await asyncio.wait(begun)
            assert [task.result() for task in begun[len(asked) :]] == expected


def test_the_share_follows_from_quality_and_seams(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")
    expected = {0.0: (0.1, 0.06), 0.05: (0.05, 0.03), 0.15: (0.02, 0.01)}

    async def test() -> None:
        async with client_at(tmp_path / "data", model, recompute=True) as client:
            await learn_all(client)
            client.contexts.speeds = SlowToRead()
            # Nobody has measured anything here: what 30 % did for another model is not too much.
            assert await asked(client, "default") == round(0.3 * 713)
            seams = seams_that_promise(client.engine.spec, expected)
            await share_seams(client.session, seams)
        async with client_at(tmp_path / "data", model, recompute=True) as client:
            client.contexts.speeds = SlowToRead()
            assert await asked(client, "draft") == 0
            assert await asked(client, "default") == round(0.05 * 713)
            assert await asked(client, 0.02) == round(0.15 * 713)
            answer = client.ask(NAMES, QUESTION, max_new_tokens=2, quality=0.005)
            await answer.read()
            assert (answer.stats.moved_tokens, answer.stats.recomputed_tokens) == (0, 0)
        async with client_at(tmp_path / "data", model, recompute=False) as client:
            assert await asked(client, "default") == 0

    async def asked(client: AsyncClient, quality: Any) -> int:
        answer = client.ask(NAMES, QUESTION, max_new_tokens=2, quality=quality)
        await answer.read()
        assert not answer.stats.troubles
        assert answer.stats.known_tokens == 713
        return answer.stats.recomputed_tokens

    run(test())


def test_what_there_is_no_time_for_is_left_out(tiny_model: Any, tmp_path: Path) -> None:
    """As if loading had taken most of the time, and reading took longer than it does."""

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        options = Options(sampling=Sampling(2), recompute_share=0.2)
        for left_s, least, most in ((COST * 5.0, 20, 36), (-1.0, 0, 0)):
            stats = Stats()
            context, tokens, style = await client.begin(NAMES, options, stats)
            assert context.looking is not None
            assert context.looking.share == 0.2
            context.looking = replace(
                context.looking, reading_s=100.0, until_s=client.now_s() + left_s
            )
            prompt = [*tokens, *client.engine.prompts.ask(QUESTION, style)]
            async for _ in client.turn(context, prompt, options, stats, client.now_s()):
                pass
            assert least <= stats.recomputed_tokens <= most
            assert stats.computed_tokens == stats.recomputed_tokens + ASKED
            assert context.is_mended == (stats.recomputed_tokens > 0)
            [trouble] = stats.troubles
            assert "not 20.0%: no time left" in trouble


def test_a_share_that_a_deadline_leaves_no_time_for_is_told(
    tiny_model: Any, tmp_path: Path
) -> None:
    """Whoever asks for "exact" would be read to, and hears that there was no time for it."""

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        client.contexts.speeds = SlowToRead()
        answer = client.ask(NAMES, QUESTION, max_new_tokens=2, quality="exact", deadline_s=20.0)
        await answer.read()
        assert answer.stats.moved_tokens == MOVED
        assert 0 < answer.stats.recomputed_tokens < MOVED
        assert "not 100.0%: no time left" in answer.stats.troubles[0]


def test_models_that_cannot_are_asked_without(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise UnsupportedError("not this one")

    monkeypatch.setattr("kdn.client.looking.check_attention", refuse)

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        plain = await client.ask(NAMES, QUESTION, max_new_tokens=6, recompute_share=0.0).read()
        answer = client.ask(NAMES, QUESTION, max_new_tokens=6, recompute_share=0.2)
        assert await answer.read() == plain
        assert answer.stats.troubles == ("nothing is recomputed: not this one",)
        assert answer.stats.computed_tokens == ASKED


def test_shares_are_checked(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        for share in (-0.1, 1.5, float("nan"), "much"):
            with pytest.raises(UnsupportedError, match="recompute_share"):
                client.ask(NAMES, QUESTION, recompute_share=share)
