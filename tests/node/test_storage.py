"""A whole node as `kdn node` opens it: tiers, restarts, retention by name, another node behind."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kdn.config import Config
from kdn.errors import StoreError, UnsupportedError
from kdn.node.server import listen, open_node
from tests.node.harness import Running, checksum, chunk_stream, config_for, key_of, run, tenant


@asynccontextmanager
async def whole(config: Config) -> AsyncIterator[Running]:
    async with (
        open_node(config) as node,
        listen(config, node) as listening,
        aiohttp.ClientSession() as session,
    ):
        yield Running(listening, session)


async def found(node: Running, *numbers: int, token: str | None = None) -> list[int]:
    return [
        n for n in numbers
        if (await node.ask("GET", f"/v1/chunks/{key_of(n).hex()}", token=token))[0] == 200
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [{}, {"memory_bytes": 0}, {"memory_bytes": 50_000}])
def test_data_survives_a_restart(tmp_path: Path, sizes: dict[str, int]) -> None:
    async def work() -> None:
        config = config_for(tmp_path, **sizes)
        async with whole(config) as node:
            streams = {n: await node.put_chunk(n, 20_000) for n in range(5)}
            assert (await node.ask("PUT", "/v1/names/n", b"{}"))[0] == 201
        async with whole(config) as node:
            for number, stream in streams.items():
                url = f"/v1/chunks/{key_of(number).hex()}"
                assert (await node.ask("GET", url))[2] == stream
            assert (await node.ask("GET", "/v1/names/n"))[0] == 200

    run(work())


def test_what_a_name_uses_is_not_evicted(tmp_path: Path) -> None:
    """Room for about five chunks: the two that are named outlive twenty others, and a restart."""
    config = config_for(tmp_path, memory_bytes=0, disk_bytes=130_000, policy="lru")

    async def work() -> None:
        async with whole(config) as node:
            for number in (1, 2, 3):
                await node.put_chunk(number, 20_000)
            keys = [key_of(n).hex() for n in (1, 2)]
            manifest = json.dumps({"models": {"aa": {"chunks": keys}}}).encode()
            assert (await node.ask("PUT", "/v1/names/n", manifest))[0] == 201
            for number in range(10, 20):
                await node.put_chunk(number, 20_000)
            assert await found(node, 1, 2, 3) == [1, 2]
        async with whole(config) as node:
            for number in range(20, 30):
                await node.put_chunk(number, 20_000)
            assert await found(node, 1, 2) == [1, 2]
            assert (await node.ask("DELETE", "/v1/names/n"))[0] == 200
            for number in range(30, 40):
                await node.put_chunk(number, 20_000)
            assert await found(node, 1, 2) == []

    run(work())


def test_deletion_reaches_every_tier(tmp_path: Path) -> None:
    async def work() -> None:
        config = config_for(tmp_path)
        async with whole(config) as node:
            await node.put_chunk(1)
            assert await found(node, 1) == [1]
            assert (await node.ask("DELETE", f"/v1/chunks/{key_of(1).hex()}"))[0] == 204
            assert await found(node, 1) == []
        async with whole(config) as node:
            assert await found(node, 1) == []

    run(work())


def test_a_replacement_reaches_every_tier(tmp_path: Path) -> None:
    async def work() -> None:
        async with whole(config_for(tmp_path / "behind")) as behind:
            config = config_for(tmp_path / "front", upstream=behind.url)
            new = chunk_stream(key_of(1), seed=8)
            url = f"/v1/chunks/{key_of(1).hex()}"
            async with whole(config) as front:
                await front.put_chunk(1)
                etag = (await front.ask("HEAD", url))[1]["ETag"]
                sent = {"Kdn_Checksum": checksum(new), "If_Match": etag}
                assert (await front.ask("PUT", url, new, **sent))[0] == 200
                assert (await front.ask("GET", url))[2] == new
            async with whole(config) as front:  # nothing in memory
                assert (await front.ask("GET", url))[2] == new
            shutil.rmtree(tmp_path / "front")
            async with whole(config) as front:  # nothing on disk
                assert (await front.ask("GET", url))[2] == new

    run(work())


def test_a_folder_in_use_and_a_folder_that_is_none(tmp_path: Path) -> None:
    async def work() -> None:
        async with whole(config_for(tmp_path)):
            with pytest.raises(StoreError):
                async with open_node(config_for(tmp_path)):
                    pass
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="data folder"):
            async with open_node(config_for(tmp_path / "file")):
                pass
        with pytest.raises(UnsupportedError, match="nowhere"):
            async with open_node(config_for(tmp_path / "x", memory_bytes=0, disk_bytes=0)):
                pass
        with pytest.raises(UnsupportedError, match="policy"):
            async with open_node(config_for(tmp_path / "y", policy="random")):
                pass

    run(work())


async def put_status(node: Running, number: int, size_bytes: int, token: str | None) -> int:
    """201 if it was put; the answer's status if not."""
    body = chunk_stream(key_of(number), size_bytes, seed=number)
    path = f"/v1/chunks/{key_of(number).hex()}"
    headers = {"Kdn_Checksum": checksum(body), "Kdn_Saved_Seconds": "1e9"}
    status, _, _ = await node.ask("PUT", path, body, token, **headers)
    return status


