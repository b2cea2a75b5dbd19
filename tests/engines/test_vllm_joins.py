"""Joins on the scheduler's side: what is loaded, and that nobody else gets their blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kdn.blend.pieces import Join, Piece
from kdn.cache.keys import cut, token_ids
from kdn.delivery.known import Known
from kdn.engines.vllm.events import Events
from kdn.engines.vllm.join_lookup import KnownJoin
from kdn.engines.vllm.joins import SALT_PREFIX, renamed
from kdn.engines.vllm.messages import LoadReport
from kdn.engines.vllm.telling import Telling
from tests.engines.vllm_scheduling import BLOCK, SPACE, World, request

HEAD = 40
RANGES = [[HEAD, 300], [300, 620], [620, 900]]


class Hashed(SimpleNamespace):
    """A request that hashes its blocks as vLLM's does."""

    def update_block_hashes(self) -> None:
        for end in range(BLOCK * (len(self.block_hashes) + 1), self.num_tokens + 1, BLOCK):
            self.block_hashes.append((tuple(self.all_token_ids[:end]), self.cache_salt))


def with_pieces(name: str = "r", ranges: Any = RANGES, **more: Any) -> Any:
    params = {"kdn": {"pieces": ranges}}
    own = {"block_hashes": [], "kv_transfer_params": params, **more}
    asked = Hashed(**vars(request(name, 1000, **own)))
    asked.update_block_hashes()
    return asked


def found(asked: Any, pieces: int = 3, plain: int = 0, seams: bytes = b"s") -> KnownJoin:
    """The first so many pieces are known, and so many tokens of the prompt as it is."""
    ids = token_ids(asked.prompt_token_ids)
    some = []
    for start, end in RANGES[:pieces]:
        tokens = token_ids([*ids[:HEAD], *ids[start:end]])
        some.append(Piece(tokens, HEAD, tuple(cut(tokens, SPACE, whole=True))))
    join = Join(tuple(some))
    return KnownJoin(
        tuple(cut(ids[:plain], SPACE)), join=join, parts=Known(join.chunks), seams=seams
    )


def world(**settings: Any) -> World:
    return World(**{"blend": "ranges", **settings})


def begin(one: World, asked: Any, known: Known) -> None:
    one.side.arrived(asked)
    one.lookups[-1].set_result(known)


def load(one: World, asked: Any, local: int = 0) -> Any:
    """Up to the step that orders it."""
    count, is_async = one.side.matched(asked, local)
    assert count
    assert is_async
    one.side.allocated(asked, list(range(100, 108)), count)
    [order] = one.step().loads
    return order


def test_whole_blocks_of_a_join_are_loaded() -> None:
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked))
    assert one.wanted[0].pieces == tuple(map(tuple, RANGES))
    assert one.side.matched(asked, 0) == (None, False)  # vLLM looks again, under its new names
    order = load(one, asked)
    assert (order.start, order.end) == (0, 896)
    assert order.join.head == HEAD
    assert order.join.seams == b"s"
    assert [len(numbers) for numbers in order.join.pieces] == [2, 2, 2]
    assert one.side.counts["joins"] == 1
    assert len(order.chunks) == len({c.key for c in order.chunks}) == 6


def test_the_last_token_is_computed() -> None:
    one = world()
    asked = with_pieces(ranges=[[HEAD, 300], [300, 1000]])
    ids = token_ids(asked.prompt_token_ids)
    pieces = [
        Piece(tokens, HEAD, tuple(cut(tokens, SPACE, whole=True)))
        for tokens in (ids[:300], token_ids([*ids[:HEAD], *ids[300:1000]]))
    ]
    join = Join(tuple(pieces))
    begin(one, asked, KnownJoin(join=join, parts=Known(join.chunks)))
    one.side.matched(asked, 0)
    assert one.side.matched(asked, 0) == (896, True)


def test_its_blocks_get_names_of_their_own() -> None:
    one = world()
    asked, plain = with_pieces("a"), with_pieces("b")
    begin(one, asked, found(asked))
    one.side.matched(asked, 0)
    assert asked.cache_salt.startswith(SALT_PREFIX)
    assert set(asked.block_hashes).isdisjoint(plain.block_hashes)
    assert len(asked.block_hashes) == len(plain.block_hashes)
    same, other, salted = with_pieces("c"), with_pieces("d"), with_pieces("e", cache_salt="own")
    begin(one, same, found(same))
    begin(one, other, found(other, pieces=2))
    begin(one, salted, found(salted))
    for each in (same, other, salted):
        one.side.matched(each, 0)
    assert same.block_hashes == asked.block_hashes  # the same join may share them
    assert len({asked.cache_salt, other.cache_salt, salted.cache_salt}) == 3


