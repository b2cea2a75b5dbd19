"""What a place does not take, and what learning says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.client import learning
from kdn.delivery.parcel import Parcel
from kdn.errors import StoreError
from kdn.store.base import Entry, Hints
from tests.client.clients import TEXT, client_at
from tests.delivery.world import Proxy
from tests.node.harness import Running, tenant, with_node


def test_a_token_that_may_only_read_learns_nothing(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "FLUSH_S", 20.0)

    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama"), token="reader") as client:
            with pytest.raises(StoreError, match=r"refused: .*403 forbidden: this token may read"):
                await client.learn("notes", TEXT)
            assert client.session.publisher.counts.failures == 0

    with_node(tmp_path, test, tenant("t", "reader", "read_tokens"))


def test_learning_fails_only_for_chunks_of_its_own(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what other processes left in the spool, nor for what was refused before."""

    class Picky(Proxy):
        refusals = 0

        async def put_entry(self, entry: Entry, *args: Any, **named: Any) -> Entry:
            if entry.key == b"theirs":
                self.refusals += 1
                raise StoreError("never this one")
            return await super().put_entry(entry, *args, **named)

    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama")) as client:
            publisher = client.session.publisher
            place = client.session.places.publish_to
            place.store = picky = Picky(place.store)
            spool = publisher._spool
            assert spool is not None
            spool.add(Parcel(b"theirs", b"e", b"data", Hints()))
            publisher._sender.refuse(b"earlier", StoreError("quota"))
            await client.learn("notes", TEXT)
            assert picky.refusals
            assert b"theirs" in spool

    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(learning, "FLUSH_S", 10.0)
    with_node(tmp_path, test)


def test_what_a_full_node_says_is_what_learning_says(tiny_model: Any, tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama"), token="t") as client:
            for _ in range(2):
                with pytest.raises(StoreError, match=r"refused: .*507 quota_exceeded"):
                    await client.learn("notes", TEXT)

    with_node(tmp_path, test, tenant("t", "t", quota_bytes=1000))
