"""Known pieces are found in a prompt by themselves: only where they stand token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kdn.blend.anchors import anchor_keys, anchors_of
from kdn.blend.pieces import Piece
from kdn.cache.keys import TokenIds, cut, token_ids
from kdn.credentials import Credentials
from kdn.errors import StoreError
from kdn.session import anchors
from kdn.session.anchors import Pointer, find_pieces, pack, share_anchors, unpack
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from kdn.store.base import Entry, Store
from tests.codec.conftest import Tiny
from tests.node.harness import Running, run, with_node

TINY = Tiny.with_layers(2)
RNG = np.random.default_rng(3)


def text(num_tokens: int) -> TokenIds:
    return token_ids(RNG.integers(0, 250, num_tokens))


HEAD, A, B, C, QUESTION = text(20), text(400), text(333), text(517), text(30)


def opened(where: Path | str, secret: bytes | None = b"a secret") -> Session:
    own = SessionSettings((where,), Credentials(None, secret), codec="exact", host_bytes=0)
    return Session(own, TINY.spec, torch.float32)


def with_session(folder: Path, test: Callable[[Session], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with opened(folder) as session:
            await test(session)

    run(work())


def piece(session: Session, own: TokenIds, head: TokenIds = HEAD) -> Piece:
    tokens = np.concatenate([head, own])
    return Piece(tokens, len(head), tuple(cut(tokens, session.namespace, whole=True)))


async def share(session: Session, *texts: TokenIds, head: TokenIds = HEAD) -> None:
    for own in texts:
        assert await share_anchors(session, piece(session, own, head))


async def found(session: Session, *parts: TokenIds, **more: Any) -> list[tuple[int, int]]:
    return await find_pieces(session, session.namespace, np.concatenate(parts), **more)


def test_pieces_are_found_in_any_order_and_again(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A, B, C)
        got = await found(session, HEAD, B, A, C, A, QUESTION)
        assert got == [(20, 353), (353, 753), (753, 1270), (1270, 1670)]
        assert await found(session, HEAD, A) == [(20, 420)]

    with_session(tmp_path, test)


def test_it_is_one_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(session: Session) -> None:
        await share(session, A)
        store, asked = session.places.objects, []
        assert store is not None
        lookup = store.lookup

        async def counted(keys: Any, **more: Any) -> Any:
            asked.append(len(keys))
            return await lookup(keys, **more)

        monkeypatch.setattr(store, "lookup", counted)
        assert await found(session, HEAD, A, QUESTION)
        assert len(asked) == 1

    with_session(tmp_path, test)


def test_a_changed_token_is_no_match(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A, B)
        for at in range(0, len(A), 7):
            changed = A.copy()
            changed[at] += 1
            assert await found(session, HEAD, changed, B, QUESTION) == []
        assert await found(session, HEAD, A[1:], B) == []
        assert await found(session, HEAD, A[:-1], B) == []
        changed = B.copy()
        changed[-1] += 1
        assert await found(session, HEAD, A, changed) == [(20, 420)]

    with_session(tmp_path, test)


def test_only_behind_the_head_that_they_were_learned_behind(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        other = HEAD.copy()
        other[0] += 1
        await share(session, A, B)
        await share(session, C, head=other)
        assert await found(session, other, A, B) == []
        assert await found(session, HEAD[1:], A, B) == []
        assert await found(session, HEAD, QUESTION, A, B) == []
        assert await found(session, HEAD, A, C, B) == [(20, 420)]  # C knows another head
        assert await found(session, other, C, A) == [(20, 537)]
        await share(session, A, head=other)
        assert await found(session, other, C, A) == [(20, 537), (537, 937)]
        assert await found(session, other, C, head=20) == [(20, 537)]
        assert await found(session, other, C, head=19) == []

    with_session(tmp_path, test)


def test_without_a_head(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A, head=text(0))
        assert await found(session, A, QUESTION) == [(0, 400)]
        assert await found(session, HEAD, A, QUESTION) == []

    with_session(tmp_path, test)


def test_what_comes_behind_a_gap_is_not_joined(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A, B)
        assert await found(session, HEAD, A, QUESTION, B) == [(20, 420)]

    with_session(tmp_path, test)


def test_of_those_that_overlap_the_longest_counts(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        both = np.concatenate([A, B])
        await share(session, A, B, both, np.concatenate([A[200:], B[:300]]))
        assert await found(session, HEAD, A, B, C) == [(20, 753)]
        assert await found(session, HEAD, A, C) == [(20, 420)]
        assert await found(session, HEAD, B, A, B) == [(20, 353), (353, 1086)]

    with_session(tmp_path, test)


def test_text_that_repeats_itself(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        own = np.tile(A[:100], 5)
        assert await share_anchors(session, piece(session, own))
        assert await found(session, HEAD, own, own, QUESTION) == [(20, 520), (520, 1020)]
        secret = session.namespace.secret
        token = next(one for one in range(10**6) if anchors_of(token_ids([one] * 16), secret))
        same = token_ids([token] * 3000)  # an anchor everywhere
        assert await share_anchors(session, piece(session, same[:100]))
        assert (await found(session, HEAD, same))[0] == (20, 120)

    with_session(tmp_path, test)


def test_pieces_that_begin_alike_share_anchors(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        versions = [np.concatenate([A, text(50)]) for _ in range(anchors.MAX_POINTERS + 4)]
        await share(session, *versions)
        for own in versions[-anchors.MAX_POINTERS :]:
            assert await found(session, HEAD, own, B) == [(20, 470)]
        assert await found(session, HEAD, A, B) == []

    with_session(tmp_path, test)


def test_other_secrets_models_and_salts_find_nothing(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A)
        prompt, own = np.concatenate([HEAD, A]), session.namespace
        assert await find_pieces(session, own, prompt)
        for other in (
            replace(own, secret=b"other"),
            replace(own, model=b"n" * 16),
            replace(own, profile=b"q" * 16),
            own.with_salt(b"salt"),
        ):
            assert await find_pieces(session, other, prompt) == []

    with_session(tmp_path, test)


async def put(session: Session, key: bytes, data: bytes) -> None:
    """As whoever may write there, over what is there."""
    store = session.places.objects
    assert store is not None
    [there] = await store.lookup([key])
    kept = await store.put(
        key, data, etag=b"hostile", checksum=xxh3_64_intdigest(data),
        replacing=there.etag if there else None,
    )  # fmt: skip
    assert kept.etag == b"hostile"


def test_objects_of_others_count_for_nothing_and_give_way(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A)
        own, starts = session.namespace, anchors_of(A, session.namespace.secret)
        keys = anchor_keys(A, starts, own)
        head, digest = (anchors._digest(one, own) for one in (HEAD, A))
        pointer = Pointer(starts[0], len(A), 20, head, digest)  # true, but nobody's who may say so
        good = pack(keys[0], [pointer], own.seal_key)
        for data in (
            b"", b"KDNA", bytes(anchors.MAX_OBJECT_BYTES), bytes(70_000),
            pack(keys[0], [pointer], b"k" * 32),
            pack(keys[1], [pointer], own.seal_key),
            good[:-1], good + b"\0", bytes([*good[:-1], good[-1] ^ 1]),
        ):  # fmt: skip
            for key in keys:
                await put(session, key, data)
            assert await found(session, HEAD, A) == []
        await share(session, A)
        assert await found(session, HEAD, A) == [(20, 420)]

    with_session(tmp_path, test)


def test_pointers_that_lie_are_not_believed(tmp_path: Path) -> None:
    """Of a holder of the secret, even."""

    async def test(session: Session) -> None:
        own, starts = session.namespace, anchors_of(A, session.namespace.secret)
        key = anchor_keys(A, starts, own)[0]
        head, digest = (anchors._digest(one, own) for one in (HEAD, A))
        true = Pointer(starts[0], len(A), len(HEAD), head, digest)
        most = 2**32 - 1
        for change in (
            {"before": most}, {"before": starts[0] + 1}, {"length": most}, {"length": 0},
            {"length": len(A) - 1}, {"head": most}, {"head": 0}, {"head": len(HEAD) + 1},
            {"head_digest": bytes(16)}, {"digest": bytes(16)},
        ):  # fmt: skip
            await put(session, key, pack(key, [true._replace(**change)], own.seal_key))
            assert await found(session, HEAD, A) == []
        await put(session, key, pack(key, [true], own.seal_key))
        assert await found(session, HEAD, A) == [(20, 420)]

    with_session(tmp_path, test)


def test_an_object_of_another_version_or_length_is_none_of_ours() -> None:
    key, seal_key = b"k" * 16, b"s" * 32
    pointers = [Pointer(1, 2, 3, b"h" * 16, b"d" * 16)]
    data = pack(key, pointers, seal_key)
    assert unpack(key, data, seal_key) == pointers
    for body in (b"KDNB" + data[4:-16], b"KDNA\2" + data[5:-16], data[:-17], data[:5] + b"\2"):
        assert unpack(key, body + anchors._seal(key, body, seal_key), seal_key) == []


def test_a_place_that_is_away_or_slow_costs_no_more_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(session: Session) -> None:
        await share(session, A)
        store = session.places.objects
        assert store is not None

        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(60)

        async def gone(*_: Any, **__: Any) -> Any:
            raise StoreError("gone")

        for lookup in (never, gone):
            monkeypatch.setattr(store, "lookup", lookup)
            assert await found(session, HEAD, A, limit_s=0.05) == []
        monkeypatch.setattr(anchors, "SHARE_S", 0.05)
        assert await share_anchors(session, piece(session, B)) == 0

    with_session(tmp_path, test)


def test_two_who_add_at_once_both_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(session: Session) -> None:
        store = session.places.objects
        assert store is not None
        ours, theirs = (np.concatenate([A, one]) for one in (B, C))
        put_entry, is_first = store.put_entry, [True]

        async def late(entry: Entry, *rest: Any) -> Entry:
            if is_first.pop() if is_first else False:
                await share(session, theirs)
            return await put_entry(entry, *rest)

        monkeypatch.setattr(store, "put_entry", late)
        await share(session, ours)
        assert await found(session, HEAD, ours) == [(20, 753)]
        assert await found(session, HEAD, theirs) == [(20, 937)]

    with_session(tmp_path, test)


def test_a_long_prompt_asks_for_a_bounded_number(tmp_path: Path) -> None:
    async def test(session: Session) -> None:
        await share(session, A)
        assert await found(session, HEAD, A, text(300_000), limit_s=10.0) == [(20, 420)]
        assert await found(session, HEAD, A, text(anchors.MAX_TOKENS)) == []

    with_session(tmp_path, test)


def test_over_a_node(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with opened(node.url) as session:
            await share(session, A, B, np.concatenate([A, C]))
        async with opened(node.url) as session:
            got = await found(session, HEAD, B, A, QUESTION, limit_s=10.0)
            assert got == [(20, 353), (353, 753)]
        async with opened(node.url, b"of another tenant") as session:
            assert await found(session, HEAD, B, A, QUESTION, limit_s=10.0) == []

    with_node(tmp_path / "node", test)


def test_an_export_has_no_anchors(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened("http://127.0.0.1:9/export") as session:
            assert isinstance(session.places.objects, Store | None)
            assert await share_anchors(session, piece(session, A)) == 0
            assert await found(session, HEAD, A) == []

    run(work())


def test_a_prompt_of_one_token_is_not_hashed_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []

    def counted(tokens: TokenIds, starts: Any, namespace: Any) -> list[bytes]:
        named.append(len(starts))
        return anchor_keys(tokens, starts, namespace)

    monkeypatch.setattr(anchors, "anchor_keys", counted)

    async def test(session: Session) -> None:
        await share(session, A)
        prompt = np.concatenate([HEAD, A, np.full(100_000, 7, dtype=np.uint32)])
        assert await find_pieces(session, session.namespace, prompt) == [(20, 420)]

    with_session(tmp_path / "data", test)
    assert 0 < named[-1] < 30_000