def test_no_two_engines_give_the_same_names() -> None:
    """Nobody can send a salt that is a join's."""
    salts = set()
    for _ in range(2):
        one, asked = world(), with_pieces()
        begin(one, asked, found(asked))
        one.side.matched(asked, 0)
        salts.add(asked.cache_salt)
    assert len(salts) == 2


@pytest.mark.parametrize("broken", ["same", "fewer", "raises", "none", "begun"])
def test_blocks_that_cannot_be_kept_apart_are_not_joined(broken: str) -> None:
    asked = with_pieces()
    before = list(asked.block_hashes)

    def update() -> None:
        if broken == "raises":
            raise AttributeError("no such thing")
        asked.block_hashes.extend(before if broken == "same" else before[:1])

    asked.update_block_hashes = update
    if broken == "none":
        asked.block_hashes = before = []
    if broken == "begun":
        asked.num_computed_tokens = BLOCK
    one = world()
    begin(one, asked, found(asked, plain=512))
    assert one.side.matched(asked, 0) == (512, True)  # as without pieces
    assert asked.block_hashes == before
    assert asked.cache_salt is None
    assert one.side.counts["refused_joins"] == 1


def test_what_is_known_as_it_is_comes_first() -> None:
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked, plain=992))
    assert one.side.matched(asked, 0) == (896, True)
    assert asked.cache_salt is None
    one.side.allocated(asked, list(range(8)), 896)
    [order] = one.step().loads
    assert order.join is None


def test_vllms_own_blocks_come_first() -> None:
    """Those of a full reading; then there is nothing to be joined."""
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked))
    assert one.side.matched(asked, 896) == (0, False)
    assert asked.cache_salt is None


def test_exact_blocks_are_not_given_up_for_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdn.engines.vllm.scheduler.LEAST_GAIN", 0.2)
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked))
    assert one.side.matched(asked, 768) == (0, False)  # a join would have 896
    assert asked.cache_salt is None
    assert one.side.matched(asked, 640) == (None, False)
    assert asked.cache_salt is not None
    assert one.side.matched(asked, 768) == (128, True)  # of the same join, which is its own now


def test_nothing_of_a_join_is_published() -> None:
    """Neither what was loaded nor what is computed on top; and its blocks stay lossy for whoever
    gets them."""
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked))
    one.side.matched(asked, 0)
    order = load(one, asked)
    one.side.loaded(LoadReport(exact_until={"r": 896}))  # a worker that says so is not believed
    blocks = list(order.block_ids)
    step = one.step(new=[(asked, blocks, 896, 104)])
    assert step.saves == ()
    state = one.side.states["r"]
    assert state.exact_until == 0
    assert not state.settings.publish
    assert len(one.side.lossy) == len(blocks)


def test_a_join_that_fails_is_computed_and_not_published() -> None:
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked))
    one.side.matched(asked, 0)
    order = load(one, asked)
    one.side.loaded(LoadReport(exact_until={"r": 0}, failed_from={"r": 0}))
    assert one.side.matched(asked, 0) == (0, False)  # once is enough
    assert one.step(new=[(asked, list(order.block_ids), 0, 1000)]).saves == ()


def test_after_a_preemption_it_is_joined_again() -> None:
    one = world()
    asked = with_pieces()
    begin(one, asked, found(asked))
    one.side.matched(asked, 0)
    load(one, asked)
    one.side.loaded(LoadReport(exact_until={"r": 0}))
    asked.num_preemptions += 1
    salt = asked.cache_salt
    assert one.side.matched(asked, 0) == (None, False)
    one.lookups[-1].set_result(found(asked))
    assert one.side.matched(asked, 256) == (640, True)
    assert asked.cache_salt == salt


