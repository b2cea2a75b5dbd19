"""The measurement of reads from S3: it reads, compares, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kdn.errors import StoreError

pytest.importorskip("obstore")

from kdn.bench.s3_reads import S3Reads, measure_reads
from kdn.store.object import open_object_store
from kdn.store.streaming import Receiver
from tests.store.contract import listed


def test_measures_both_and_cleans_up(tmp_path: Path) -> None:
    async def test() -> None:
        store = open_object_store(f"file://{tmp_path}/kdn")
        found = await measure_reads(store, chunks=3, chunk_bytes=100_000, rounds=2)
        assert (found.size_bytes, len(found.raw_s), len(found.kdn_s)) == (300_000, 2, 2)
        assert all(seconds > 0 for seconds in (*found.raw_s, *found.kdn_s, found.of_raw))
        assert await listed(store) == []

    asyncio.run(test())


def test_ratios_are_of_the_same_round() -> None:
    assert S3Reads(1, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]).ratios == [0.5, 1.0, 1.5]


def test_a_wrong_byte_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store = open_object_store(f"file://{tmp_path}/kdn")
        read_into = store.read_into

        async def wrong(asks: list[object], receiver: Receiver) -> None:
            await read_into(asks, receiver)  # type: ignore[arg-type]
            receiver.room(0, 5, 1)[0] ^= 1

        monkeypatch.setattr(store, "read_into", wrong)
        with pytest.raises(StoreError, match="a byte"):
            await measure_reads(store, chunks=2, chunk_bytes=1000, rounds=1)

    asyncio.run(test())
