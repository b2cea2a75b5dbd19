"""The longest known beginning of a context: found with one lookup, and kept with its headers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, TokenIds, cut, token_ids
from kdn.delivery import known as module
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.known import Known, Wish, longest_known
from kdn.delivery.lookup import Question
from kdn.errors import RefusedError
from kdn.store.base import Entry, Store
from tests.delivery.world import (
    TINY,
    Down,
    Proxy,
    World,
    cache_of,
    make_world,
    put_stream,
    run,
    same,
)


class Counting(Proxy):
    """Counts lookups."""

    lookups = 0

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        self.lookups += 1
        return await super().lookup(keys, head_bytes=head_bytes)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


def tokens_of(world: World, *more: int) -> TokenIds:
    return token_ids([*(int(token) for chunk in world.chunks for token in chunk.tokens), *more])


def namespace(world: World) -> Namespace:
    return Namespace(world.codec.spec.fingerprint, world.codec.profile_id)


async def know(
    world: World, wish: Wish, places: Sequence[Store | Endpoint], limit_s: float = 5.0
) -> Known:
    question = Question((), world.codec, time.monotonic, Random(1))
    return await longest_known(wish, question, Endpoints(places), time.monotonic() + limit_s)


async def with_tail(world: World, tokens: Sequence[int], store: Store) -> Chunk:
    """Publish the last chunk of another, shorter prompt."""
    chunk = cut(tokens, namespace(world))[-1]
    await put_stream(store, world.codec.encode(chunk, TINY.cache(chunk, torch.float32)))
    return chunk


def test_full_chunks_and_the_tail_take_one_lookup(world: World) -> None:
    async def test() -> None:
        store = Counting(await world.store())
        found = await know(world, Wish(tokens_of(world, 1, 2), namespace(world)), [store])
        assert found.end == 5 * 256 + 48
        assert [chunk.key for chunk in found.chunks] == [chunk.key for chunk in world.chunks]
        assert store.lookups == 1

    run(test())


@pytest.mark.parametrize("known", [0, 2])
def test_a_tail_is_found_where_a_shorter_prompt_ended(world: World, known: int) -> None:
    """The prompt's own full chunk there is not known, one lookup all the same."""

    async def test() -> None:
        store = Counting(await world.store(world.streams[:known]))
        tokens = tokens_of(world)
        tail = await with_tail(world, tokens[: known * 256 + 80], store)
        found = await know(world, Wish(tokens, namespace(world)), [store])
        assert (found.chunks[-1].key, found.end) == (tail.key, known * 256 + 80)
        assert store.lookups == 1

    run(test())


def test_of_several_tails_the_longest_is_taken(world: World) -> None:
    async def test() -> None:
        store = await world.store(world.streams[:1])
        tokens = tokens_of(world)
        for end in (272, 400, 336):
            await with_tail(world, tokens[:end], store)
        assert (await know(world, Wish(tokens, namespace(world)), [store])).end == 400

    run(test())


def test_a_very_long_context_asks_again_where_its_known_chunks_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 20)

    async def test() -> None:
        tokens = tokens_of(world)
        store = Counting(await world.store(world.streams[:2]))
        await with_tail(world, tokens[: 512 + 80], store)
        assert (await know(world, Wish(tokens, namespace(world)), [store])).end == 592
        assert store.lookups == 2
        whole = Counting(await world.store())
        assert (await know(world, Wish(tokens, namespace(world)), [whole])).end == len(tokens)
        assert whole.lookups == 1

    run(test())


def test_what_is_held_is_not_asked_for(world: World) -> None:
    held = {chunk.key for chunk in world.chunks[:2]}

    async def test() -> None:
        store = Counting(await world.store())
        wish = Wish(tokens_of(world), namespace(world), is_held=lambda chunk: chunk.key in held)
        found = await know(world, wish, [store])
        assert found.end == len(tokens_of(world))
        assert not held & set(found.streams)
        assert not found.are_found(world.chunks)
        assert found.are_found(world.chunks[2:])
        nobody = await know(world, wish, [store], limit_s=0.0)
        assert (nobody.end, nobody.is_late) == (512, False)
        assert store.lookups == 1

    run(test())


def test_half_blocks_and_streams_of_no_use_do_not_count(world: World) -> None:
    async def test() -> None:
        store, tokens = await world.store(), tokens_of(world)
        wish = Wish(tokens, namespace(world), block_tokens=32)
        assert (await know(world, wish, [store])).end == len(tokens)  # two blocks but one token
        assert (await know(world, replace(wish, tokens=tokens[:1297]), [store])).end == 1280
        picky = replace(wish, takes=lambda info: info.start < 512)
        assert (await know(world, picky, [store])).end == 512

    run(test())


def test_who_is_away_makes_it_late_and_who_is_empty_does_not(world: World) -> None:
    async def test() -> None:
        wish = Wish(tokens_of(world), namespace(world))
        away = await know(world, wish, [Down(await world.store())], limit_s=0.1)
        assert (away.end, away.is_late) == (0, True)
        empty = await know(world, wish, [await world.store([])])
        assert (empty.end, empty.is_late) == (0, False)

    run(test())


def test_a_place_that_refuses_has_answered(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is not asked until there is no time left, and the log says so once."""

    class Refusing(Counting):
        async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
            self.lookups += 1
            raise RefusedError("401 unauthorized")

    async def test() -> None:
        place = Endpoint(Refusing(await world.store()), name="there")
        wish = Wish([*tokens_of(world)[:300], 1], namespace(world))
        for _ in range(2):
            found = await know(world, wish, [place], limit_s=60.0)
            assert (found.end, found.is_late) == (0, False)
        assert place.store.lookups == 2  # type: ignore[attr-defined]

    run(test())
    assert [record.message for record in caplog.records] == [
        "nothing is known from there: 401 unauthorized"
    ]


def test_what_is_known_is_delivered_without_another_lookup(world: World) -> None:
    async def test() -> None:
        store = Counting(await world.store())
        found = await know(world, Wish(tokens_of(world), namespace(world)), [store])
        result = await deliver(world.request(), [store], found)
        world.check(result)
        assert result.recompute == ()
        assert store.lookups == 1

    run(test())


def test_heads_spare_another_process_the_lookup(world: World) -> None:
    async def test() -> None:
        store = Counting(await world.store())
        found = await know(world, Wish(tokens_of(world), namespace(world)), [store])
        heads = found.packed().heads(world.chunks)
        assert heads == found.heads(world.chunks)
        again = Known.of_heads(world.chunks, heads, world.codec)
        result = await deliver(world.request(), [store], again)
        world.check(result)
        assert (result.recompute, store.lookups) == ((), 1)
        damaged = [heads[0], bytes(64), heads[1], *heads[3:]]
        some = Known.of_heads(world.chunks, damaged, world.codec)
        assert set(some.streams) == {c.key for c in (world.chunks[0], *world.chunks[3:])}
        result = await deliver(world.request(), [store], some)
        assert result.known == 1
        assert same(cache_of(result).slice(0, 256), world.decoded(result, 0))

    run(test())