def test_another_join_after_a_preemption_has_other_names() -> None:
    """Else whoever has the first join would find blocks of the other."""
    one = world()
    asked, same = with_pieces(), with_pieces("s")
    begin(one, asked, found(asked, pieces=2))
    one.side.matched(asked, 0)
    load(one, asked)
    one.side.loaded(LoadReport(exact_until={"r": 0}))
    before, asked.num_preemptions = list(asked.block_hashes), 1
    one.side.matched(asked, 0)
    one.lookups[-1].set_result(found(asked))
    assert one.side.matched(asked, 512) == (None, False)
    assert set(asked.block_hashes).isdisjoint(before)
    begin(one, same, found(same))
    one.side.matched(same, 0)
    assert same.block_hashes == asked.block_hashes
    assert one.side.matched(asked, 0) == (896, True)
    assert not one.side.states["r"].settings.publish


@pytest.mark.parametrize(
    "more",
    [
        {"ranges": [[5, 3]]},
        {"ranges": [[0, 10]] * 3000},
        {"ranges": [[0, 9999]]},
        {"ranges": "all"},
        {"resumable": True},
        {"pooling_params": SimpleNamespace()},
    ],
)
def test_what_is_refused_is_served_like_any_other(more: dict[str, Any]) -> None:
    one = world()
    asked = with_pieces(**more)
    one.arrive(asked, 512)
    assert one.side.matched(asked, 0) == (512, True)
    assert (one.side.counts["refused_joins"], one.side.counts["refused"]) == (1, 0)
    assert asked.cache_salt is None
    assert not one.wanted


def test_pieces_where_nothing_is_joined() -> None:
    one = World()
    asked = with_pieces()
    one.arrive(asked, 512)
    assert one.side.matched(asked, 0) == (512, True)
    assert one.side.counts["refused_joins"] == 1


def test_seams_that_are_not_good_enough() -> None:
    one = world()
    asked = with_pieces()
    begin(one, asked, KnownJoin(tuple(cut(asked.prompt_token_ids[:512], SPACE)), refusal="worse"))
    assert one.side.matched(asked, 0) == (512, True)
    assert one.side.counts["refused_joins"] == 1


def test_a_separator() -> None:
    one = world(blend="separator", separator=[39])
    tokens = [number % 300 for number in range(1000)]
    asked = with_pieces(prompt_token_ids=tokens, all_token_ids=tokens, kv_transfer_params=None)
    one.side.arrived(asked)
    assert one.wanted[0].pieces == ((40, 340), (340, 640), (640, 940))
    other = request("without", 30)
    one.side.arrived(other)
    assert len(one.wanted) == 1


def test_pieces_that_kdn_finds() -> None:
    one = world(blend="auto")
    one.side.arrived(with_pieces(kv_transfer_params=None))
    one.side.arrived(with_pieces("named"))
    assert [wanted.pieces for wanted in one.wanted] == [None, tuple(map(tuple, RANGES))]


def test_nobody_is_refused_what_he_did_not_ask_for() -> None:
    one = world(blend="auto")
    one.arrive(with_pieces(kv_transfer_params=None, resumable=True), 512)
    assert one.side.counts["refused_joins"] == 0
    assert not one.wanted


def test_renaming_keeps_what_it_cannot_change() -> None:
    asked = with_pieces(cache_salt="own")
    assert renamed(asked, "other")
    assert asked.cache_salt == "other"
    asked.all_token_ids = [*asked.all_token_ids, *range(2000, 2000 + BLOCK)]
    asked.num_tokens += BLOCK
    asked.update_block_hashes()
    assert {salt for _, salt in asked.block_hashes} == {"other"}


def test_routers_are_not_told_of_joins() -> None:
    """Of what is known of the prompt as it is, they are: that others may load as well."""
    one = world()
    events = Events(BLOCK)
    one.side._telling = Telling(events)
    asked = with_pieces()
    plain = list(asked.block_hashes)
    begin(one, asked, found(asked, plain=256))
    one.side.matched(asked, 0)
    order = load(one, asked)
    one.side.loaded(LoadReport(exact_until={"r": 0}, failed_from={"r": 512}))
    one.step(new=[(asked, list(order.block_ids), 512, 488)])
    asked.num_preemptions += 1
    one.side.matched(asked, 0)
    one.lookups[-1].set_result(found(asked, plain=512))
    one.side.matched(asked, 0)
    told = [name for event in events.take() for name in getattr(event, "blocks", event).hashes]
    assert told == plain[:2]