@pytest.mark.parametrize("memory_bytes", [0, 2**20])
def test_a_quota_holds_across_a_restart(tmp_path: Path, memory_bytes: int) -> None:
    mine = tenant("ann", "a", quota_bytes=100_000)
    config = config_for(tmp_path, mine, tenant("bob", "b"), memory_bytes=memory_bytes)

    async def work() -> None:
        async with whole(config) as node:
            assert [await put_status(node, n, 30_000, "a") for n in range(4)] == [201] * 3 + [507]
        async with whole(config) as node:
            assert await put_status(node, 4, 30_000, "a") == 507
            assert await put_status(node, 4, 30_000, "b") == 201
            stats = json.loads((await node.ask("GET", "/v1/stats", token="a"))[2])
            assert (stats["objects"], stats["size_bytes"] > 90_000) == (3, True)
            url = f"/v1/chunks/{key_of(1).hex()}"
            assert (await node.ask("DELETE", url, token="a"))[0] == 204
            assert await put_status(node, 4, 30_000, "a") == 201

    run(work())


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_flood_of_one_tenant_evicts_nothing_of_another(
    tmp_path: Path, policy: str, tier: str
) -> None:
    """Room for ten chunks: a tenant that keeps within its half loses nothing, whatever another
    puts, says it saves, and names."""
    sizes = {"memory_bytes": 0, "disk_bytes": 0} | {f"{tier}_bytes": 256_000}
    tenants = tenant("ann", "a"), tenant("bob", "b")
    config = config_for(tmp_path, *tenants, policy=policy, **sizes)
    flood = range(100, 160)

    async def work() -> None:
        async with whole(config) as node:
            keys = [key_of(n).hex() for n in flood]
            manifest = json.dumps({"models": {"aa": {"chunks": keys}}}).encode()
            assert (await node.ask("PUT", "/v1/names/n", manifest, "a"))[0] == 201
            before = [await put_status(node, n, 20_000, "a") for n in flood[:20]]
            assert before.count(201) >= 9, "what nobody else wants may be used"
            for number in range(4):
                await node.put_chunk(number, 20_000, token="b")
            for number in flood[20:]:
                await put_status(node, number, 20_000, "a")
            assert await found(node, *range(4), token="b") == list(range(4))

    run(work())


def test_a_full_disk_is_told_and_leaves_nothing_in_memory(tmp_path: Path) -> None:
    async def work() -> None:
        async with whole(config_for(tmp_path, memory_bytes=2**20, disk_bytes=50_000)) as node:
            assert await put_status(node, 1, 60_000, None) == 507
            assert await found(node, 1) == []
            assert await put_status(node, 1, 5_000, None) == 201

    run(work())


def test_no_space(tmp_path: Path) -> None:
    async def work() -> None:
        async with whole(config_for(tmp_path, memory_bytes=0, disk_bytes=50_000)) as node:
            body = chunk_stream(key_of(1), 60_000)
            status, _, said = await node.ask(
                "PUT", f"/v1/chunks/{key_of(1).hex()}", body, Kdn_Checksum=checksum(body)
            )
            assert (status, json.loads(said)["code"]) == (507, "no_space")
            await asyncio.gather(*(node.put_chunk(n, 5000) for n in range(20)))

    run(work())
